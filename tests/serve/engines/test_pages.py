"""Latents in an engine's pages are attended to as those of a compressed cache."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv import CompressionPlan
from manifoldkv.core.errors import CacheError, PlanError
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.interface import AttentionSettings
from manifoldkv.models.rotary import Angles, rotation_of_keys
from manifoldkv.plan.composition import Composer
from manifoldkv.serve.cache.layers import CompressedCache
from manifoldkv.serve.cache.running import running_attention
from manifoldkv.serve.engines.paged import Batch, PagedCache, check_plan, page_tiles
from manifoldkv.serve.engines.pages import LayerPages, PageLayout, Places, SinkPages
from tests.families import tiny_model
from tests.plans import DESIGNS, designed_plan, random_plan

SIZE, PAGES, SCALING = 32, 16, 0.4
CPU = torch.device("cpu")


def angles_of(model: PreTrainedModel, tokens: int) -> Angles:
    decoder = Decoder.of(model)
    positions = torch.arange(tokens).unsqueeze(0)
    cos, sin = decoder.angles(0, positions, like=torch.empty(0, dtype=model.dtype))
    return Angles(cos, sin, rotation_of_keys(decoder.layers[0], cos.shape[-1]))


@dataclass
class Text:
    """Queries, keys before rotation and values of a text by layer, (L, H, n, d) each."""

    queries: Tensor
    keys: Tensor
    values: Tensor

    def first(self, tokens: int) -> "Text":
        return Text(*(x[:, :, :tokens] for x in (self.queries, self.keys, self.values)))

    def __len__(self) -> int:
        return self.keys.shape[2]


def drawn_text(tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> Text:
    generator = torch.Generator().manual_seed(seed)
    shapes = (3, 4, tokens, 8), (3, 2, tokens, 8), (3, 2, tokens, 8)
    return Text(*(torch.randn(x, generator=generator).to(dtype) for x in shapes))


def expected_of(plan: CompressionPlan, text: Text, angles: Angles) -> Tensor:
    """Attention output of a text at once, (L, n, H_q, d), by a compressed cache."""
    cache = CompressedCache(plan, text.keys.dtype, [CPU] * 3)
    context, outputs, composer = plan.predictor_context(), [], Composer(plan.layers)
    here = angles.of_tokens(0, len(text))
    for index in range(3):
        context.begin(index)
        layers = cache.layers[max(0, index - plan.reach) : index + 1][::-1]
        queries, keys, values = (
            x[index : index + 1] for x in (text.queries, text.keys, text.values)
        )
        attend = running_attention(plan, index, values.dtype, CPU, composer).attend
        queries, keys = (here.tile(x, 0, len(text)) for x in (queries, keys))
        exact = Angles(here.cos.float(), here.sin.float(), here.rotate)
        keys = exact.inverse().tile(keys.float(), 0, len(text))  # an engine has rotated keys
        settings = AttentionSettings(SCALING)
        output = attend(layers, queries, keys, values, None, settings, here, context)
        outputs.append(output[0].transpose(0, 1))
    return torch.stack(outputs)


class Engine:
    """An engine with few pages, which computes new tokens of any texts at a step."""

    def __init__(self, plan: CompressionPlan, angles: Angles, dtype: torch.dtype) -> None:
        self.cache, self.angles = PagedCache(plan, dtype, angles, SCALING), angles
        for index, layer in enumerate(plan.layers):
            layout = PageLayout.of(layer, SIZE)
            noise = torch.randint(0, 255, (PAGES, layout.nbytes), dtype=torch.uint8)
            self.cache.bind(index, layout, noise)

    def step(self, parts: list[tuple[Text, int, int, list[int]]]) -> list[Tensor]:
        """Return the outputs of tokens `past` to `stop` of texts in pages, (L, m, H_q, d) each."""
        counts = [stop - past for _, past, stop, _ in parts]
        starts = [0, *np.cumsum(counts).tolist()]
        tables = np.zeros((len(parts), PAGES), np.int32)
        for row, (*_, pages) in zip(tables, parts, strict=True):
            row[: len(pages)] = pages
        self.cache.begin(Batch(starts, [stop for _, _, stop, _ in parts], tables))
        outputs = []
        for index in range(3):
            new = [self._new(text, index, past, stop) for text, past, stop, _ in parts]
            joined = (torch.cat(x) for x in zip(*new, strict=True))
            outputs.append(self.cache.attend(index, *joined).split(counts))
        return [torch.stack(x) for x in zip(*outputs, strict=True)]

    def _new(self, text: Text, index: int, past: int, stop: int) -> list[Tensor]:
        rotated = [
            self.angles.tile(x[index, None, :, past:stop], past, stop)
            for x in (text.queries, text.keys)
        ]
        return [x[0].transpose(0, 1) for x in (*rotated, text.values[index, None, :, past:stop])]


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Products of other shapes round otherwise, and now and then a latent with them."""
    error = (found.float() - expected.float()).abs()
    tolerance = 1e-4 if found.dtype == torch.float32 else 0.03
    assert float((error > tolerance).float().mean()) < 0.01
    assert float(error.max()) < 0.3


CASES = [("dense", 0), *((kind, 4) for kind in DESIGNS if kind != "dense")]


