"""Which ranks every layer gets, under a budget for the whole cache.

Budgets and costs are whole numbers: the sum over layers of key rank and value rank. All layers have
the same number of KV heads and the same head_dim, so that this sum is proportional to the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manifoldkv.errors import RankError

CANDIDATES = (0.0625, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
"""Shares of head_dim that are tried for keys and for values: of 128, nearly all multiples of 16."""
PAPER_CANDIDATES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""The paper's five trained ranks, and the full one."""
TOLERANCE = 1e-9

Ranks = tuple[int, int]
"""Key rank and value rank of a layer, per KV head."""


def candidate_ranks(
    head_dim: int, ratios: Sequence[float] = CANDIDATES, multiple: int = 1
) -> tuple[int, ...]:
    """Ranks nearest to shares of head_dim, ascending and without repetition.

    Parameters
    ----------
    head_dim : int
        The largest possible rank.
    ratios : sequence of float
        In (0, 1].
    multiple : int
        Ranks are multiples of this (and head_dim); 16 makes decoding fastest.

    Raises
    ------
    RankError
        If a ratio is not in (0, 1].
    """
    for ratio in ratios:
        if not 0 < ratio <= 1:
            raise RankError(f"candidate ratio {ratio:g} is not in (0, 1]")
    rounded = {round(ratio * head_dim / multiple) * multiple for ratio in ratios if ratio < 1}
    full = {head_dim} if 1 in ratios else set()
    return tuple(sorted({r for r in rounded if 0 < r < head_dim} | full))


@dataclass(frozen=True, eq=False, repr=False)
class ErrorSurface:
    """The layer-output error of one layer for every pair of candidate ranks.

    Parameters
    ----------
    key_ranks, value_ranks : tuple of int
        Candidates, ascending.
    errors : Tensor
        (key ranks, value ranks), float64: Δ(r_K, r_V), or any other cost of a pair.
    """

    key_ranks: tuple[int, ...]
    value_ranks: tuple[int, ...]
    errors: Tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ErrorSurface):
            return NotImplemented
        same_ranks = self._ranks == other._ranks
        return same_ranks and torch.equal(self.errors, other.errors)

    def __hash__(self) -> int:
        return hash(self._ranks)

    def __repr__(self) -> str:
        keys, values = self._ranks
        errors = f"{float(self.errors.min()):.3g} to {float(self.errors.max()):.3g}"
        return f"ErrorSurface(key_ranks={keys}, value_ranks={values}, errors {errors})"

    @property
    def _ranks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.key_ranks, self.value_ranks

    def best(self, budget: float) -> Ranks | None:
        """The pair with the lowest error among those with r_K + r_V at most `budget`.

        Of equal errors the cheaper pair wins, then the one with more rank for values. None if no
        pair is cheap enough.
        """
        affordable = [
            (float(self.errors[i, j]), key + value, key, value)
            for i, key in enumerate(self.key_ranks)
            for j, value in enumerate(self.value_ranks)
            if key + value <= budget + TOLERANCE
        ]
        return min(affordable)[2:] if affordable else None


def budget_from_ratio(ratio: float, layers: int, head_dim: int) -> int:
    """Numbers a cache may hold, in ranks: at most `ratio` of ``layers * 2 * head_dim``.

    Raises
    ------
    RankError
        If the ratio is not in (0, 1].
    """
    if not 0 < ratio <= 1:
        raise RankError(f"ratio {ratio:g} is not in (0, 1]")
    return int(ratio * layers * 2 * head_dim + TOLERANCE)


def check_budget(budget: int, cheapest: Sequence[int], head_dim: int) -> None:
    """Raise `RankError` if not even the cheapest pair of every layer fits.

    Parameters
    ----------
    budget : int
        For all layers.
    cheapest : sequence of int
        Smallest r_K + r_V of every layer.
    head_dim : int
        To state the smallest feasible ratio.
    """
    needed, full = sum(cheapest), 2 * head_dim * len(cheapest)
    if budget < needed:
        raise RankError(
            f"a budget of {budget / full:.3g} of the cache is too small for the candidate ranks; "
            f"the smallest feasible ratio is {needed / full:.4g}"
        )


def uniform(
    key_ranks: Sequence[int], value_ranks: Sequence[int], layers: int, budget: int, head_dim: int
) -> list[Ranks]:
    """The same pair for every layer: the dearest one that fits, and of these the most even one.

    Raises
    ------
    RankError
        If none fits.
    """
    check_budget(budget, [min(key_ranks) + min(value_ranks)] * layers, head_dim)
    pairs = [(k, v) for k in key_ranks for v in value_ranks if layers * (k + v) <= budget]
    best = max(pairs, key=lambda pair: (sum(pair), -abs(pair[0] - pair[1]), pair[1]))
    return [best] * layers


