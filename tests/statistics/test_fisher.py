"""Fisher information of keys and values: the model's own gradients, and what errors really cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from manifoldkv.models.decoder import Decoder
from manifoldkv.models.rotary import Angles, rotation_of_keys
from manifoldkv.statistics import collect as collecting
from manifoldkv.statistics import fisher, head, placement
from manifoldkv.statistics.capture import capture
from manifoldkv.statistics.collect import collect
from manifoldkv.statistics.fisher import draw
from manifoldkv.statistics.moments import Moments
from manifoldkv.statistics.projected import log_probabilities
from manifoldkv.statistics.statistics import Statistics
from tests.families import FAMILIES, MORE_FAMILIES, tiny_model, tiny_tokens

SITES = ("key", "value")
NORM_TOLERANCE = 1e-4
"""Of the largest element of a matrix: norms compute in float32, forwards and backwards."""
SMOOTH = {"num_experts_per_tok": 2}
"""Of two experts: no small error moves a token from one to the other."""

Change = Callable[[int, str, Tensor], Tensor]
"""Of keys or values (B, H_kv, n, d) of a layer and site."""


@contextmanager
def changed(model: PreTrainedModel, change: Change) -> Iterator[None]:
    """The uncompressed model, with keys and values changed where its linear layers put them out."""
    decoder = Decoder.of(model)
    hooks, heads = [], decoder.kv_heads

    def by_head(index: int, site: str, x: Tensor) -> Tensor:
        if x.ndim == 4 and x.shape[1] == heads:
            return change(index, site, x)
        return flat(index, site, x)

    def flat(index: int, site: str, x: Tensor) -> Tensor:
        split = x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)
        return change(index, site, split).transpose(1, 2).reshape(x.shape)

    def hook(index: int, site: str) -> Callable[..., Tensor]:
        return lambda module, args, output: by_head(index, site, output)

    def fused(index: int) -> Callable[..., Tensor]:
        def on_output(module: object, args: object, output: Tensor) -> Tensor:
            sizes = [output.shape[-1] - 2 * decoder.features, *2 * [decoder.features]]
            queries, keys, values = output.split(sizes, -1)
            keys, values = flat(index, "key", keys), flat(index, "value", values)
            return torch.cat([queries, keys, values], dim=-1)

        return on_output

    for index, attention in enumerate(decoder.attentions):
        if hasattr(attention, "qkv_proj"):
            hooks.append(attention.qkv_proj.register_forward_hook(fused(index)))
            continue
        hooks.append(attention.v_proj.register_forward_hook(hook(index, "value")))
        keys = getattr(attention, "k_norm", attention.k_proj)
        hooks.append(keys.register_forward_hook(hook(index, "key")))
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def by_hand(
    model: PreTrainedModel, tokens: Tensor, seed: int = 0
) -> dict[tuple[int, str], tuple[np.ndarray, np.ndarray]]:
    """Features and gradients of all tokens by layer and site, (S·n, D) each: one backward pass."""
    generator = torch.Generator().manual_seed(seed)
    found, features = {}, {}

    def keep(index: int, site: str, x: Tensor) -> Tensor:
        # A change of nothing, which the model's outputs are differentiated in.
        found[index, site] = torch.zeros_like(x, requires_grad=True)
        features[index, site] = x.detach()
        return x + found[index, site]

    with changed(model, keep):
        log_p = model(input_ids=tokens, use_cache=False).logits.log_softmax(-1)
    total = torch.zeros((), dtype=log_p.dtype)
    for sequence in log_p:
        uniform = torch.rand(len(sequence), generator=generator, dtype=torch.float64)
        for row, number in zip(sequence, uniform.tolist(), strict=True):
            below = np.cumsum(row.detach().double().exp().numpy())
            total = total + row[int((below <= number).sum())]
    total.backward()

    def rows(x: Tensor) -> np.ndarray:
        return np.concatenate([np.concatenate(list(s), axis=1) for s in x.double().numpy()])

    return {place: (rows(features[place]), rows(change.grad)) for place, change in found.items()}


def check(statistics: Statistics, expected: dict, tolerance: float = NORM_TOLERANCE) -> None:
    assert len(statistics.layers) * 2 == len(expected)
    for (layer, site), (features, gradients) in expected.items():
        found = statistics.layers[layer].of(site)
        pairs = (
            (found.mean, features.mean(axis=0)),
            (found.covariance, np.cov(features.T, bias=True)),
            (found.fisher, gradients.T @ gradients / len(gradients)),
        )
        for mine, other in pairs:
            assert mine.dtype == torch.float64
            scale = np.abs(other).max()
            assert scale > 0
            np.testing.assert_allclose(mine.numpy(), other, rtol=0, atol=tolerance * scale)
        assert found.tokens == len(features)


@pytest.mark.parametrize("family", FAMILIES | MORE_FAMILIES)
def test_they_are_those_of_one_backward_pass_through_the_model(family: str) -> None:
    model, tokens = tiny_model(family), tiny_tokens()
    check(collect(model, tokens, seed=3), by_hand(model, tokens, 3))


@pytest.mark.parametrize("first", [1, 5, 11])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss"])
def test_first_tokens_are_left_out_of_the_sums_but_not_of_the_text(family: str, first: int) -> None:
    model, tokens = tiny_model(family), tiny_tokens()
    expected = {
        place: tuple(x.reshape(*tokens.shape, -1)[:, first:].reshape(-1, 16) for x in both)
        for place, both in by_hand(model, tokens).items()
    }
    check(collect(model, tokens, first=first), expected)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "glm4"])
def test_of_a_prompt_they_are_those_of_its_cache_that_later_tokens_read(family: str) -> None:
    model, tokens = tiny_model(family), tiny_tokens()
    prompt, first = 7, 2
    sums: dict[tuple[int, str], list[np.ndarray]] = defaultdict(list)
    generator = torch.Generator().manual_seed(3)
    for text in tokens:
        cache = DynamicCache()
        with torch.no_grad():
            model(input_ids=text[None, :prompt], past_key_values=cache)
        for layer in cache.layers:
            layer.keys, layer.values = (x.clone().requires_grad_() for x in _held(layer))
        leaves = [_held(layer) for layer in cache.layers]
        logits = model(input_ids=text[None, prompt:], past_key_values=cache).logits
        log_p = logits.log_softmax(-1)
        uniform = torch.rand(len(text), generator=generator, dtype=torch.float64)[prompt:]
        log_p.gather(-1, draw(log_p.detach(), uniform[None])[..., None]).sum().backward()
        for index, pair in enumerate(leaves):
            for site, x in zip(("key", "value"), pair, strict=True):
                both = [
                    part[:, :, first:] if site == "value" else unrotated(model, index, part, first)
                    for part in (x.detach(), x.grad)
                ]
                both = [part[0].transpose(0, 1).flatten(1) for part in both]
                sums[index, site].append(np.stack([part.numpy() for part in both]))
    expected = {place: tuple(np.concatenate(each, axis=1)) for place, each in sums.items()}
    check(collect(model, tokens, seed=3, first=first, prompt=prompt), expected)


def unrotated(model: PreTrainedModel, layer: int, keys: Tensor, first: int) -> Tensor:
    """Keys of a cache, or gradients with respect to them, before rotation, from `first` on."""
    decoder = Decoder.of(model)
    positions = torch.arange(keys.shape[2]).unsqueeze(0)
    cos, sin = decoder.angles(layer, positions, like=keys)
    rotation = rotation_of_keys(decoder.layers[layer], cos.shape[-1])
    return Angles(cos, sin, rotation).inverse().tile(keys, 0, keys.shape[2])[:, :, first:]


def _held(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.keys, layer.values


def test_nothing_is_lost_where_little_fits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = tiny_model("gemma2"), tiny_tokens(5)
    monkeypatch.setattr(fisher, "TOKENS_AT_ONCE", 24)
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", 64 * 5)
    monkeypatch.setattr(placement, "free_bytes", lambda device: 0)
    check(collect(model, tokens), by_hand(model, tokens))


def test_covariances_of_keys_far_from_the_origin_keep_their_digits() -> None:
    model, tokens = tiny_model("qwen2", torch.float32), tiny_tokens()
    Decoder.of(model).attentions[1].k_proj.bias.data += 1000
    captured = next(iter(capture(model, tokens, [1])))
    keys = captured.keys.transpose(1, 2).flatten(2).flatten(0, 1).double().numpy()
    found = collect(model, tokens).layers[1].key.covariance.numpy()
    expected = np.cov(keys.T, bias=True)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * expected.max())


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss"])
def test_matrices_are_symmetric_and_without_negative_eigenvalues(family: str) -> None:
    for layer in collect(tiny_model(family, torch.float32), tiny_tokens(), jacobian=True).layers:
        for site in SITES:
            of_site = layer.of(site)
            for matrix in (of_site.covariance, of_site.fisher, of_site.jacobian):
                assert torch.equal(matrix, matrix.mT)
                values = torch.linalg.eigvalsh(matrix)
                assert values[0] > -1e-12 * values[-1]


def test_draws_are_as_frequent_as_they_are_probable() -> None:
    """In 20,000 draws of equal steps each token comes once more or less than expected at most."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(1, 1, 50, generator=generator)
    logits[..., :2] = -torch.inf
    log_p = logits.log_softmax(-1)
    uniform = torch.arange(20_000, dtype=torch.float64).unsqueeze(0) / 20_000
    counts = draw(log_p.expand(1, 20_000, 50), uniform).flatten().bincount(minlength=50)
    torch.testing.assert_close(
        counts.double(), 20_000 * log_p.flatten().double().exp(), rtol=0, atol=1
    )
    assert counts[:2].sum() == 0