@pytest.mark.parametrize(("kind", "sinks"), CASES)
def test_texts_in_any_chunks_side_by_side(kind: str, sinks: int) -> None:
    model = tiny_model("llama", torch.float32)
    plan, angles = designed_plan(model, kind, sinks=sinks), angles_of(model, 128)
    texts = [drawn_text(n, seed) for seed, n in enumerate((100, 3, 41))]
    tables = [[9, 2, 12, 5], [7], [3, 11]]
    chunks = [[50, 1, 40, 1, 1, 7], [2, 1], [1, 1, 1, 1, 36, 1]]
    engine, done, found = Engine(plan, angles, torch.float32), [0, 0, 0], [[], [], []]
    for step in range(6):
        part = [i for i in range(3) if step < len(chunks[i])]
        stops = [done[i] + chunks[i][step] for i in part]
        outputs = engine.step(
            [(texts[i], done[i], stop, tables[i]) for i, stop in zip(part, stops, strict=True)]
        )
        for i, stop, output in zip(part, stops, outputs, strict=True):
            found[i].append(output)
            done[i] = stop
    for text, parts in zip(texts, found, strict=True):
        assert_close(torch.cat(parts, dim=1), expected_of(plan, text, angles))


def test_a_model_in_bfloat16() -> None:
    model = tiny_model("llama", torch.bfloat16)
    plan, angles = designed_plan(model, "own keys"), angles_of(model, 64)
    text = drawn_text(50, 0, torch.bfloat16)
    engine = Engine(plan, angles, torch.bfloat16)
    first = engine.step([(text, 0, 49, [4, 3])])[0]
    found = torch.cat([first, engine.step([(text, 49, 50, [4, 3])])[0]], dim=1)
    assert_close(found, expected_of(plan, text, angles))


def test_texts_share_the_pages_of_their_beginning() -> None:
    model = tiny_model("llama", torch.float32)
    plan, angles = designed_plan(model, "keys below"), angles_of(model, 128)
    text, engine = drawn_text(80, 0), Engine(plan, angles, torch.float32)
    other = drawn_text(80, 1)
    for mine, same in (
        (other.queries, text.queries),
        (other.keys, text.keys),
        (other.values, text.values),
    ):
        mine[:, :, :64] = same[:, :, :64]
    engine.step([(text, 0, 80, [1, 2, 3])])
    found = engine.step([(other, 64, 79, [1, 2, 4]), (text, 79, 80, [1, 2, 3])])
    last = engine.step([(other, 79, 80, [1, 2, 4])])
    expected = expected_of(plan, other, angles)
    assert_close(found[0], expected[:, 64:79])
    assert_close(last[0], expected[:, 79:])
    assert_close(found[1], expected_of(plan, text, angles)[:, 79:])
    # The first page goes to the middle of another text: the sink tokens go with it.
    third = drawn_text(40, 2)
    engine.step([(third, 0, 40, [5, 1])])
    with pytest.raises(CacheError, match="page 1 begins a text"):
        engine.step([(text, 79, 80, [1, 2, 3])])


def test_a_page_holds_the_bytes_of_its_tokens() -> None:
    model = tiny_model("llama", torch.float32)
    plan = designed_plan(model, "chain", sinks=0)
    layouts = [PageLayout.of(layer, SIZE) for layer in plan.layers]
    tokens = 7 * SIZE
    nbytes = plan.ratio_at(tokens) * sum(x.full_elements(tokens) for x in plan.layers) * 2
    assert sum(7 * layout.nbytes for layout in layouts) == round(nbytes)


def test_pages_return_what_was_written() -> None:
    layout = PageLayout(SIZE, (5, 3))
    pages = LayerPages(layout, torch.zeros(4, layout.nbytes, dtype=torch.uint8))
    order = torch.tensor([2, 0])
    positions = np.arange(SIZE + 9)
    where = Places(order.numpy()[positions // SIZE], positions % SIZE)
    written = {}
    for site, rows in (("key", 5), ("value", 3)):
        written[site] = torch.randint(0, 255, (1, 1, rows, 41), dtype=torch.uint8)
        pages.write(site, where, written[site])
    for site, codes in written.items():
        assert torch.equal(pages.read(site, order, 41), codes)


def test_tiles_are_the_tokens_of_a_text_once() -> None:
    tables = np.array([[4, 2, 9], [7, 0, 0]], np.int32)
    tiles = page_tiles(tables, [70, 5], SIZE, 4)
    assert tiles.tolist() == [
        [0, 4, 4, 28, 4],
        [0, 2, 0, 32, 32],
        [0, 9, 0, 6, 64],
        [1, 7, 4, 1, 4],
    ]


def test_sink_tokens_keep_their_slots_when_memory_grows() -> None:
    sinks = SinkPages(2, (1, 4, 8), torch.float32)
    for page in range(20):
        slot = sinks.begin_text(page)
        sinks.memory[:, :, slot] = page
    assert [float(sinks.memory[1, 0, sinks.slot_of(p), 0, 0, 0]) for p in range(20)] == [*range(20)]
    size = sinks.nbytes
    sinks.drop(range(10))
    for page in range(30, 40):
        sinks.begin_text(page)
    assert sinks.nbytes == size


def test_refused_plans() -> None:
    model = tiny_model("llama", torch.float32)
    with pytest.raises(PlanError, match="recipe bits"):
        check_plan(random_plan(model, rotary="pre"))
    plan = designed_plan(model, "dense", sinks=0)
    windowed = replace(plan, layers=tuple(replace(x, window=64) for x in plan.layers))
    with pytest.raises(PlanError, match="sliding window of 64"):
        check_plan(windowed)
