"""Rank and bits from one budget: errors are made nats, and bits go where they save most."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.activations.capture import capture
from manifoldkv.activations.moments import LayerMoments
from manifoldkv.basis import HeadGrouping
from manifoldkv.coding.allocation import (
    WIDTHS,
    allocate,
    checked_widths,
    fit_quantizers,
    pack_size,
)
from manifoldkv.coding.mixed import SCALE_BYTES, reconstructed
from manifoldkv.coding.predictor import Below
from manifoldkv.coding.transform import (
    SAMPLES,
    Coordinates,
    by_token,
    coded,
    find_coordinates,
)
from manifoldkv.errors import ArgumentError
from manifoldkv.models.support import (
    cached_tokens,
    sliding_windows,
)
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.recipes.coded import (
    CodedRun,
    check_coded_config,
    check_counts,
    estimate_of_coded,
)
from manifoldkv.recipes.held_out import with_predicted_loss
from manifoldkv.recipes.probe import Estimate, Probe, timed
from manifoldkv.recipes.recipe import Recipe
from manifoldkv.recipes.run import Run, check_run, context_of, heads_and_features
from manifoldkv.runs.executors import Executor
from manifoldkv.runs.progress import follow
from manifoldkv.text.sources import TextSource

if TYPE_CHECKING:
    from manifoldkv.recipes.config import CompressionConfig

LOG = logging.getLogger(__name__)

Bits = list[NDArray[np.int64]]
"""Of the latents of every pack, by site."""
Costs = NDArray[np.float64]
"""Nats that a token's errors cost by pack and width, at one site."""


@dataclass(frozen=True)
class BitRecipe(Recipe):
    """Latents get the bits that cost least, of all ranks and widths within the ratio.

    Let F = E[g gᵀ] be the Fisher information of the keys or values x of a layer, all heads side by
    side (`fisher_moments`), and C their covariance. With F^½ C F^½ = V Λ Vᵀ, the latents
    y = Vᵀ F^½ (x - mean) are uncorrelated, and an error in any of them, in any layer, costs half
    its square in nats, to second order; what shrinks all tokens alike costs more than noise
    (`coherent_costs`), and reconstructed latents have a gain that allows for it. One water-filling
    over all latents of the model is then the whole allocation: of ranks (latents of 0 bits are not
    stored) and of bits. The ratio is one to the bytes of a cache in 16 bits: latents, norms and
    sinks.

    Keys and values of neighbouring layers say much the same of a token. Each is predicted, by ridge
    regression, from the reconstructions of the layers below (values from the keys of their own
    layer too), and x is the residual: predictive coding along the layers. Residuals depend on the
    bits below and these on residuals, so that both are found three times, first as if
    reconstruction were exact.

    The last eighth of the calibration sequences, if there are eight or more, is held out: its
    errors and its Fisher information give ``predicted_nats`` of the plan's provenance. On other
    text the divergence was 1.2 to 1.6 times the prediction from 16 × 512 tokens, and 2.7 to 5.2
    times from 8 × 128 (both reference models, recipes bits and best, ratios 1/8 and 1/4, 16 × 256
    held-out tokens).

    Parameters
    ----------
    widths : tuple of int
        Bits that a latent may have, increasing from 0 to at most 8.
    sinks : int
        Number of first tokens that are kept uncompressed.
    below : int or None
        How many layers below predict keys and values; with 0 only values are predicted, from the
        keys of their own layer, and with None nothing is.

    Raises
    ------
    ArgumentError
        If the widths do not increase from 0 to at most 8 bits, or `sinks` or `below` is negative.
    """

    in_sixteen_bits = True

    widths: tuple[int, ...] = WIDTHS
    sinks: int = 4
    below: int | None = 2

    def __post_init__(self) -> None:
        checked_widths(self.widths)
        check_counts(sinks=self.sinks, below=self.below)

    def describe(self) -> dict[str, Any]:
        """Return all fields and what they stand for, as `RankRecipe.describe` does."""
        return {
            "objective": {"name": "fisher"},
            "solver": {"name": "closed-form"},
            "key_grouping": "all",
            "value_grouping": "all",
            "ranks": {"name": "bits", "widths": list(self.widths)},
            "sinks": self.sinks,
            "below": self.below,
        }

    def bytes_beyond_ratio(self, elements: int, itemsize: int, tokens: int) -> int:
        return min(self.sinks, tokens) * elements * (itemsize - 2)

    def check_config(self, config: CompressionConfig) -> None:
        check_coded_config(config)

    def check(
        self, model: PreTrainedModel, tokens: Tensor | TextSource | str, config: CompressionConfig
    ) -> None:
        check_run(model, config)
        _, features = heads_and_features(model)
        _check_packs(features, self.widths)
        _latent_bytes(
            config.ratio,
            context_of(model, tokens, config),
            sliding_windows(model.config),
            features,
            self.sinks,
        )

    def fit(
        self, model: PreTrainedModel, run: Run, folder: str | Path | None, executor: Executor
    ) -> CompressionPlan:
        return _solved(model, self._run(model, run), folder)

    def _run(self, model: PreTrainedModel, run: Run) -> BitRun:
        windows = sliding_windows(model.config)
        heads, features = heads_and_features(model)
        budget = _latent_bytes(run.config.ratio, run.context, windows, features, self.sinks)
        found = BitRun(
            *(run.config, self, run.text, run.tokens, run.context, self.sinks, self.below),
            *(windows, HeadGrouping("all", heads), budget),
        )
        found.warn_if_short(features)
        return found

    def estimate(self, model: PreTrainedModel, run: Run) -> Estimate:
        bit_run, probe = self._run(model, run), Probe.of(model, run.tokens)
        _, features = heads_and_features(model)
        latents = torch.randn(SAMPLES, features)
        fitting, _ = timed(partial(fit_quantizers, latents, self.widths))
        return estimate_of_coded(bit_run, probe, fitting)


@dataclass(frozen=True)
class BitRun(CodedRun):
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


def _solved(model: PreTrainedModel, run: BitRun, folder: str | Path | None) -> CompressionPlan:
    """Return the plan of a run, nothing tuned.

    Parameters
    ----------
    model : PreTrainedModel
        As in `compress`, and unwrapped.
    run : BitRun
        Of the recipe.
    folder : str or Path, optional
        Where Fisher moments are stored, for a run that resumes.

    Raises
    ------
    RunError
        As `CodedRun.moments`.
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


def _check_packs(features: int, widths: tuple[int, ...]) -> None:
    """Refuse widths of which packs of latents do not fit the features of a head group."""
    if features % pack_size(widths):
        raise ArgumentError(
            f"widths {widths} need features in multiples of {pack_size(widths)}, a layer has "
            f"{features}: leave out the odd widths"
        )


def _sites(
    model: PreTrainedModel, run: BitRun, moments: list[LayerMoments], bits: Bits | None
) -> Iterator[tuple[Coordinates, Costs]]:
    """Yield the coordinates of keys and of values of one layer after the other, and their costs.

    Both are predicted, if at all, from reconstructions of the sites before, with these bits;
    without bits, from these sites themselves.
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


def _allocated(costs: Sequence[Costs], run: BitRun) -> Bits:
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
