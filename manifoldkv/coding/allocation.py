"""How many bits every latent is worth: quantisers fitted to samples, and one budget over all.

Reverse water-filling (Cover and Thomas, Elements of Information Theory, chapter 10) for integers:
a coordinate that is stored in b bits leaves a distortion D(b), and bits go where they take most
away. Zero bits are the rank cut. Latents are given bits in packs of neighbours that fill whole
bytes, so that what is counted is what is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manifoldkv.errors import ArgumentError

WIDTHS = tuple(range(9))
"""Bits that a latent may have."""
COHERENCE = 3.0
"""How much more a part of the error costs that is proportional to the latent, against noise.

Noise of many tokens averages out where they are mixed; what shrinks all of them alike does not. Of
1, 2, 4 and 16 the two in the middle diverged least on a language model of 135 million parameters.
"""
GAUSSIAN_STEPS = {
    1: 1.596,
    2: 0.9957,
    3: 0.5860,
    4: 0.3352,
    5: 0.1881,
    6: 0.1041,
    7: 0.0569,
    8: 0.0308,
}
"""Best step of a uniform quantiser of b bits for a Gaussian of variance one (Max, 1960)."""
ROUNDING = 1e-12
"""Of costs, relative to that at 0 bits."""
TINY = torch.finfo(torch.float32).tiny
"""The least scale of a coordinate, which a step must be larger than."""
FLOOR = 1e-5
"""Deviation of a coordinate, relative to the largest of its site, up to which it has no variance:
it is rounding error of float32 activations that do not span the coordinate."""
FACTORS = torch.linspace(0.6, 3.0, 13, dtype=torch.float64)
"""Of these steps, that are tried: heavy tails want wider ones."""


@dataclass(frozen=True)
class FittedQuantizers:
    """What quantisers of several widths leave of the coordinates of some samples.

    Parameters
    ----------
    widths : tuple of int
        Bits, increasing.
    step : Tensor
        Best step of every coordinate and width, (coordinates, widths), float64; 0 at 0 bits.
    distortion : Tensor
        Mean squared error with it, (coordinates, widths), float64; at 0 bits the mean square.
    """

    widths: tuple[int, ...]
    step: Tensor
    distortion: Tensor


def quantized(x: Tensor, step: Tensor, bits: int) -> Tensor:
    """Return the reconstruction of x by a uniform mid-rise quantiser.

    Codes are ``floor(x / step)`` within ``[-2^(bits - 1), 2^(bits - 1) - 1]``, and stand for the
    middles of their intervals.

    Parameters
    ----------
    x, step : Tensor
        Of shapes that broadcast; steps are positive.
    bits : int
        At least 1.
    """
    half = 2 ** (bits - 1)
    return ((x / step).floor().clamp(-half, half - 1) + 0.5) * step


def fit_quantizers(
    samples: Tensor, widths: Sequence[int] = WIDTHS, norms: Tensor | None = None
) -> FittedQuantizers:
    """Return the steps that leave the least mean squared error of samples.

    Parameters
    ----------
    samples : Tensor
        (tokens, coordinates), with means that are subtracted already.
    widths : sequence of int
        Bits, increasing, from 0 to 8.
    norms : Tensor, optional
        By which tokens are divided before they are rounded and multiplied afterwards,
        (tokens, 1): steps are those of what is divided, errors those of the samples.

    Raises
    ------
    ArgumentError
        If the widths are not such.
    """
    widths = checked_widths(widths)
    samples = samples.double()
    norms = torch.ones(1, 1, dtype=torch.float64) if norms is None else norms.double()
    divided = samples / norms
    scale = floored(divided.square().mean(dim=0).sqrt())
    steps = torch.zeros(samples.shape[1], len(widths), dtype=torch.float64)
    distortion = samples.square().mean(dim=0).unsqueeze(1).repeat(1, len(widths))
    weights = norms.square() / norms.square().mean()
    # The best step of one bit; more bits of a step only add codes, so that none of them is worse.
    previous = (2 * (weights * divided.abs()).mean(dim=0)).clamp(min=TINY)
    for place, bits in enumerate(widths):
        if not bits:
            continue
        tried = scale.unsqueeze(0) * GAUSSIAN_STEPS[bits] * FACTORS.unsqueeze(1)  # (F, f)
        tried = torch.cat([tried, previous.unsqueeze(0)])
        errors = torch.stack(
            [
                (norms * (divided - quantized(divided, step, bits))).square().mean(dim=0)
                for step in tried
            ]
        )
        best = errors.min(dim=0)
        previous = tried.gather(0, best.indices.unsqueeze(0)).squeeze(0)
        steps[:, place] = previous
        distortion[:, place] = best.values
    return FittedQuantizers(widths, steps, distortion)


def floored(deviations: Tensor) -> Tensor:
    """Return deviations of coordinates, those without variance raised to the floor, positive.

    Parameters
    ----------
    deviations : Tensor
        Root mean squares, (coordinates,).
    """
    largest = max(deviations.tolist(), default=0.0)
    return deviations.clamp(min=max(TINY, FLOOR * largest))


def coherent_costs(distortion: Tensor, coherence: float = COHERENCE) -> Tensor:
    """Return what errors cost if those in proportion to a latent cost more than noise.

    The best quantiser of a coordinate of power one with a mean squared error D returns
    ``(1 - D) y`` and noise of power ``D (1 - D)``. Multiplied by a gain g, the first misses
    ``1 - g (1 - D)``, of which the square counts `coherence` times. With the best g all this is
    ``coherence D / (coherence (1 - D) + D)``: D itself if coherence is 1, and with 0 bits
    coherence.

    Parameters
    ----------
    distortion : Tensor
        As in `FittedQuantizers`: (coordinates, widths).
    coherence : float
        At least 1.

    Returns
    -------
    Tensor
        (coordinates, widths), in units of the distortion; never more for a smaller distortion.
    """
    power = distortion[:, :1]
    missed = (distortion / power.clamp(min=TINY)).clamp(max=1)
    return power * coherence * missed / (coherence * (1 - missed) + missed)


def best_gains(samples: Tensor, given_back: Tensor, coherence: float = COHERENCE) -> Tensor:
    """Return what quantised latents are best multiplied by, as in `coherent_costs`.

    Parameters
    ----------
    samples, given_back : Tensor
        Latents, and what a quantiser makes of them, (tokens, coordinates).
    coherence : float
        At least 1.

    Returns
    -------
    Tensor
        (coordinates,), positive.
    """
    power = samples.square().mean(dim=0).clamp(min=TINY)
    kept = (samples * given_back).mean(dim=0) / power
    noise = given_back.square().mean(dim=0) / power - kept.square()
    gains = coherence * kept / (coherence * kept.square() + noise).clamp(min=TINY)
    return torch.where(kept > 0, gains, torch.ones_like(gains))


def pack_size(widths: Sequence[int]) -> int:
    """Return how many neighbouring latents have the same bits, so that they fill whole bytes."""
    return 8 // gcd(8, *widths)


def allocate(
    costs: Sequence[NDArray[np.float64]],
    widths: Sequence[int],
    budget: int,
    tokens: Sequence[int] | None = None,
) -> list[NDArray[np.int64]]:
    """Return the bits that cost least in all, within a budget.

    A latent that becomes wider takes away cost in ever smaller parts per bit, once widths that no
    mixture of others needs are left out (the lower convex hull). Taking the largest parts first is
    then the best for every budget that they fill; at others it is within one step of the best.

    Parameters
    ----------
    costs : sequence of array
        Of every site, what each pack of latents costs at each width: (packs, widths), in nats or
        anything else that adds up.
    widths : sequence of int
        Bits of a latent, increasing, the first of them 0.
    budget : int
        Bytes of all packs together.
    tokens : sequence of int, optional
        How many tokens every site caches; one each if omitted.

    Returns
    -------
    list of array
        Bits by site and pack, (packs,).

    Raises
    ------
    ArgumentError
        If the widths are not such, or the budget is negative.
    """
    widths = checked_widths(widths)
    if budget < 0:
        raise ArgumentError(f"budget must be >= 0, got {budget}")
    bytes_of = np.array(widths) * pack_size(widths) // 8
    every = np.concatenate([np.asarray(cost, dtype=np.float64) for cost in costs])
    cached = np.repeat([1] * len(costs) if tokens is None else tokens, [len(c) for c in costs])
    steps = _steps(every, bytes_of, cached)
    chosen = np.zeros(len(every), dtype=np.int64)
    left = budget
    for _, pack, before, after in steps:
        size = int((bytes_of[after] - bytes_of[before]) * cached[pack])
        if size <= left and chosen[pack] == before:
            chosen[pack] = after
            left -= size
    bits = np.array(widths)[chosen]
    return np.split(bits, np.cumsum([len(cost) for cost in costs])[:-1])


def checked_widths(widths: Sequence[int]) -> tuple[int, ...]:
    """Refuse widths that are not increasing from 0 to 8 at most."""
    found = tuple(widths)
    increasing = all(a < b for a, b in pairwise(found))
    if len(found) < 2 or not increasing or found[0] != 0 or found[-1] > 8:
        raise ArgumentError(f"widths of latents increase from 0 to at most 8 bits, unlike {found}")
    return found


def _steps(
    costs: NDArray[np.float64], bytes_of: NDArray[np.int64], cached: NDArray[np.int64]
) -> list[tuple[float, int, int, int]]:
    """Return what each widening along the hulls saves per byte, largest first, with its ends."""
    found = []
    for pack, cost in enumerate(costs):
        least = np.inf
        for before, after in pairwise(_lower_hull(bytes_of, cost)):
            saved = (cost[before] - cost[after]) / (bytes_of[after] - bytes_of[before])
            saved /= cached[pack]
            least = min(least, float(saved))  # rounding must not turn the order round
            if least > 0:
                found.append((-least, pack, before, after))
    return sorted(found)


def _lower_hull(x: NDArray[np.int64], y: NDArray[np.float64]) -> list[int]:
    """Return the places of the points that the lower convex hull goes through."""
    hull: list[int] = []
    for place in range(len(x)):
        while len(hull) > 1:
            first, last = hull[-2:]
            straight = y[first] + (y[place] - y[first]) * (x[last] - x[first]) / (
                x[place] - x[first]
            )
            if y[last] <= straight + ROUNDING * abs(y[first]):  # points on a line stay
                break
            hull.pop()
        hull.append(place)
    return hull
