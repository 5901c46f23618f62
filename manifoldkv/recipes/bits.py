"""Rank and bits from one budget: errors are made nats, and bits go where they save most."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.activations.capture import capture
from manifoldkv.activations.fisher import LayerMoments
from manifoldkv.basis import HeadGrouping
from manifoldkv.coding.allocation import allocate, pack_size
from manifoldkv.coding.mixed import SCALE_BYTES, reconstructed
from manifoldkv.coding.predictor import Below
from manifoldkv.coding.transform import (
    Coordinates,
    by_token,
    coded,
    find_coordinates,
)
from manifoldkv.errors import ArgumentError
from manifoldkv.models.support import (
    attention_of,
    cached_tokens,
    decoder_layers,
    sliding_windows,
)
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.recipes.config import CompressionConfig
from manifoldkv.recipes.held_out import with_predicted_loss
from manifoldkv.recipes.prepared import PreparedCodes, check_run, context_of, read_text
from manifoldkv.recipes.recipe import BitRecipe
from manifoldkv.runs.progress import follow
from manifoldkv.text.sources import TextSource

LOG = logging.getLogger(__name__)

Bits = list[NDArray[np.int64]]
"""Of the latents of every pack, by site."""
Costs = NDArray[np.float64]
"""Nats that a token's errors cost by pack and width, at one site."""


def solve_bits(
    model: PreTrainedModel, run: PreparedBits, folder: str | Path | None
) -> CompressionPlan:
    """Return the plan of a run, nothing tuned.

    Parameters
    ----------
    model : PreTrainedModel
        As in `compress`, and unwrapped.
    run : PreparedBits
        From `prepare_bits`.
    folder : str or Path, optional
        Where Fisher moments are stored, for a run that goes on.

    Raises
    ------
    RunError
        As `PreparedCodes.moments`.
    """
    moments = run.moments(model, run.fitted, folder)
    bits: Bits | None = None
    for left in reversed(range(run.rounds)):
        sites, costs = zip(*_sites(model, run, moments, bits), strict=True)
        if bits is None or left:  # else these are the bits of which the predictions know
            bits = _allocated(costs, run)
    assert bits is not None
    codes = [
        coded(site, chosen, run.recipe.widths, run.grouping)
        for site, chosen in zip(sites, bits, strict=True)
    ]
    LOG.info("bits for %d sites", len(sites))
    layers = [
        LayerPlan(key, value, window, key_coding=key_coding, value_coding=value_coding)
        for (key, key_coding), (value, value_coding), window in zip(
            codes[::2], codes[1::2], run.windows, strict=True
        )
    ]
    return with_predicted_loss(model, run.plan(model, layers, sinks=run.recipe.sinks), run)


@dataclass(frozen=True)
class PreparedBits(PreparedCodes):
    """A run by a `BitRecipe`.

    Parameters
    ----------
    windows : tuple of int or None
        Sliding windows of the layers.
    grouping : HeadGrouping
        Of all KV heads of a layer.
    budget : int
        Bytes of the latents of all layers.
    """

    recipe: BitRecipe
    windows: tuple[int | None, ...]
    grouping: HeadGrouping
    budget: int


def prepare_bits(
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    config: CompressionConfig,
    recipe: BitRecipe,
) -> PreparedBits:
    """Read the text and return what a run starts from; its errors are raised here."""
    context, budget = check_bits(model, tokens, config, recipe)
    name, ids = read_text(model, tokens, config)
    windows = sliding_windows(model.config)
    kv_heads = model.config.get_text_config().num_key_value_heads
    grouping = HeadGrouping("all", kv_heads)
    run = PreparedBits(config, recipe, name, ids, context, windows, grouping, budget)
    run.warn_if_short(kv_heads * int(attention_of(decoder_layers(model)[0]).head_dim))
    return run


def check_bits(
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    config: CompressionConfig,
    recipe: BitRecipe,
) -> tuple[int, int]:
    """Return the context of a run by a `BitRecipe` and the bytes of its latents.

    No text is read. All errors of `prepare_bits` are raised here, except those of the text.
    """
    check_run(model, config)
    kv_heads = model.config.get_text_config().num_key_value_heads
    head_dim = int(attention_of(decoder_layers(model)[0]).head_dim)
    features = kv_heads * head_dim
    _check_packs(features, recipe.widths)
    context = context_of(model, tokens, config)
    windows = sliding_windows(model.config)
    return context, _latent_bytes(config.ratio, context, windows, features, recipe.sinks)


def _check_packs(features: int, widths: tuple[int, ...]) -> None:
    """Refuse widths of which packs of latents do not fit the features of a head group."""
    if features % pack_size(widths):
        raise ArgumentError(
            f"widths {widths} need features in multiples of {pack_size(widths)}, a layer has "
            f"{features}: leave out the odd widths"
        )


def _sites(
    model: PreTrainedModel, run: PreparedBits, moments: list[LayerMoments], bits: Bits | None
) -> Iterator[tuple[Coordinates, Costs]]:
    """Yield the coordinates of keys and of values of one layer after the other, and their costs.

    Both are predicted, if at all, from what codes of so many bits give back of the sites before;
    without bits, from these themselves.
    """
    given_back = "" if bits is None else ", predicted from reconstructions"
    LOG.info("fitting quantisers of %d layers%s", len(moments), given_back)
    windows, recipe = run.windows, run.recipe
    below = Below(recipe.below)  # of tensors (tokens, D)
    for activations in follow(capture(model, run.fitted), len(moments)):
        index = activations.layer
        if index and windows[index] != windows[index - 1]:
            below.forget()
        keys, values = activations.keys_in("pre"), activations.values_of()
        both = (moments[index].key, keys), (moments[index].value, values)
        for place, (own, x) in enumerate(both, start=2 * index):
            x = by_token(x[:, :, run.first :])  # (S·n, D)
            inputs = torch.cat(below.given, dim=1) if below.given else None
            site = find_coordinates(own, x, inputs)
            yield site, site.costs(recipe.widths)
            if recipe.below is not None and bits is not None:
                x = reconstructed(*coded(site, bits[place], recipe.widths, run.grouping), x, inputs)
            below.add(x)


def _allocated(costs: Sequence[Costs], run: PreparedBits) -> Bits:
    """Return the bits that cost least within the budget."""
    cached = [cached_tokens(run.context, window) for window in run.windows for _ in range(2)]
    return allocate(costs, run.recipe.widths, run.budget, cached)


def _latent_bytes(
    ratio: float, context: int, windows: Sequence[int | None], features: int, sinks: int
) -> int:
    """Return the bytes of the latents of a text, without sink tokens and the scales of tokens."""
    cached = [cached_tokens(context, window) for window in windows]
    full = 4 * features * sum(cached)
    exact = min(sinks, context)
    of_sinks = 4 * features * sum(exact for window in windows if window is None)
    of_scales = 2 * SCALE_BYTES * sum(cached)
    left = int(ratio * full + 1e-9) - of_sinks - of_scales
    if left < 0:
        raise ArgumentError(
            f"ratio {ratio:g} is too small: {sinks} uncompressed tokens and the scales of tokens "
            f"take {(of_sinks + of_scales) / full:.3g} of the cache of {context} tokens"
        )
    return left
