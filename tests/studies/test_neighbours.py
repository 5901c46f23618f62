"""Neighbouring methods: the law that makes each the method of its paper, and counted bytes."""

import copy
import zlib
from functools import partial
from itertools import combinations, product
from math import ceil
from pathlib import Path

import numpy as np
import pytest
import torch
from methods import METHODS, Method, Setting
from methods.aatc import Channels, outputs_of, queries_of, rounded, water_filled
from methods.aqua import AquaKV
from methods.cq import CoupledQuantization, gradients_of
from methods.grids import lloyd, lloyd_max, nearest_word, plane_codebook, randomized_hadamard
from methods.groups import Group, allocated, codes_of, decoded, stored
from methods.higgs import Higgs
from methods.kvtc import KVTC, principal_of
from methods.turboquant import TurboQuant, reconstructed
from methods.windows import WindowMethod
from methods.xkv import axes_of, projected
from scipy.linalg import hadamard
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, PreTrainedModel

from manifoldkv.core.errors import ArgumentError, ModelError
from manifoldkv.evaluate import perplexity
from manifoldkv.evaluate.retrieval import Prompts
from manifoldkv.models.support import attention_of, decoder_layers
from manifoldkv.plan.formats.planes import BitPlanes
from tests.families import tiny_model, tiny_tokens

LENGTH = 24
WINDOWED = ("aqua-kv", "kvtc", "xkv", "aatc", "cq")


def model_of(family: str = "llama") -> PreTrainedModel:
    return tiny_model(family, dtype=torch.float32)


def setting_of(model: PreTrainedModel) -> Setting:
    return Setting(model, tiny_tokens(8, LENGTH), LENGTH, "pre", 0, Path())


def method_of(name: str, ratio: float, model: PreTrainedModel | None = None) -> Method:
    return METHODS.get(name)(setting_of(model or model_of()), ratio)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(codes: Tensor, bits: int) -> bytes:
    """Codes of a token and block, packed as a cache would hold them."""
    planes = BitPlanes([bits] * codes.shape[-1], codes.device)
    return planes.pack(codes.unsqueeze(-1)).numpy().tobytes()


