"""Rank and bits from one budget: errors are made nats, and bits go where they save most."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.basis import Basis, HeadGrouping, Site
from manifoldkv.errors import RankError
from manifoldkv.layers.activations import LayerActivations
from manifoldkv.layers.capture import capture
from manifoldkv.models.support import (
    attention_of,
    cached_tokens,
    decoder_layers,
    sliding_windows,
)
from manifoldkv.pipeline.config import CompressionConfig
from manifoldkv.pipeline.coordinates import (
    Coordinates,
    by_token,
    coded,
    costs_of,
    find_coordinates,
    moments_of,
    weighted_coordinates,
)
from manifoldkv.pipeline.held_out import with_predicted_loss
from manifoldkv.pipeline.prepared import PreparedCodes, check_codes, context_of, read_text
from manifoldkv.pipeline.recipes import BitRecipe
from manifoldkv.plan.below import Below
from manifoldkv.plan.coded import CodedBasis
from manifoldkv.plan.coding import NORM_BYTES, Coding
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.ranks.bits import allocate, pack_size
from manifoldkv.ranks.fisher import LayerMoments, SiteMoments
from manifoldkv.runs.progress import follow
from manifoldkv.text.sources import TextSource

LOG = logging.getLogger(__name__)

SITES: tuple[Site, ...] = get_args(Site)

Bits = list[NDArray[np.int64]]
"""Of the latents of every pack, by site."""
Costs = NDArray[np.float64]
"""Nats that a token's errors cost by pack and width, at one site."""
Coded = tuple[Basis, Coding]


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
    OutputError, DivergenceError
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
        _coded(groups, chosen, run, SITES[place % 2])
        for place, (groups, chosen) in enumerate(zip(sites, bits, strict=True))
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
    kv_heads : int
        Of a layer.
    budget : int
        Bytes of the latents of all layers.
    """

    recipe: BitRecipe
    windows: tuple[int | None, ...]
    kv_heads: int
    budget: int

    def grouping(self, site: Site) -> HeadGrouping:
        """Return which heads have latents together."""
        return HeadGrouping(self.recipe.grouping(site), self.kv_heads)


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
    run = PreparedBits(config, recipe, name, ids, context, windows, kv_heads, budget)
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
    check_codes(model, config)
    kv_heads = model.config.get_text_config().num_key_value_heads
    head_dim = int(attention_of(decoder_layers(model)[0]).head_dim)
    groupings = [HeadGrouping(recipe.grouping(site), kv_heads) for site in SITES]
    for grouping in groupings:
        _check_packs(grouping.width * head_dim, recipe.widths)
    context = context_of(model, tokens, config)
    windows = sliding_windows(model.config)
    norms = sum(grouping.groups for grouping in groupings) if recipe.norms else 0
    features = kv_heads * head_dim
    budget = _latent_bytes(config.ratio, context, windows, features, norms, recipe.sinks)
    return context, budget


def _check_packs(features: int, widths: tuple[int, ...]) -> None:
    """Refuse widths of which packs of latents do not fit the features of a head group."""
    if features % pack_size(widths):
        raise RankError(
            f"{features} features of a head group are no packs of {pack_size(widths)} latents: "
            f"leave out widths of {widths} that are odd"
        )


def _sites(
    model: PreTrainedModel, run: PreparedBits, moments: list[LayerMoments], bits: Bits | None
) -> Iterator[tuple[list[Coordinates], Costs]]:
    """Yield the coordinates of keys and of values of one layer after the other, and their costs.

    Those of a site are a list by head group.

    Both are predicted, if at all, from what codes of so many bits give back of the sites before;
    without bits, from these themselves.
    """
    given_back = "" if bits is None else ", predicted from what is given back"
    LOG.info("fitting quantisers of %d layers%s", len(moments), given_back)
    windows, recipe = run.windows, run.recipe
    below = Below(run.below)  # of tensors (tokens, D)
    for activations in follow(capture(model, run.fitted), len(moments)):
        index = activations.layer
        if index and windows[index] != windows[index - 1]:
            below.forget()
        keys, values = run.keys(model, activations), activations.values_of()
        both = (moments[index].key, keys), (moments[index].value, values)
        for place, (own, x) in enumerate(both, start=2 * index):
            x = by_token(x[:, :, run.first :])  # (S·n, D)
            inputs = torch.cat(below.given, dim=1) if below.given else None
            site = SITES[place % 2]
            groups = _by_group(run, site, activations, own, x, inputs)
            yield groups, costs_of(groups, recipe.widths, norms=recipe.norms)
            if run.below is not None and bits is not None:
                x = _given_back(_coded(groups, bits[place], run, site), x, inputs)
            below.add(x)


def _by_group(
    run: PreparedBits,
    site: Site,
    activations: LayerActivations,
    moments: SiteMoments,
    x: Tensor,
    given: Tensor | None,
) -> list[Coordinates]:
    """Return the coordinates of the head groups of keys or values x (tokens, D)."""
    grouping, objective = run.grouping(site), run.recipe.objective
    centred = site == "value" or run.config.rotary == "pre"
    basis = None
    if objective is not None:
        problem = objective.problem(activations, site, grouping, run.config.rotary)
        basis = problem.closed_form(activations.head_dim)
    size = x.shape[1] // grouping.groups
    found = []
    for group in range(grouping.groups):
        features = slice(group * size, (group + 1) * size)
        own = moments_of(moments, features), x[:, features]
        if basis is None:
            found.append(find_coordinates(*own, given, centred=centred))
        else:
            down, up = basis.down[group], basis.up[group]
            found.append(weighted_coordinates(down, up, *own, centred=centred))
    return found


def _coded(
    groups: list[Coordinates], bits: NDArray[np.int64], run: PreparedBits, site: Site
) -> Coded:
    return coded(groups, bits, run.recipe.widths, run.grouping(site), norms=run.recipe.norms)


def _given_back(code: Coded, x: Tensor, inputs: Tensor | None) -> Tensor:
    """Return what codes give back of keys or values (tokens, D)."""
    basis, coding = code
    heads = basis.grouping.merge(x[None, None])  # (1, H_kv, tokens, d)
    found = CodedBasis(basis, coding).project(heads, None if inputs is None else inputs[None, None])
    return basis.grouping.split(found)[0, 0]


def _allocated(costs: Sequence[Costs], run: PreparedBits) -> Bits:
    """Return the bits that cost least within the budget."""
    cached = [
        cached_tokens(run.context, window) * run.grouping(site).groups
        for window in run.windows
        for site in SITES
    ]
    return allocate(costs, run.recipe.widths, run.budget, cached)


def _latent_bytes(
    ratio: float,
    context: int,
    windows: Sequence[int | None],
    features: int,
    norms: int,
    sinks: int,
) -> int:
    """Return the bytes that are left for latents of a text, after sinks, and norms of a token."""
    cached = [cached_tokens(context, window) for window in windows]
    full = 4 * features * sum(cached)
    exact = min(sinks, context)
    of_sinks = 4 * features * sum(exact for window in windows if window is None)
    of_norms = norms * NORM_BYTES * sum(cached)
    left = int(ratio * full + 1e-9) - of_sinks - of_norms
    if left < 0:
        raise RankError(
            f"ratio {ratio:g} is too small: {sinks} tokens that stay as they are and norms "
            f"take {(of_sinks + of_norms) / full:.3g} of the cache of {context} tokens"
        )
    return left
