"""The allocation of bits under one budget.

Reverse water-filling (Cover and Thomas, Elements of Information Theory, chapter 10) for integers:
a latent of b bits has a distortion D(b), and bits go where they reduce it most. Zero bits are the
rank cut. The counted bytes are the stored bytes: rounded latents are given bits in byte-aligned
groups of neighbours (packs), trellis-coded ones, whose bits are one stream, whole bytes per site.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import numpy as np
from numpy.typing import NDArray

from manifoldkv.errors import ArgumentError
from manifoldkv.modes import in_own_modes

PACK = 8
"""Latents of a pack, whose equal widths fill whole bytes."""
ROUNDING = 1e-12
"""Rounding error of costs, relative to the cost at 0 bits."""


@in_own_modes
def allocate(
    costs: Sequence[NDArray[np.float64]], budget: int, tokens: Sequence[int] | None = None
) -> list[NDArray[np.int64]]:
    """Return the bits of every pack that minimise the total cost within a budget.

    Packs are widened along the lower convex hull of their costs, largest saving per byte first:
    optimal for every budget that these steps fill, and within one step of optimal for others.

    Parameters
    ----------
    costs : sequence of array
        Cost of each pack at 0, 1, … bits, by site, (packs, widths), in nats or another additive
        unit.
    budget : int
        Bytes of all packs.
    tokens : sequence of int, optional
        Number of cached tokens of every site; 1 if omitted.

    Returns
    -------
    list of array
        Bits by site and pack, (packs,).

    Raises
    ------
    ArgumentError
        If the budget is negative.
    """
    if budget < 0:
        raise ArgumentError(f"budget must be >= 0, got {budget}")
    rows = np.concatenate([np.asarray(cost, dtype=np.float64) for cost in costs])
    cached = np.repeat([1] * len(costs) if tokens is None else tokens, [len(c) for c in costs])
    bits = _widened(rows, np.arange(rows.shape[1]), cached, budget)
    return np.split(bits, np.cumsum([len(cost) for cost in costs])[:-1])


def allocate_streams(
    costs: Sequence[NDArray[np.float64]],
    widths: Sequence[float],
    budget: int,
    tokens: Sequence[int],
    spare: int,
) -> list[NDArray[np.float64]]:
    """Return the bits of every latent that minimise the total cost within a budget.

    The bits of a site's latents are one stream in whole bytes. Latents are widened along the lower
    convex hulls of their costs, largest saving per bit first, and sites by whole bytes, as in
    `allocate`.

    Parameters
    ----------
    costs : sequence of array
        Cost of each latent at each width, by site, (D, widths), convex from the first width above
        0 on.
    widths : sequence of float
        Widths in bits, increasing from 0.
    budget : int
        Bytes of all streams.
    tokens : sequence of int
        Number of cached tokens of every site.
    spare : int
        Bits of every stream that the budget does not count.

    Returns
    -------
    list of array
        Bits by site and latent, (D,).

    Raises
    ------
    ArgumentError
        If the budget is negative.
    """
    if budget < 0:
        raise ArgumentError(f"budget must be >= 0, got {budget}")
    of_widths = np.array(widths)
    sites = [_Stream.of(np.asarray(cost, np.float64), of_widths, spare) for cost in costs]
    longest = max(len(site.costs) for site in sites)
    rows = np.stack([np.pad(site.costs, (0, longest - len(site.costs)), "edge") for site in sites])
    chosen = _widened(rows, np.arange(longest), np.array(tokens), budget)
    return [site.bits(spare + 8 * int(size)) for site, size in zip(sites, chosen, strict=True)]


@dataclass(frozen=True)
class _Stream:
    """Latents of a site in the order in which they are widened.

    Parameters
    ----------
    size : int
        Number of latents.
    latents, widened : ndarray
        Latent that is widened and its new width, by step.
    total : ndarray
        Bits of all latents after the steps so far, by step.
    costs : ndarray
        Cost of all latents after the steps that fit, by number of bytes.
    """

    size: int
    latents: NDArray[np.int64]
    widened: NDArray[np.float64]
    total: NDArray[np.float64]
    costs: NDArray[np.float64]

    @classmethod
    def of(cls, costs: NDArray[np.float64], widths: NDArray[np.float64], spare: int) -> _Stream:
        """Return the stream of latents of some costs, (D, widths)."""
        # Widths below the one that saves most per bit over 0 bits are not on the hull.
        first = ((costs[:, :1] - costs[:, 1:]) / widths[1:]).argmax(axis=1)[:, np.newaxis]
        index = np.arange(len(widths) - 1)  # of steps, each to the width after
        before = np.where(index == first, 0, index)
        saved = np.take_along_axis(costs, before, axis=1) - costs[:, 1:]
        bits = widths[1:] - widths[before]
        worth = np.take_along_axis(saved, first, axis=1) > 0
        is_step = (index >= first) & (saved > 0) & worth
        # Rounding must not change the order of the steps of a latent.
        rates = np.minimum.accumulate(np.where(index < first, np.inf, saved / bits), axis=1)
        order = np.argsort(-rates[is_step], kind="stable")
        latents, steps = (of[order] for of in np.nonzero(is_step))
        total = bits[latents, steps].cumsum()
        left = costs[:, 0].sum() - np.append(0, saved[latents, steps].cumsum())
        sizes = np.arange(1 + (ceil(max(0, total[-1] - spare) / 8) if len(total) else 0))
        fitting = np.searchsorted(total, spare + 8 * sizes, side="right")
        return cls(len(costs), latents, widths[1 + steps], total, left[fitting])

    def bits(self, most: int) -> NDArray[np.float64]:
        """Return the bits of all latents, (D,), at most `most` in total."""
        found, fitting = np.zeros(self.size), np.searchsorted(self.total, most, side="right")
        np.maximum.at(found, self.latents[:fitting], self.widened[:fitting])
        return found


def _widened(
    costs: NDArray[np.float64],
    bytes_of: NDArray[np.int64],
    cached: NDArray[np.int64],
    budget: int,
) -> NDArray[np.int64]:
    """Return the index of the size of every row of costs (rows, sizes), widened as in `allocate`.

    Parameters
    ----------
    costs : ndarray
        Cost of every row at every size.
    bytes_of : ndarray
        Bytes of a cached token at every size.
    cached : ndarray
        Cached tokens of every row.
    budget : int
        Bytes of all rows and tokens.
    """
    chosen = np.zeros(len(costs), dtype=np.int64)
    remaining = budget
    for _, row, before, after in _steps(costs, bytes_of, cached):
        size = int((bytes_of[after] - bytes_of[before]) * cached[row])
        if size <= remaining and chosen[row] == before:
            chosen[row] = after
            remaining -= size
    return chosen


def _steps(
    costs: NDArray[np.float64], bytes_of: NDArray[np.int64], cached: NDArray[np.int64]
) -> list[tuple[float, int, int, int]]:
    """Return negative saving per byte, pack, index before and after of all widenings, sorted."""
    steps = []
    for pack, cost in enumerate(costs):
        least = np.inf
        for before, after in pairwise(_lower_hull(bytes_of, cost)):
            saved = (cost[before] - cost[after]) / (bytes_of[after] - bytes_of[before])
            saved /= cached[pack]
            least = min(least, float(saved))  # rounding must not change the order
            if least > 0:
                steps.append((-least, pack, before, after))
    return sorted(steps)


def _lower_hull(x: NDArray[np.int64], y: NDArray[np.float64]) -> list[int]:
    """Return the indices of the points on the lower convex hull."""
    hull: list[int] = []
    for index in range(len(x)):
        while len(hull) > 1:
            first, last = hull[-2:]
            straight = y[first] + (y[index] - y[first]) * (x[last] - x[first]) / (
                x[index] - x[first]
            )
            if y[last] <= straight + ROUNDING * abs(y[first]):  # points on a line remain
                break
            hull.pop()
        hull.append(index)
    return hull