@pytest.mark.parametrize(
    ("bits", "error", "of_pairs"),
    [(1, 0.3634, None), (2, 0.1175, 0.1077), (3, 0.03454, 0.02964), (4, 0.009497, 0.007773)],
)
def test_codebooks_are_those_of_max_and_of_higgs(
    bits: int, error: float, of_pairs: float | None
) -> None:
    """Max, 1960, table I; errors of the codebooks of pairs that are released with AQUA-KV."""
    x = gaussian(1 << 17, 2)
    words = lloyd_max(bits)
    scalar = words[nearest_word(x.view(-1, 1), words.unsqueeze(1))].view_as(x)
    assert float((scalar - x).square().mean()) == pytest.approx(error, rel=0.02)
    if of_pairs is not None:
        pairs = plane_codebook(bits)[nearest_word(x, plane_codebook(bits))]
        assert 4.0**-bits < float((pairs - x).square().mean()) < 0.96 * error
        assert float((pairs - x).square().mean()) == pytest.approx(of_pairs, rel=0.02)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_higgs_has_one_error_whatever_the_features_are(bits: int) -> None:
    """A rotated block is Gaussian, even where a single feature has all the power."""
    form = Higgs(features=192, bits=bits, seed=0)
    assert form.block == 64
    rotation = randomized_hadamard(64, 0)
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(64))
    spread = gaussian(512, 192)
    heavy = spread.sign() * spread.abs() ** 6
    every = (spread, heavy, 1000 * spread, spread * torch.logspace(-1, 1, 192))
    errors = [float((form.reconstruct(x) - x).square().sum() / x.square().sum()) for x in every]
    best = float(
        (
            plane_codebook(bits)[nearest_word(spread.view(-1, 2), plane_codebook(bits))].view_as(
                spread
            )
            - spread
        )
        .square()
        .mean()
    )
    assert errors == pytest.approx([best] * 4, rel=0.2)
    assert torch.equal(form.reconstruct(torch.zeros(2, 192)), torch.zeros(2, 192))


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_higgs_counts_the_bytes_of_packed_codes_and_scales(bits: int) -> None:
    form, x = Higgs(features=192, bits=bits, seed=0), gaussian(5, 192)
    codes, scales = form.encode(x)
    by_block = codes.unflatten(-1, (-1, form.block // 2))
    held = sum(len(packed(block, 2 * bits)) for token in by_block for block in token)
    assert held + scales.nbytes == 5 * form.nbytes
    assert torch.equal(form.decode(codes, scales), form.reconstruct(x))
    method = method_of("higgs", bits / 16)
    assert method.nbytes(7) == 3 * 2 * 7 * Higgs(16, bits, 0).nbytes


def test_turboquant_keeps_norms_and_is_vllms_arithmetic() -> None:
    """One key after the other in NumPy, as vLLM's kernels store and read it."""
    keys = gaussian(20, 8) * torch.logspace(-2, 2, 20).unsqueeze(1)
    held = reconstructed(keys, 3)
    turn = hadamard(8) / 8**0.5
    words = lloyd_max(3).numpy() / 8**0.5
    for key, of_key in zip(keys.numpy(), held.numpy(), strict=True):
        norm = np.linalg.norm(key)
        codes = [np.abs(words - y).argmin() for y in key / norm @ turn]
        direction = words[codes] / np.linalg.norm(words[codes])
        assert of_key == pytest.approx(np.float16(norm) * (direction @ turn.T), rel=1e-4, abs=1e-6)
    torch.testing.assert_close(held.norm(dim=1), keys.norm(dim=1), rtol=1e-3, atol=0)


@pytest.mark.parametrize("bits", [4, 3])
def test_turboquant_holds_its_first_and_last_layers_in_16_bits(bits: int) -> None:
    """The middle one of three: d 8 in whole bytes, a norm, and scale and zero of a value."""
    method = method_of("turboquant", bits / 16)
    assert isinstance(method, TurboQuant)
    assert method.nbytes(10) == 10 * 2 * (2 * 2 * 8 * 2 + (bits + 2) + (bits + 4))
    cache, x = method.new_cache(), gaussian(2, 2, 5, 8)
    exact = [all(map(partial(torch.equal, x), cache.update(x, x, layer))) for layer in range(3)]
    assert exact == [True, False, True]


def test_turboquant_refuses_heads_that_no_hadamard_matrix_fits() -> None:
    model = tiny_model("llama", head_dim=12)
    with pytest.raises(ModelError, match="have 12 features"):
        method_of("turboquant", 0.25, model)


class Halved(WindowMethod):
    """Codes that lose half of everything, so that an oracle needs neither codes nor rotations."""

    sinks, recent = 2, 6

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys / 2, values / 2

    def coded_bytes(self, tokens: int) -> int:
        return tokens


class Whole(Halved):
    """Codes that lose nothing."""

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys, values


@torch.no_grad()
def token_by_token(model: PreTrainedModel, text: Tensor, sinks: int, recent: int) -> Tensor:
    """Logits of a text (1, n), each token read alone from a cache with halved tokens."""
    exact, logits = DynamicCache(config=model.config), []
    for token, ids in enumerate(text.split(1, dim=1)):
        cache = copy.deepcopy(exact)
        for layer in cache.layers if token else []:
            layer.keys[..., sinks : max(sinks, token - recent + 1), :] /= 2
            layer.values[..., sinks : max(sinks, token - recent + 1), :] /= 2
        logits.append(model(input_ids=ids, past_key_values=cache).logits)
        for index, layer in enumerate(cache.layers):
            exact.update(layer.keys[..., -1:, :], layer.values[..., -1:, :], index)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "phi3-partial"])