def test_gradients_are_nothing_on_average() -> None:
    """E[∂ log p(y)] = 0, y drawn from p. The mean of 400 lies within five standard errors of it."""
    model, tokens = tiny_model("gemma2"), tiny_tokens(1, 6)
    states = next(iter(capture(model, tokens, [2]))).outputs
    gradients = torch.empty(400, *states.shape, dtype=torch.float64)
    for seed, gradient in enumerate(gradients):
        fisher.differentiate_logits(model, tokens, states, seed, 0, gradient)
    error = gradients.std(dim=0) / 20
    assert error.min() > 0
    assert (gradients.mean(dim=0).abs() < 5 * error).all()


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss"])
def test_small_errors_cost_what_it_says(family: str) -> None:
    """The divergence under random errors δ of all tokens is ½ Σ δᵀ F δ nats on average.

    Errors have the covariance Σ = size² A Aᵀ, so that the average is ½ S n tr(F Σ). Both sides are
    means: of 40 seeds, and of 40 draws of the errors. They may differ by four standard errors of
    the difference, and by two percent for terms beyond second order; a standard error is some
    percent, and must be less than five.
    """
    size, repeats = 1e-3, 40
    model, tokens = tiny_model(family, **SMOOTH), tiny_tokens(16)
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(16, 16, generator=generator, dtype=torch.float64)
    runs = [collect(model, tokens, seed=seed) for seed in range(repeats)]
    with torch.no_grad():
        exact = log_probabilities(model, tokens)
    for layer, site in ((0, "key"), (0, "value"), (1, "key"), (2, "value")):
        traces = [(mix.mT @ run.layers[layer].of(site).fisher @ mix).trace() for run in runs]
        estimated = 0.5 * tokens.numel() * size**2 * torch.stack(traces)

        def change(index: int, of: str, x: Tensor, place: tuple = (layer, site)) -> Tensor:
            if (index, of) != place:
                return x
            random = torch.randn(16, 12, 16, generator=generator, dtype=torch.float64)
            return x + size * (random @ mix.mT).unflatten(-1, (2, 8)).transpose(1, 2)

        with changed(model, change), torch.no_grad():
            after = [log_probabilities(model, tokens) for _ in range(repeats)]
            measured = torch.stack([(exact.exp() * (exact - x)).sum() for x in after])
        error = ((estimated.var() + measured.var()) / repeats).sqrt()
        assert error < 0.05 * measured.mean()
        difference = (estimated.mean() - measured.mean()).abs()
        assert difference < 4 * error + 0.02 * measured.mean(), (layer, site)


