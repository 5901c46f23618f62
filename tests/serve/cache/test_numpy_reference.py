"""Coded caches of every family against a reconstruction in NumPy, layer after layer.

The reference is the stock model with eager attention and no cache, in which hooks replace keys and
values where the layer makes them. It shares no code with the cache.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from manifoldkv import CompressionPlan, compressed
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.interface import rotation_of
from manifoldkv.models.support import attention_of, decoder_layers
from manifoldkv.plan.formats.trellis import (
    GAUSSIAN_DISTORTION,
    REACH,
    STATES,
    TrellisCoded,
    codebooks,
)
from manifoldkv.plan.site import SitePlan
from manifoldkv.serve.cache import attention as cache_attention
from manifoldkv.serve.cache import backend as cache_backend
from manifoldkv.statistics.capture import capture
from tests.families import FAMILIES, MORE_FAMILIES, tiny_model, tiny_tokens
from tests.plans import DESIGNS, designed_plan

LENGTH = 18


def mid_rise(latents: np.ndarray, bits: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Latents (tokens, features) rounded to the middles of intervals, 0 where there are no bits."""
    half = 2.0 ** (np.maximum(bits, 1) - 1)
    codes = np.clip(np.floor(latents / step), -half, half - 1)
    return np.where(bits > 0, (codes + 0.5) * step, 0)


def whole(bits: np.ndarray) -> np.ndarray:
    """Bits with every second half rounded up, the others down, and the last one up."""
    found, half = bits.astype(int), False
    for i in range(len(bits)):
        found[i] += half and bits[i] % 1 > 0
        half ^= bool(bits[i] % 1)
    last = int((bits > 0).sum()) - 1
    found[last] = max(1, found[last])
    return found