def test_a_text_is_read_as_token_by_token(family: str) -> None:
    """First and newest tokens uncompressed for every query, and rotation undone and redone."""
    model, tokens = tiny_model(family), tiny_tokens(2, LENGTH)
    halved = Halved(setting_of(model), 0.5)
    measured, whole = halved.perplexity(tokens), Whole(setting_of(model), 0.5).perplexity(tokens)
    assert whole.by_sequence == pytest.approx(perplexity(model, tokens).by_sequence, rel=1e-6)
    for text, mine in zip(tokens.split(1), measured.by_sequence, strict=True):
        logits = token_by_token(model, text, Halved.sinks, Halved.recent)
        assert mine == pytest.approx(float(cross_entropy(logits[0, :-1], text[0, 1:])), rel=1e-6)
    assert measured.nll != pytest.approx(whole.nll, rel=1e-3)


def test_a_prompt_is_held_with_first_and_newest_tokens_uncompressed() -> None:
    model, ids = tiny_model("llama"), tiny_tokens(2, LENGTH)
    stock = DynamicCache(config=model.config)
    model(input_ids=ids[:, :-1], past_key_values=stock)
    with Halved(setting_of(model), 0.5).holder(model, Prompts(ids, stock)) as new_cache:
        held = new_cache()
    assert held.get_seq_length() == LENGTH - 1
    factors = torch.full((LENGTH - 1, 1), 0.5, dtype=torch.float64)
    factors[: Halved.sinks] = factors[-Halved.recent :] = 1
    for mine, exact in zip(held.layers, stock.layers, strict=True):
        torch.testing.assert_close(mine.keys, factors * exact.keys)
        torch.testing.assert_close(mine.values, factors * exact.values)


def test_uncompressed_tokens_are_counted_and_may_leave_nothing_of_a_ratio() -> None:
    halved = Halved(setting_of(model_of()), 0.5)
    of_token = 3 * 2 * 16 * 2  # layers, K and V, features, bytes
    assert [halved.nbytes(tokens) for tokens in (3, 8, 11)] == [3 * of_token, 8 * of_token, 1539]
    assert halved.facts()["exact_bytes"] == 8 * of_token
    assert halved.budget() == (LENGTH - 8, 4 * of_token)
    with pytest.raises(ArgumentError, match="8 of 24 tokens in 16 bits leave nothing"):
        Halved(setting_of(model_of()), 0.3).budget()


@pytest.fixture
def few_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes most tokens of short texts."""
    for name in WINDOWED:
        monkeypatch.setattr(METHODS.get(name), "recent", 6)


def test_aqua_kv_codes_what_the_reconstructed_layer_below_does_not_predict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers that are linear in the one below: errors neither add up nor are those of HIGGS."""
    keys, values = [gaussian(4, 512, 16)], [gaussian(4, 512, 16, seed=1)]
    for layer in (1, 2):
        keys.append(keys[-1] @ gaussian(16, 16, seed=layer + 1) / 4 + layer)
        values.append((values[-1] + keys[-1]) @ gaussian(16, 16, seed=layer + 3) / 4)
    known = torch.stack(keys), torch.stack(values)
    monkeypatch.setattr("methods.aqua.calibration_of", lambda setting: known)
    method = method_of("aqua-kv", 2 / 16)
    assert isinstance(method, AquaKV)
    for held, exact in zip(method.reconstruct(*known), known, strict=True):
        errors = (held - exact).square().mean(dim=(1, 2, 3)) / exact.var(dim=(1, 2, 3))
        alone = (method.others.reconstruct(exact) - exact).square().mean() / exact.var()
        assert errors[0] == pytest.approx(0.009, rel=0.2)  # four bits
        assert float(errors[1:].max()) < 0.1 * alone
    elements = 2 * (16 * 16 + 16) + 2 * (32 * 16 + 16)
    assert method.facts()["basis_bytes"] == 2 * elements


