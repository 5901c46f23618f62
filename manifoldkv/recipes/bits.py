"""Rank and bits from one budget: errors are in nats, and bits go where they save most."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from manifoldkv.basis import Basis, HeadGrouping
from manifoldkv.coding.allocation import (
    WIDTHS,
    allocate,
    checked_widths,
    fit_quantizers,
    pack_size,
)
from manifoldkv.coding.quantizer import SCALE_BYTES, Quantizer
from manifoldkv.coding.transform import SAMPLES, WeightedKLT, mixed_widths
from manifoldkv.errors import ArgumentError
from manifoldkv.models.decoder import Decoder
from manifoldkv.recipes.coded import CodedRecipe
from manifoldkv.recipes.coded_run import CodedRun
from manifoldkv.recipes.probe import timed
from manifoldkv.windows import cached_tokens

Bits = list[NDArray[np.int64]]
"""Of the latents of every pack, by site."""


@dataclass(frozen=True)
class BitRecipe(CodedRecipe[Bits]):
    """Latents get the bits that cost least, of all ranks and widths within the ratio.

    Let F = E[g gᵀ] be the Fisher information of the keys or values x of a layer, all heads side by
    side (`fisher_moments`), and C the covariance of what `CodedRecipe` leaves unpredicted. With
    F^½ C F^½ = V Λ Vᵀ, the latents y = Vᵀ F^½ (x - mean) are uncorrelated, and an error in any of
    them, in any layer, costs half its square in nats, to second order; what shrinks all tokens
    alike costs more than noise (`coherent_costs`), and reconstructed latents have a gain that
    allows for it. One water-filling over all latents of the model is then the whole allocation: of
    ranks (latents of 0 bits are not stored) and of bits. The ratio is one to the bytes of a cache
    in 16 bits: latents, scales and sink tokens.

    The last eighth of the calibration sequences, if there are eight or more, is held out: its
    errors and its Fisher information give ``predicted_nats`` of the plan's provenance. On other
    text the divergence was 1.2 to 1.6 times the prediction from 16 × 512 tokens, and 2.7 to 5.2
    times from 8 × 128 (both reference models, recipes bits and best, ratios 1/8 and 1/4, 16 × 256
    held-out tokens).

    Parameters
    ----------
    sinks, below
        As in `CodedRecipe`.
    widths : tuple of int
        Bits that a latent may have, increasing from 0 to at most 8.

    Raises
    ------
    ArgumentError
        If the widths do not increase from 0 to at most 8 bits, or `sinks` or `below` is negative.
    """

    refits_last_round = False

    widths: tuple[int, ...] = WIDTHS

    def __post_init__(self) -> None:
        checked_widths(self.widths)
        super().__post_init__()

    def describe_allocation(self) -> dict[str, Any]:
        return {"name": "bits", "widths": list(self.widths)}

    def bytes_beyond_ratio(self, elements: int, itemsize: int, tokens: int) -> int:
        return min(self.sinks, tokens) * elements * (itemsize - 2)

    def budget(self, decoder: Decoder, ratio: float, context: int) -> int:
        """Return the bytes of the latents of a text, without sink tokens and scales."""
        features = decoder.features
        if features % pack_size(self.widths):
            raise ArgumentError(
                f"widths {self.widths} need features in multiples of {pack_size(self.widths)}, a "
                f"layer has {features}: leave out the odd widths"
            )
        cached = [cached_tokens(context, window) for window in decoder.windows]
        full = 4 * features * sum(cached)
        sinks = min(self.sinks, context)
        of_sinks = 4 * features * sum(sinks for window in decoder.windows if window is None)
        of_scales = 2 * SCALE_BYTES * sum(cached)
        remaining = int(ratio * full + 1e-9) - of_sinks - of_scales
        if remaining < 0:
            raise ArgumentError(
                f"ratio {ratio:g} is too small: {self.sinks} uncompressed tokens and the scales of "
                f"tokens take {(of_sinks + of_scales) / full:.3g} of the cache of {context} tokens"
            )
        return remaining

    def allocate(self, sites: list[WeightedKLT], run: CodedRun) -> Bits:
        costs = [site.costs(self.widths) for site in sites]
        cached = [cached_tokens(run.context, window) for window in run.windows for _ in range(2)]
        return allocate(costs, self.widths, int(run.budget), cached)

    def quantize(
        self, site: WeightedKLT, allocation: Bits, index: int, grouping: HeadGrouping
    ) -> tuple[Basis, Quantizer]:
        return mixed_widths(site, allocation[index], self.widths, grouping)

    def fitting_seconds(self, features: int) -> float:
        seconds, _ = timed(partial(fit_quantizers, torch.randn(SAMPLES, features), self.widths))
        return seconds