def of_trellis(latents: np.ndarray, bits: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Latents (tokens, features) as the codewords of the stream with the least squared error."""
    found, stored = np.zeros_like(latents), int((bits > 0).sum())
    bits = whole(bits)
    states, books = np.arange(STATES), codebooks().numpy()
    costs = np.where(states == 0, np.float32(0), np.float32(1e30)) * np.ones((len(latents), 1))
    chosen = []
    for i in reversed(range(stored)):
        later = (states & ((STATES >> bits[i]) - 1)) << bits[i]  # and the bits it drops
        options = costs[:, later[:, None] + np.arange(1 << bits[i])]
        chosen.append(later + options.argmin(axis=2))
        error = latents[:, [i]] - books[bits[i]] * step[i]
        costs = options.min(axis=2) + (error / np.linalg.norm(step[:stored])) ** 2
    state, rows = costs.argmin(axis=1), np.arange(len(latents))
    for i, later in enumerate(reversed(chosen)):
        found[:, i] = books[bits[i]][state] * step[i]
        state = later[rows, state]
    return found


def reconstructed(
    x: np.ndarray, index: int, planned: SitePlan, before: dict[tuple[int, str], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Keys or values (tokens, D), all heads side by side, and their latents."""
    down, up = planned.basis.down[0].numpy(), planned.basis.up[0].numpy()
    quantizer: Any = planned.quantizer
    expected = np.broadcast_to(planned.mean.numpy().astype(x.dtype), x.shape)
    if planned.predictor is not None:
        inputs = [before[index - below, site] for below, site in planned.predictor.inputs]
        predicted = np.concatenate(inputs, axis=1) @ planned.predictor.weights.numpy()
        expansion = planned.predictor.expansion
        expected = expected + (predicted if expansion is None else predicted @ expansion.numpy())
    bits = quantizer.bits.numpy()
    stored = bits > 0
    latents = ((x - expected) @ down).astype(np.float32)
    deviation, step, gain = (
        y.numpy() for y in (quantizer.deviation, quantizer.step, quantizer.gain)
    )
    norm = np.sqrt(np.mean((latents / deviation)[:, stored] ** 2, axis=1, keepdims=True))
    if isinstance(quantizer, TrellisCoded):
        norm = without_overload(latents[:, stored], norm, bits[stored], step[stored])
    else:
        norm = in_eight_bits(norm)
    rounded = of_trellis if isinstance(quantizer, TrellisCoded) else mid_rise
    scaled = rounded(latents / np.maximum(norm, 2.0**-14), bits, step)
    latents = scaled * gain * norm
    return expected + latents @ up.T, latents


def without_overload(
    latents: np.ndarray, norms: np.ndarray, bits: np.ndarray, step: np.ndarray
) -> np.ndarray:
    """Scales in 4 bits, at least those of the norms, with the least estimated squared error."""
    codes = 102 + 3 * np.arange(15)  # in 8 bits
    of_codes = (1 + codes % 8 / 8) * 2.0 ** (codes // 8 - 15)
    largest = REACH * codebooks().numpy().max(axis=1)[whole(bits)] * step
    spread = np.sqrt((codebooks().numpy() ** 2).mean(axis=1))
    both = np.sqrt(spread[np.floor(bits).astype(int)] * spread[np.ceil(bits).astype(int)])
    step = np.where(bits % 1 > 0, step * spread[whole(bits)] / both, step)
    noise = (np.array([GAUSSIAN_DISTORTION[b] for b in bits]) * step**2).sum()
    norms = norms.copy()
    for token, norm in enumerate(norms[:, 0]):
        scales = of_codes[np.abs(of_codes - norm).argmin() :][:9]
        beyond = np.maximum(np.abs(latents[token]) - scales[:, None] * largest, 0)
        errors = (beyond**2).sum(axis=1) + noise * scales**2
        norms[token] = scales[int(errors.argmin())]
    return norms


def in_eight_bits(scales: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Round to three bits behind the first one; below 2^-14, to multiples of 2^-17."""
    unit = 2.0 ** (np.maximum(np.frexp(scales)[1] - 1, -14) - 3)
    return np.minimum(np.round(scales / unit) * unit, 61440).astype(np.float32)


@contextmanager
def reconstructing(
    model: PreTrainedModel, plan: CompressionPlan, length: int = LENGTH
) -> Iterator[dict[tuple[int, str], Tensor]]:
    """Let the layers of a model put out reconstructed keys and values, and note the latents.

    Inside the block the model is called once, with `length` tokens of every sequence.
    """
    noted: dict[tuple[int, str], Tensor] = {}
    before: dict[tuple[int, str], np.ndarray] = {}  # reconstructions by layer and site
    early: dict[tuple[int, str], Tensor] = {}
    config = model.config.get_text_config()
    heads = config.num_key_value_heads

    def replaced(x: Tensor, index: int, site: str) -> Tensor:
        """(B, n, D)"""
        layer = plan.layers[index]
        size = x.shape[0] * x.shape[1]
        flat = x.reshape(size, -1).numpy()
        if (index, site) in early:
            return early.pop((index, site))
        found, latents = reconstructed(flat, index, dict(layer.sites)[site], before)
        noted[index, site] = torch.from_numpy(latents).reshape(*x.shape[:2], -1)
        before[index, site] = found
        sinks = 0 if layer.window is not None else plan.sinks
        found = torch.from_numpy(found).to(x.dtype).reshape(x.shape)
        return torch.cat([x[:, :sinks], found[:, sinks:]], dim=1)

    def hook_of(index: int, site: str) -> Any:
        attention = attention_of(decoder_layers(model)[index])

        def hook(module: Any, args: Any, output: Tensor) -> Tensor:
            if site == "value" and (index, "key") not in before:
                # Keys are normed after this; values are predicted from them.
                keys = attention.k_proj(args[0]).unflatten(-1, (heads, -1))
                keys = attention.k_norm.forward(keys).flatten(2)
                early[index, "key"] = replaced(keys, index, "key")
            if output.ndim == 3:
                return replaced(output, index, site)
            heads_first = output.shape[1] == heads and output.shape[2] == length
            x = output.transpose(1, 2) if heads_first else output  # (B, n, H, d)
            x = replaced(x.flatten(2), index, site).reshape(x.shape)
            return x.transpose(1, 2) if heads_first else x

        return hook

    def fused(index: int) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> Tensor:
            size = heads * plan.layers[index].key.head_dim
            queries, keys, values = output.split([output.shape[-1] - 2 * size, size, size], dim=-1)
            keys, values = replaced(keys, index, "key"), replaced(values, index, "value")
            return torch.cat([queries, keys, values], dim=-1)

        return hook

    hooks = []
    for index, layer in enumerate(decoder_layers(model)):
        attention = attention_of(layer)
        if hasattr(attention, "qkv_proj"):
            hooks.append(attention.qkv_proj.register_forward_hook(fused(index)))
            continue
        keys = getattr(attention, "k_norm", None) or attention.k_proj
        hooks.append(keys.register_forward_hook(hook_of(index, "key")))
        hooks.append(attention.v_proj.register_forward_hook(hook_of(index, "value")))
    stock, config._attn_implementation = config._attn_implementation, "eager"
    try:
        yield noted
    finally:
        config._attn_implementation = stock
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_logits_are_those_of_the_reference(family: str) -> None:
    """Up to the first token of a text of which a latent, next to the border of two codes, got the
    other one; sequences in another order on the way."""
    model, tokens = tiny_model(family, torch.float32), tiny_tokens(8, LENGTH)
    plan = designed_plan(model, "low-rank chain")
    order = torch.tensor([3, 1, 7, 7, 0, 2, 5, 4])
    with torch.no_grad():
        with reconstructing(model, plan) as noted:
            wanted = model(tokens[order], use_cache=False).logits
        with compressed(model, plan) as new_cache:
            cache = new_cache()
            cache.activate_past_recording()  # layers with windows hold all tokens too
            model(tokens[:, :9], past_key_values=cache)
            cache.reorder_cache(order)
            found = model(tokens[order, 9:], past_key_values=cache).logits
        exact = model(tokens[order]).logits
    flipped = torch.zeros(8, LENGTH, dtype=torch.bool)
    for (index, site), latents in noted.items():
        layer = cache.layers[index]
        store = layer.key_store if site == "key" else layer.value_store
        (_, _, held), *_ = store.tiles(0, LENGTH)
        apart = (held[:, 0] - latents).abs() > 1e-4 * latents.abs()
        flipped |= apart.any(dim=-1)
    same = (flipped.cumsum(dim=1) == 0)[:, 9:]  # (B, 9)
    error = (found - wanted[:, 9:]).abs().amax(dim=-1)
    scale = float(wanted.abs().max())
    assert float((exact - wanted).abs().max()) > 5e-3 * scale
    assert float(error[same].max()) < 1e-5 * scale
    assert float(same.float().mean()) > 0.5


PADS = 5
FEW_HEADS, ALL_HEADS = {"num_key_value_heads": 1}, {"num_key_value_heads": 4}
WINDOWED = ("mistral", "gemma2", "gemma3", "gpt-oss")


def reference_of_rows(model: PreTrainedModel, plan: CompressionPlan, tokens: Tensor) -> Tensor:
    """Logits (B, n, vocabulary) of texts, the first of which has `PADS` tokens less."""
    logits = torch.zeros(*tokens.shape, model.config.vocab_size, dtype=model.dtype)
    for rows, first in ((slice(0, 1), PADS), (slice(1, None), 0)):
        with reconstructing(model, plan, tokens.shape[1] - first):
            logits[rows, first:] = model(tokens[rows, first:], use_cache=False).logits
    return logits


@pytest.mark.parametrize(
    ("family", "kind", "heads"),
    [
        *(("llama", kind, {}) for kind in DESIGNS),
        *((family, kind, {}) for family in WINDOWED for kind in ("keys below", "low-rank chain")),
        *(("qwen3", "low-rank chain", heads) for heads in (FEW_HEADS, ALL_HEADS)),
    ],
)
def test_any_way_into_the_cache_is_the_reference(
    family: str, kind: str, heads: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks longer than a window, by both paths through attention and in several tiles; padding;
    sequences that are chosen by a beam; tokens that are taken back."""
    monkeypatch.setattr(cache_backend, "ELEMENTS_AT_A_TIME", 3 * 4 * 8 * 2 * 4)
    monkeypatch.setattr(cache_attention, "MANY_QUERIES", 6)
    model, tokens = tiny_model(family, **heads), tiny_tokens(3, LENGTH)
    plan = designed_plan(model, kind, sinks=2)
    assert (plan.predictor_depth is None) == (kind == "dense")
    wanted = reference_of_rows(model, plan, tokens)
    mask = torch.ones_like(tokens)
    mask[0, :PADS] = 0
    order = torch.tensor([2, 0, 0])

    errors: list[Tensor] = []

    def chunk(cache: Any, rows: Tensor, start: int, stop: int) -> None:
        inputs = {"attention_mask": mask[rows, :stop], "past_key_values": cache}
        found = model(tokens[rows, start:stop], **inputs).logits
        error = (found - wanted[rows, start:stop]).abs().amax(dim=-1)
        errors.append(error[mask[rows, start:stop].bool()])

    rows = torch.arange(3)
    with compressed(model, plan) as new_cache:
        cache = new_cache()
        for start, stop in ((0, 9), (9, 10)):
            chunk(cache, rows, start, stop)
        cache.reorder_cache(order)
        for start, stop in ((10, 15), (15, 17), (17, 18)):
            chunk(cache, order, start, stop)
        assert cache.nbytes() == plan.nbytes(LENGTH, batch=3, dtype=model.dtype)
        cache = new_cache()
        cache.activate_past_recording()
        chunk(cache, rows, 0, 12)
        cache.crop(-5)
        cache.batch_select_indices(order)
        for start, stop in ((7, 8), (8, 18)):
            chunk(cache, order, start, stop)
    found = torch.cat(errors) / wanted.abs().max()
    # A token's scale next to the border of two codes may get the other one.
    assert float(found.median()) < 1e-5
    assert float(found.max()) < 3e-4


def by_hand(model: PreTrainedModel, plan: CompressionPlan, tokens: Tensor) -> DynamicCache:
    """A stock cache of reconstructions of the keys and values of the stock model."""
    cache, context = DynamicCache(config=model.config), plan.predictor_context()
    decoder = Decoder.of(model)
    positions = torch.arange(tokens.shape[1])[None]
    for activations in capture(model, tokens):
        index = activations.layer
        layer, grouping = plan.layers[index], plan.layers[index].key.grouping
        context.begin(index)
        sites = []
        exact = (activations.keys_in("pre"), activations.values_of())
        for (_, planned), x in zip(layer.sites, exact, strict=True):
            split = grouping.split(x)[:, 0]  # (B, n, D)
            found = planned.reconstruct(split.flatten(0, 1), context)
            context.add(found)
            sites.append(grouping.merge(found.view(split.shape).unsqueeze(1)))
        angles = decoder.angles(index, positions, sites[0])
        keys = rotation_of(decoder.layers[index])(sites[0], *angles)
        cache.update(keys, sites[1], index)
    return cache


@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("llama", kind) for kind in DESIGNS), ("gemma3", "chain"), ("gpt-oss", "low-rank chain")],
)
def test_a_stock_cache_is_taken_over_as_by_hand(family: str, kind: str) -> None:
    """And as a prompt is stored whose tokens attend to each other's exact keys and values."""
    model, tokens = tiny_model(family), tiny_tokens(2, LENGTH)
    plan = designed_plan(model, kind, sinks=0)
    stock = DynamicCache(config=model.config)
    model(tokens[:, :-1], past_key_values=stock)
    reconstructed = by_hand(model, plan, tokens[:, :-1])
    with reconstructing(model, plan, 1):
        wanted = model(tokens[:, -1:], past_key_values=reconstructed).logits
    with compressed(model, plan, prefill="exact") as new_cache:
        taken = model(tokens[:, -1:], past_key_values=new_cache(stock)).logits
        held = new_cache()
        model(tokens[:, :-1], past_key_values=held)
        filled = model(tokens[:, -1:], past_key_values=held).logits
    torch.testing.assert_close(taken, filled, atol=1e-5, rtol=1e-5)
    # A scale next to the border of two codes may get the other one.
    torch.testing.assert_close(taken, wanted, atol=5e-4, rtol=5e-4)