def test_the_same_seed_gives_the_same_bytes_and_another_one_others() -> None:
    model, tokens = tiny_model("qwen3", torch.float32), tiny_tokens()
    first, second, other = (collect(model, tokens, seed=seed) for seed in (5, 5, 6))
    assert first == second
    assert first != other
    for mine, its in zip(first.layers, other.layers, strict=True):
        assert torch.equal(mine.key.covariance, its.key.covariance)
        assert not torch.equal(mine.key.fisher, its.key.fisher)


def test_a_sequence_draws_the_same_whatever_follows_it() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    few, more = (sum_of(collect(model, part)) for part in (tokens[:3], tokens))
    np.testing.assert_array_less(few, more)  # one more sequence only adds


def sum_of(statistics: Statistics) -> np.ndarray:
    """Squared gradients of all features summed over tokens, (layers, 2, D)."""
    return np.array(
        [
            [(m.of(site).fisher.diagonal() * m.of(site).tokens).numpy() for site in SITES]
            for m in statistics.layers
        ]
    )


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
def test_half_precision_is_close_and_summed_in_full(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bfloat16 has 8 bits, and the logits are a percent from those of the model in float64.

    With the same draws so is the Fisher information, which two percent are allowed for each of the
    two gradients in it. Products and sums lose nothing.
    """
    added: list[tuple[Tensor, Tensor]] = []
    add = Moments.add

    def recorded(self: object, x: Tensor, gradient: Tensor, of_output: None) -> None:
        added.append((x, gradient))
        add(self, x, gradient, of_output)

    monkeypatch.setattr(collecting, "SHARD", 16)
    monkeypatch.setattr(fisher, "draw", lambda log_p, uniform: (64 * uniform).long())
    monkeypatch.setattr(Moments, "add", recorded)
    model, tokens = tiny_model(family, torch.bfloat16, **SMOOTH), tiny_tokens(16)
    found = collect(model, tokens)
    assert model.dtype == torch.bfloat16
    assert {x.dtype for both in added for x in both} == {torch.float32}
    gradients = added[-1][1].double().transpose(1, 2).reshape(-1, 16).numpy()
    np.testing.assert_allclose(
        found.layers[0].value.fisher.numpy(), gradients.T @ gradients / len(gradients), rtol=1e-12
    )
    exact = collect(model.double(), tokens)
    for mine, its in zip(found.layers, exact.layers, strict=True):
        for site in SITES:
            expected = its.of(site).fisher
            assert (mine.of(site).fisher - expected).norm() < 0.04 * expected.norm()
