"""Calls with another number of rows than the cache has, and ways to change a cache's rows."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from manifoldkv import CompressionPlan, Quantization, compressed
from manifoldkv.cache import CompressedCache
from manifoldkv.cache.storage import ExactStore, GrowingTensor, Store
from manifoldkv.cache.stores import store_for
from manifoldkv.coding.trellis import TrellisCoded
from manifoldkv.errors import CacheError
from manifoldkv.kernels import decode
from tests.cache.test_compressed import LONG, assert_equal, in_pieces, padded_batch
from tests.cache.test_without_numba import without_numba
from tests.families import tiny_model, tiny_tokens
from tests.plans import designed_plan, random_plan

QUANTIZATIONS = {
    "static": Quantization(4, "static", group_size=4),
    "token": Quantization(4, "token", group_size=4),
    "kivi": Quantization(2, "kivi", group_size=4, residual=3),
}
DESIGNED = ("chain", "trellis chain")
PLANS = ("pre", "post", "sinks", *QUANTIZATIONS, *DESIGNED)
GREEDY: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}


@cache
def model_and_plan(kind: str) -> tuple[PreTrainedModel, CompressionPlan]:
    model = tiny_model("llama", torch.float32)
    if kind in DESIGNED:
        return model, designed_plan(model, kind)
    rotary = "post" if kind == "post" else "pre"
    sinks = 3 if kind == "sinks" else 0
    quantization = QUANTIZATIONS.get(kind)
    return model, random_plan(model, rotary=rotary, sinks=sinks, quantization=quantization)


def contents(cache: CompressedCache) -> list[Tensor]:
    """Copies of all that a cache holds."""
    parts = [p for layer in cache.layers for store in layer.stores for p in store.parts]
    return [p.view.clone() for p in (*parts, cache._positions) if p.rows is not None]


def refused(cache: CompressedCache, given: int, call: Callable[[], object]) -> None:
    """A call with some rows names them and those of the cache, and leaves it as it was."""
    before, tokens = contents(cache), cache.get_seq_length()
    with pytest.raises(CacheError, match=f"cache has {cache.rows} rows and the new .* {given}:"):
        call()
    assert cache.get_seq_length() == tokens
    assert all(map(torch.equal, contents(cache), before))


ROWS = [(2, 4), (4, 2), (1, 2), (2, 1)]
CASES = [("compiled", kind, *rows) for kind in PLANS for rows in ROWS]
CASES += [("torch", kind, *rows) for kind in DESIGNED for rows in ROWS[:2]]
CASES += [("interpreter", "chain", 2, 1)]  # which takes half a minute of trellis-coded latents


@pytest.mark.parametrize(("machine", "kind", "held", "given"), CASES)
def test_another_number_of_rows_is_refused(
    machine: str, kind: str, held: int, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if machine == "interpreter":
        triton = pytest.importorskip("triton")
        if not triton.knobs.runtime.interpret:
            pytest.skip("the interpreter is for machines without a CUDA device")
        monkeypatch.setattr(decode, "GPUS", ("cpu",))
    model, plan = model_and_plan(kind)
    tokens = tiny_tokens(4, LONG)
    kernels: AbstractContextManager[None] = without_numba() if machine == "torch" else nullcontext()
    with kernels, compressed(model, plan) as new_cache, torch.no_grad():
        cache = new_cache()
        for piece in (tokens[:held, :7], tokens[:held, 7:8]):
            model(piece, past_key_values=cache)
        for count in (1, 3):
            new = tokens[:given, 8 : 8 + count]
            embedded = model.get_input_embeddings()(new)
            refused(cache, given, lambda new=new: model(new, past_key_values=cache))
            refused(cache, given, lambda x=embedded: model(inputs_embeds=x, past_key_values=cache))
        found = model(tokens[:held, 8:9], past_key_values=cache).logits
        expected = model(tokens[:held, :9], past_key_values=new_cache()).logits[:, -1:]
    assert (found - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("kind", ["sinks", "kivi", "chain"])
class TestEveryWayIn:
    def test_beams_and_returned_sequences(self, kind: str) -> None:
        model, plan = model_and_plan(kind)
        tokens = tiny_tokens(2, LONG)
        with compressed(model, plan) as new_cache, torch.no_grad():
            for more in ({"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}):
                cache = new_cache()
                model(tokens[:, :-1], past_key_values=cache)
                settings = GREEDY | more | {"past_key_values": cache}
                refused(cache, 4, lambda s=settings: model.generate(tokens, **s))

    def test_beams_after_the_cache_was_repeated(self, kind: str) -> None:
        model, plan = model_and_plan(kind)
        tokens = tiny_tokens(2, LONG)
        with compressed(model, plan) as new_cache, torch.no_grad():
            expected = model.generate(tokens, num_beams=2, **GREEDY)
            cache = new_cache()
            in_pieces(model, cache, tokens, [1] * (LONG - 1))
            cache.batch_repeat_interleave(2)
            found = model.generate(tokens, num_beams=2, past_key_values=cache, **GREEDY)
        assert torch.equal(found, expected)

    def test_a_stock_cache_that_was_taken_over(self, kind: str) -> None:
        model, plan = model_and_plan(kind)
        tokens, stock = tiny_tokens(3, LONG), DynamicCache(config=model.config)
        with torch.no_grad():
            model(tokens[:2, :8], past_key_values=stock)
        for prefill in ("exact", "compressed"):
            with compressed(model, plan, prefill=prefill) as new_cache, torch.no_grad():
                cache = new_cache(stock)
                refused(cache, 3, lambda c=cache: model(tokens[:, 8:], past_key_values=c))


class TestPositionsAndMasks:
    """The model would broadcast what is computed from them."""

    @pytest.mark.parametrize("kind", ["sinks", "post", "chain"])
    @pytest.mark.parametrize("rows", [1, 2])
    @pytest.mark.parametrize("past", [0, 5])
    def test_other_rows_are_refused(self, kind: str, rows: int, past: int) -> None:
        model, plan = model_and_plan(kind)
        tokens = tiny_tokens(rows, LONG)
        with compressed(model, plan) as new_cache, torch.no_grad():
            cache = new_cache()
            model(tokens[:, :past], past_key_values=cache) if past else None
            before = contents(cache)
            positions = torch.arange(past, LONG).expand(4, -1)
            mask = torch.ones(4, LONG, dtype=torch.int64)
            causal = torch.ones(LONG, LONG, dtype=torch.bool).tril()[past:].expand(4, 1, -1, -1)
            for more, said in (
                ({"position_ids": positions}, rf"are \(4, {LONG - past}\), must be \(1, "),
                ({"position_ids": positions[:rows, 1:]}, "one for every new token"),
                ({"attention_mask": mask}, f"mask has 4 rows and the new tokens {rows}"),
                ({"attention_mask": causal}, f"mask has 4 rows and the new tokens {rows}"),
            ):
                with pytest.raises(CacheError, match=said):
                    model(tokens[:, past:], past_key_values=cache, **more)
                assert cache.get_seq_length() == past
                assert all(map(torch.equal, contents(cache), before))
            expected = in_pieces(model, new_cache(), tokens, [past, LONG - past])
            found = in_pieces(model, cache, tokens, [LONG - past])
        assert_equal(found, expected[:, past:])

    def test_an_empty_cache_takes_positions_of_any_number_of_rows(self) -> None:
        model, plan = model_and_plan("pre")
        tokens, mask, positions = padded_batch(4)
        with compressed(model, plan) as new_cache, torch.no_grad():
            cache = new_cache()
            model(tokens, past_key_values=cache)  # of which positions are those of one row
            cache.crop(-LONG)
            inputs = {"attention_mask": mask, "position_ids": positions}
            found = in_pieces(model, cache, tokens, [LONG], **inputs)
            expected = in_pieces(model, new_cache(), tokens, [LONG], **inputs)
        assert_equal(found, expected)


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("start", [1, 9])
def test_rows_are_chosen_as_in_a_stock_cache(kind: str, start: int) -> None:
    model, plan = model_and_plan(kind)
    tokens = tiny_tokens(3, LONG)
    choices: list[tuple[Callable[[CompressedCache], None], list[int]]] = [
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda c: c.batch_select_indices(torch.tensor([2, -3])), [2, 0]),
        (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda c: c.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
    ]
    with compressed(model, plan) as new_cache, torch.no_grad():
        for choose, rows in choices:
            empty, cache = new_cache(), new_cache()
            choose(empty)  # no rows
            model(tokens[:, :start], past_key_values=cache)
            choose(cache)
            assert cache.rows == len(rows)
            found = in_pieces(model, cache, tokens[rows], [1, LONG - start - 1])
            expected = in_pieces(model, empty, tokens[rows], [start, 1, LONG - start - 1])[
                :, start:
            ]
            difference = (found - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))
            assert difference.median() < 1e-4  # a code on a boundary may be another one


@pytest.mark.parametrize("kind", ["sinks", "kivi", "chain"])
def test_rows_that_there_are_not_cannot_be_chosen(kind: str) -> None:
    model, plan = model_and_plan(kind)
    with compressed(model, plan) as new_cache, torch.no_grad():
        cache = new_cache()
        model(tiny_tokens(2, LONG), past_key_values=cache)
        before = contents(cache)
        for indices in (torch.tensor([0, 2]), torch.tensor([True, False, False, False])):
            for choose in (cache.batch_select_indices, cache.reorder_cache):
                with pytest.raises(IndexError, match="2"):
                    choose(indices)
        assert all(map(torch.equal, contents(cache), before))


@dataclass(frozen=True)
class Site:
    """A store of 2 head groups or 1, of some features."""

    store: Store
    groups: int
    features: int


def sites(device: str) -> list[Site]:
    on, found = torch.device(device), [Site(ExactStore(), 2, 8)]
    if device == "cpu":
        model, plan = model_and_plan("chain")
        with compressed(model, plan) as new_cache:
            found.append(Site(new_cache().layers[0].key_store, 1, plan.layers[0].key.latents))
    for kind in QUANTIZATIONS:
        _, plan = model_and_plan(kind)
        planned = plan.layers[0].value
        found.append(Site(store_for(planned.quantizer, 4, torch.float32, on), 2, 4))
    bits = torch.tensor([2.0, 1.5, 1.0, 0.0])
    trellis = TrellisCoded(bits, *(torch.ones(4) for _ in range(3)))
    return [*found, Site(store_for(trellis, 4, torch.float32, on), 1, 4)]


@pytest.mark.parametrize("interpreted", [False, True])
def test_stores_refuse_tokens_of_another_shape(
    interpreted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if interpreted:
        pytest.importorskip("triton")
        monkeypatch.setattr(decode, "GPUS", ("cpu", "cuda"))
    for site in sites("cuda" if torch.cuda.is_available() and interpreted else "cpu"):
        store = site.store
        store.append(torch.randn(2, site.groups, 9, site.features))
        before = [part.view.clone() for part in store.parts]
        for batch, groups, features in (
            (4, site.groups, site.features),
            (1, site.groups, site.features),
            (2, 3, site.features),
            (2, site.groups, site.features + 1),
            (2, site.groups, site.features - 2),  # one less is what is stored of trellis-coded ones
        ):
            for append in (store.append, store.append_and_read):
                with pytest.raises(CacheError, match=r"rows|features"):
                    append(torch.randn(batch, groups, 2, features))
                assert len(store) == 9
                assert all(
                    torch.equal(part.view, x) for part, x in zip(store.parts, before, strict=True)
                )


class TestGrowingTensor:
    @pytest.mark.parametrize("dim", [2, 3])
    def test_another_shape_is_refused(self, dim: int) -> None:
        tensor, tokens = GrowingTensor(dim=dim), torch.randn(2, 3, 4, 4)
        tensor.append(tokens)
        for shape in ((1, 3, 4, 4), (4, 3, 4, 4), (2, 1, 4, 4), (2, 3, 1, 4), (2, 3, 4, 1)):
            if shape[dim] == 1:
                continue  # fewer tokens
            for add in (tensor.append, lambda x: tensor.extend(x, 2)):
                with pytest.raises(CacheError, match=r"rows|heads"):
                    add(torch.randn(shape))
        assert torch.equal(tensor.view, tokens)

    def test_a_view_ends_with_the_tokens(self) -> None:
        tensor = GrowingTensor(dim=3)
        tensor.append(torch.arange(2 * 5 * 7).view(2, 1, 5, 7))
        flat, batch, row = tensor.flat(2, 3)
        assert len(flat) == batch + 4 * row + 3
        assert flat[-1] == tensor.view[1, 0, 4, 4]
        for first, count in ((0, 8), (5, 3), (-1, 2), (8, 0)):
            with pytest.raises(CacheError, match="not among 7"):
                tensor.flat(first, count)
