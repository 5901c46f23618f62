"""One step for all latents of a model, and tables of the symbols that they are rounded to.

At high rate a uniform quantiser followed by an entropy coder is within a quarter of a bit of the
best there is, and where errors of all latents count alike, one step for all of them spends bits
where they save most (Goyal 2001, Theoretical foundations of transform coding). The step is found
by bisection on the bits that the tables themselves promise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from scipy.optimize import brentq
from torch import Tensor

from manifoldkv.coding.costs import best_gains
from manifoldkv.coding.entropy import FARTHEST, FREQUENT, LEAST_REACH, EntropyCoded
from manifoldkv.coding.uniform import TINY
from manifoldkv.errors import ArgumentError

TABLE_SUM = 1 << 20
"""About the sum of the frequencies of a table."""
NARROWEST, WIDEST = 2.0**-9, 2.0**9
"""Steps that are tried, as factors of the largest deviation of a latent."""
TOLERANCE = 1e-4
"""Of a step, relative."""
NEIGHBOUR = 0.2
"""Change of the logarithm of a step in the search for a bracket around a Gaussian's step."""
GAUSSIAN_BITS = math.log2(2 * math.pi * math.e) / 2
"""Entropy of a Gaussian rounded to integers, of a deviation of 1: of a wider one its log2 more."""


def find_step(sites: Sequence[Tensor], bits: float) -> float:
    """Return the step at which a token takes `bits` bits by the tables of all sites.

    Parameters
    ----------
    sites : sequence of Tensor
        Latents of samples of every site, (tokens, features) each.
    bits : float
        Of a token; fewer are taken if the narrowest step needs no more.

    Raises
    ------
    ArgumentError
        If no step takes so few.
    """
    deviations = torch.cat([latents.square().mean(dim=0).sqrt() for latents in sites]).double()
    if not bool(deviations.any()):
        return 1.0  # nothing varies
    deviations = deviations.clamp(min=TINY)

    @cache
    def remaining(logarithm: float) -> float:
        step = math.exp(logarithm)
        used = (entropy_coded(x / step).token_bits(x.shape[1]) for x in sites)
        return bits - sum(used)

    def remaining_by_gaussians(logarithm: float) -> float:
        rates = (deviations.log() - logarithm) / math.log(2) + GAUSSIAN_BITS
        return bits - float(rates.clamp(min=0).sum())

    narrowest = math.log(NARROWEST * float(deviations.max()))
    widest = math.log(WIDEST * float(deviations.max()))
    first = last = narrowest
    if remaining_by_gaussians(narrowest) < 0:
        first = last = brentq(remaining_by_gaussians, narrowest, widest)
    while remaining(first) >= 0:
        if first <= narrowest:
            return math.exp(narrowest)
        first = max(first - NEIGHBOUR, narrowest)
    while remaining(last) < 0:
        if last >= widest:
            raise ArgumentError(
                f"{bits:.1f} bits of a token are too few even for latents that are all 0: ask for "
                "a larger ratio"
            )
        last = min(last + NEIGHBOUR, widest)
    solution = brentq(remaining, first, last, xtol=TOLERANCE)
    while remaining(solution) < 0:  # no more than asked: bits of samples do not fall evenly
        solution = min(solution + TOLERANCE, last)
    return math.exp(solution)


def entropy_coded(scaled: Tensor) -> EntropyCoded:
    """Return the quantizer of latents (tokens, features), in steps.

    Gains are those of `best_gains`: rounding to 0 shrinks latents of all tokens alike.

    A table mixes the frequencies of the samples with those of a distribution with long tails and
    their mean size, worth about as many samples as there are symbols within that size: no symbol
    is impossible, and no table is fitted to the gaps between few samples.
    """
    rounded = scaled.round()
    reach = (2 * rounded.abs().amax(dim=0) + LEAST_REACH).clamp(max=FARTHEST).long()
    size = rounded.abs().mean(dim=0).double()
    # All tables side by side: symbol s of latent c is at starts[c] + reach[c] + s.
    lengths = 2 * reach + 1
    latent = torch.arange(len(reach)).repeat_interleave(lengths)
    centres = lengths.cumsum(0) - lengths + reach
    symbols = torch.arange(len(latent)) - centres[latent]
    prior = (1 + symbols.abs() / (size[latent] + 0.5)) ** -3
    mass = torch.zeros_like(size).index_add_(0, latent, prior)
    weight = (1 + 2 * size).clamp(max=len(scaled))
    prior *= (weight / mass)[latent]
    places = (rounded.long().clamp(-FARTHEST, FARTHEST) + centres).flatten()
    counts = torch.bincount(places, minlength=len(latent)) + prior
    tables = (counts * (TABLE_SUM / len(scaled))).round().clamp(min=1, max=FREQUENT)
    return EntropyCoded(best_gains(scaled, rounded).float(), reach.int(), tables.int())