class Sequential:
    """The paper's greedy rule (Alg. error_surface), one layer after the other.

    A layer may cost at most the average of what is left, τ = B / (layers left); what it does not
    spend is left to later ones.

    Parameters
    ----------
    layers : int
        In the model.
    budget : int
        For all of them.
    """

    def __init__(self, layers: int, budget: int) -> None:
        self._layers_left = layers
        self._budget_left = budget
        self.ranks: list[Ranks] = []

    def select(self, surface: ErrorSurface) -> Ranks:
        """Ranks of the next layer.

        Raises
        ------
        RankError
            If no candidate fits.
        """
        share = self._budget_left / self._layers_left
        pair = surface.best(share)
        if pair is None:
            raise RankError(
                f"no candidate pair of layer {len(self.ranks)} fits its share of the budget, "
                f"r_K + r_V = {share:.4g}; the cheapest is "
                f"{min(surface.key_ranks) + min(surface.value_ranks)}"
            )
        self._budget_left -= sum(pair)
        self._layers_left -= 1
        self.ranks.append(pair)
        return pair


def optimal(costs: Sequence[ErrorSurface], budget: int, head_dim: int) -> list[Ranks]:
    """Pairs whose costs have the smallest sum over layers: a multiple-choice knapsack, exactly.

    Dynamic programming over whole budgets; of equal sums the cheaper one wins.

    Parameters
    ----------
    costs : sequence of ErrorSurface
        What each pair of each layer costs in quality. The sum should predict the damage to the
        model.
    budget : int
        For all layers.
    head_dim : int
        For the message of an error.

    Raises
    ------
    RankError
        If not even the cheapest pairs fit.
    """
    check_budget(budget, [min(c.key_ranks) + min(c.value_ranks) for c in costs], head_dim)
    best = np.zeros(budget + 1)  # lowest sum for every budget, over the layers so far
    choices: list[np.ndarray] = []
    tables = [_pairs(surface) for surface in costs]
    for pairs in tables:
        sums = np.full((len(pairs), budget + 1), np.inf)
        for row, (error, key, value) in enumerate(pairs):
            price = key + value
            if price <= budget:
                sums[row, price:] = best[: budget + 1 - price] + error
        choices.append(sums.argmin(axis=0))
        best = sums.min(axis=0)
    left = int(np.flatnonzero(best <= best[budget])[0])  # no more than the optimum needs
    ranks: list[Ranks] = []
    for pairs, choice in zip(reversed(tables), reversed(choices), strict=True):
        _, key, value = pairs[int(choice[left])]
        ranks.append((key, value))
        left -= key + value
    return ranks[::-1]


def _pairs(surface: ErrorSurface) -> list[tuple[float, int, int]]:
    return [
        (float(surface.errors[i, j]), key, value)
        for i, key in enumerate(surface.key_ranks)
        for j, value in enumerate(surface.value_ranks)
    ]


def threshold_rank(spectra: Tensor, threshold: float) -> int:
    """Singular values needed to reach a share of their sum (not of their energy).

    Parameters
    ----------
    spectra : Tensor
        Singular values by head, descending, (heads, d); the largest rank of any head counts.
    threshold : float
        In [0, 1].
    """
    shares = spectra.cumsum(dim=-1) / spectra.sum(dim=-1, keepdim=True)
    return max(1, int((shares < threshold).sum(dim=-1).max()))


def threshold(
    key_spectra: Tensor,
    value_spectra: Tensor,
    error: Callable[[int, int], float],
    error_budget: float,
    *,
    step: float = 0.02,
    smallest_share: float = 0.45,
) -> Ranks:
    """EigenAttention's search for one layer: the lowest threshold whose error is within a budget.

    One threshold serves keys and values. It falls from 1 in steps while the layer-output error
    stays within the budget and a rank is above `smallest_share` of head_dim; the last threshold
    that held is taken. There is no budget for the cache: its ratio is what comes out.

    Parameters
    ----------
    key_spectra, value_spectra : Tensor
        As in `threshold_rank`.
    error : callable
        Layer-output error of (r_K, r_V).
    error_budget : float
        What it may be; the release uses 0.025.
    step, smallest_share : float
        As in the release (its `0.02` and 45 %).
    """
    head_dim = key_spectra.shape[-1]
    accepted = (head_dim, head_dim)
    level = 1.0 - step
    while level > 0:
        pair = (threshold_rank(key_spectra, level), threshold_rank(value_spectra, level))
        if max(pair) <= smallest_share * head_dim or error(*pair) > error_budget:
            break
        accepted = pair
        level -= step
    return accepted