@pytest.mark.parametrize("bits", [4, 2])
def test_aqua_kv_counts_a_first_layer_of_four_bits(bits: int) -> None:
    of_width = {bits: 16 * bits // 8 + 2 for bits in (4, 2)}
    coded = 10 * 2 * (of_width[4] + 2 * of_width[bits])
    method = method_of("aqua-kv", bits / 16)
    assert method.nbytes(132 + 10) == method.setting.stock_bytes(132) + coded


def linked(features: int = 16) -> tuple[Tensor, Tensor]:
    """Keys and values of three layers, all of which are linear in the first, (3, 4, 512, F)."""
    first = gaussian(4, 512, features), gaussian(4, 512, features, seed=1)
    maps = [gaussian(features, features, seed=seed) / 4 for seed in (2, 3)]
    keys, values = (torch.stack([x, x @ maps[0] + 1, x @ maps[1]]) for x in first)
    return keys, values


def test_kvtc_finds_the_groups_of_least_error() -> None:
    """Against all ways to cover four coordinates by groups of two widths."""
    spans = [(start, stop) for start in range(4) for stop in range(start + 1, 5)]
    groups = [Group(*span, bits) for span in spans for bits in (0, 2)]
    errors = dict(zip(groups, gaussian(len(groups)).abs().tolist(), strict=True))
    covers = [
        cover
        for count in range(1, 5)
        for cover in combinations(groups, count)
        if [x.start for x in cover] == [0, *(x.stop for x in cover[:-1])] and cover[-1].stop == 4
    ]
    for budget in range(0, 140, 10):
        possible = [cover for cover in covers if sum(x.cost for x in cover) <= budget]
        best = min(possible, key=lambda cover: sum(map(errors.__getitem__, cover)))
        assert allocated(errors, 4, budget) == list(best)


@pytest.fixture
def kvtc(monkeypatch: pytest.MonkeyPatch) -> KVTC:
    monkeypatch.setattr(KVTC, "recent", 6)
    monkeypatch.setattr("methods.kvtc.calibration_of", lambda setting: linked())
    method = method_of("kvtc", 0.5)
    assert isinstance(method, KVTC)
    return method


def test_kvtc_spends_nothing_on_layers_that_others_determine(kvtc: KVTC) -> None:
    for groups in kvtc.groups:
        assert 0 < max(group.stop for group in groups if group.bits) <= 16  # of 48
    for held, exact in zip(kvtc.reconstruct(*linked()), linked(), strict=True):
        assert float((held - exact).square().mean() / exact.var()) < 0.01


def test_kvtc_counts_deflate_and_that_is_enough_to_decode(kvtc: KVTC) -> None:
    tokens, left = kvtc.budget()
    assert 0.7 * left < kvtc.coded_bytes(tokens) <= left
    site, groups = principal_of(kvtc.setting)[0], kvtc.groups[0]
    coordinates = site.coordinates[:tokens]
    blob = zlib.decompress(zlib.compress(stored(coordinates, groups), 9))
    for group in groups:
        if group.bits:
            size = tokens * ceil((group.stop - group.start) * group.bits / 8)
            ranges = np.frombuffer(blob[: 4 * tokens], dtype=np.float16).reshape(2, -1, 1)
            packed_codes = np.frombuffer(blob[4 * tokens : 4 * tokens + size], dtype=np.uint8)
            bits = np.unpackbits(packed_codes.reshape(tokens, -1), axis=1)
            bits = bits[:, : (group.stop - group.start) * group.bits]
            codes = bits.reshape(tokens, -1, group.bits) @ (1 << np.arange(group.bits)[::-1])
            held = codes * ranges[1].astype(float) + ranges[0].astype(float)
            expected = decoded(*codes_of(coordinates, group)).numpy()
            assert held == pytest.approx(expected, abs=1e-5)
            blob = blob[4 * tokens + size :]
    assert not blob


def test_xkv_has_the_least_error_of_its_rank_in_layers_side_by_side() -> None:
    """Eckart and Young; three layers in the subspace of one lose nothing at the rank of one."""
    x = gaussian(6, 2, 30, 8)  # layers, texts, tokens, features
    held = projected(x, axes_of(x, [5, 5]))
    for layers in (slice(0, 4), slice(4, 6)):
        for text in range(2):
            joined = torch.cat(list(x[layers, text]), dim=1)
            lost = (torch.cat(list(held[layers, text]), dim=1) - joined).square().sum()
            tail = torch.linalg.svdvals(joined)[5:].square().sum()
            torch.testing.assert_close(lost, tail, rtol=1e-4, atol=0)
    keys = linked()[0] - torch.tensor([0, 1, 0]).view(3, 1, 1, 1)
    torch.testing.assert_close(projected(keys, axes_of(keys, [16])), keys, rtol=0, atol=1e-4)


def test_xkv_counts_both_factors_of_every_text() -> None:
    method = method_of("xkv", 0.9)
    method.recent = 6  # type: ignore[attr-defined]
    (keys,), (values,) = method.ranks  # type: ignore[attr-defined]
    assert values > keys > 0
    exact, coded = 6, LENGTH - 6
    factors = (keys + values) * (coded + 3 * 16)
    assert method.nbytes(LENGTH) == 2 * (exact * 3 * 2 * 16 + factors)


@pytest.mark.parametrize("bits", [0, 1, 7, 20])
def test_aatc_fills_with_water_as_an_exhaustive_search_does(bits: int) -> None:
    scores = torch.tensor([5.0, 0.3, 90.0, 1.0])
    found = water_filled(scores, bits)
    every = [torch.tensor(x) for x in product(range(9), repeat=4) if sum(x) <= bits]
    best = min(float((scores * 0.25**x).sum()) for x in every)
    assert int(found.sum()) == bits
    assert float((scores * 0.25**found).sum()) == pytest.approx(best)


def test_aatc_loses_nothing_but_by_rounding() -> None:
    """Axes at full rank: of 16 bits, errors are those of the scale in float16."""
    x = gaussian(2, 3, 200, 16) * torch.logspace(-2, 2, 16)
    channels = Channels.of(x.flatten(1, 2), torch.eye(16).expand(2, 16, 16), normalized=False)
    for bits, error in ((16, 1e-3), (8, 2e-2)):
        widths = torch.full((2, 16), bits)
        coordinates = (rounded(x, channels, widths) - x) @ channels.axes.unsqueeze(1)
        assert float((coordinates / channels.units[:, None, None]).abs().max()) < error
    cut = torch.full((2, 16), 16)
    cut[:, :8] = 0  # channels of least power
    lost = (rounded(x, channels, cut) - x).square().sum() / x.square().sum()
    assert 0 < lost < 1e-3


def test_aatc_weighs_keys_by_queries_and_values_by_the_output_projection() -> None:
    model = model_of()
    setting, seen = setting_of(model), []
    attention = attention_of(decoder_layers(model)[1])
    hook = attention.q_proj.register_forward_hook(lambda module, args, out: seen.append(out))
    model(input_ids=setting.calibration)
    hook.remove()
    queries = seen[0].flatten(0, 1).unflatten(1, (4, 8))
    error = gaussian(16)
    by_head = error.view(2, 8).repeat_interleave(2, dim=0)  # two query heads of a KV head
    scores = (queries * by_head).sum(dim=2)
    cost = error @ queries_of(setting)[1] @ error
    torch.testing.assert_close(cost, scores.square().sum(dim=1).mean(), rtol=1e-4, atol=0)
    outputs = [attention.o_proj.weight[:, 8 * h : 8 * h + 8] @ by_head[h] for h in range(4)]
    cost = error @ outputs_of(setting)[1] @ error
    torch.testing.assert_close(cost, torch.stack(outputs).square().sum(), rtol=1e-4, atol=0)


def test_words_of_a_codebook_are_the_weighted_means_of_their_points() -> None:
    """A fixed point of Lloyd's algorithm, whose weighted error never grows on the way."""
    points, weights = gaussian(3, 500, 2), gaussian(3, 500, seed=1).square()
    words, errors = points[:, :8].clone(), []
    for _ in range(60):
        nearest = nearest_word(points, words).unsqueeze(2).expand(-1, -1, 2)
        squares = (points - words.gather(1, nearest)).square().sum(dim=2)
        errors.append(float((weights * squares).sum()))
        words = lloyd(points, weights, words, 1)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.8 * errors[0]
    for group in range(3):
        of_word = torch.cdist(points[group], words[group]).argmin(dim=1)
        for index, word in enumerate(words[group]):
            mine = of_word == index
            mean = weights[group, mine] @ points[group, mine] / weights[group, mine].sum()
            torch.testing.assert_close(word, mean, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layer", [0, 2])
def test_cq_weighs_tokens_by_the_gradients_of_keys_before_rotation_and_values(layer: int) -> None:
    """Those of the outputs of the projections, without hooks in attention."""
    model, ids = model_of(), tiny_tokens(1, LENGTH)
    attention, outputs = attention_of(decoder_layers(model)[layer]), []
    for projection in (attention.k_proj, attention.v_proj):
        hook = projection.register_forward_hook(lambda module, args, out: outputs.append(out))
        try:
            model.requires_grad_(requires_grad=True)
            logits = model(input_ids=ids).logits
        finally:
            hook.remove()
        loss = cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
        outputs[-1] = torch.autograd.grad(loss, outputs[-1])[0]
    for mine, expected in zip(gradients_of(setting_of(model), ids), outputs, strict=True):
        torch.testing.assert_close(mine[layer], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 2, 1])
def test_cq_codes_a_few_channels_in_a_byte(bits: int) -> None:
    method = method_of("cq", bits / 16)
    assert isinstance(method, CoupledQuantization)
    codes = 3 * 2 * 16 * bits // 8  # layers, sites, features
    assert method.nbytes(132 + 10) == method.setting.stock_bytes(132) + 10 * codes
    assert [x.shape for x in method.codebooks] == [(3, 16 * bits // 8, 256, 8 // bits)] * 2
    keys, values = gaussian(3, 2, 5, 16), gaussian(3, 2, 5, 16, seed=1)
    held = method.reconstruct(keys, values)
    for x, again, words in zip(held, method.reconstruct(*held), method.codebooks, strict=True):
        torch.testing.assert_close(again, x)  # words are coded as themselves
        chosen = x[1, 0, 3].unflatten(0, (-1, 8 // bits))
        for group, word in enumerate(chosen):
            assert (words[1, group] == word).all(dim=1).any()


@pytest.mark.usefixtures("few_exact")
@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_method_meets_its_ratio_and_says_what_its_bases_take(name: str) -> None:
    method = method_of(name, 0.25 if name in ("aqua-kv", "cq") else 0.8)
    assert isinstance(method, WindowMethod)
    of_stock = method.nbytes(LENGTH) / method.setting.stock_bytes(LENGTH)
    assert 0.55 < of_stock <= 0.8
    facts = method.facts()
    assert facts["exact_bytes"] == method.exact_bytes(LENGTH) < method.nbytes(LENGTH)
    assert (facts["basis_bytes"] == 0) == (name == "xkv")


@pytest.mark.usefixtures("few_exact")
@pytest.mark.parametrize("name", ["higgs", "turboquant", *WINDOWED])
def test_most_bits_lose_less_than_fewest(name: str) -> None:
    model, tokens = model_of(), tiny_tokens(24, LENGTH)[8:]  # not those of calibration
    exact = method_of("sinks-recent", 1.0, model).perplexity(tokens)
    assert exact is not None
    lost = []
    for ratio in METHODS.get(name).ratios([0.97, 0.5]):
        measured = method_of(name, ratio, model).perplexity(tokens)
        assert measured is not None
        pairs = zip(measured.by_sequence, exact.by_sequence, strict=True)
        lost.append(sum((mine - other) ** 2 for mine, other in pairs) ** 0.5)
    assert 0 < lost[0] < lost[-1]
