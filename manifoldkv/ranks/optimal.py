"""Ranks of all layers by the rank sensitivity of the model's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from manifoldkv.ranks.base import RankProblem, RankRule, register_rank_rule
from manifoldkv.ranks.budget import Budget, Ranks
from manifoldkv.ranks.divergences import divergences
from manifoldkv.ranks.surfaces import ErrorSurface


@register_rank_rule("optimal")
@dataclass(frozen=True)
class Optimal(RankRule):
    """Allocation with the smallest sum of divergences over layers and sites.

    The divergence of logits is measured for every layer, site and candidate rank separately
    (`divergences`); the allocation under the budget is exact (`allocate`).

    Parameters
    ----------
    candidates, multiple
        As in `RankRule`.
    sequences : int
        Number of first calibration sequences that divergences are measured on.
    """

    sequences: int = 8

    def choose(self, problem: RankProblem) -> list[Ranks]:
        return allocate(divergences(problem, self.sequences), problem.budget)


def allocate(costs: Sequence[ErrorSurface], budget: Budget) -> list[Ranks]:
    """Return the pairs of ranks with the smallest sum of costs: a multiple-choice knapsack.

    Exact, by dynamic programming over allocations that are not dominated in both elements and cost.
    Of equal sums the one with fewer elements is chosen.

    Parameters
    ----------
    costs : sequence of ErrorSurface
        Cost of each pair of ranks of each layer.
    budget : Budget
        Budget of all layers.

    Raises
    ------
    ArgumentError
        If the cheapest pairs exceed the budget.
    """
    budget.check([(min(c.key_ranks), min(c.value_ranks)) for c in costs])
    elements, sums = np.zeros(1, dtype=np.int64), np.zeros(1)  # of the best allocations so far
    choices: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    tables = [surface.pairs() for surface in costs]
    for tokens, pairs in zip(budget.latent_tokens, tables, strict=True):
        prices = np.array([tokens * (key + value) for _, key, value in pairs])
        errors = np.array([error for error, _, _ in pairs])
        all_elements = (elements[:, None] + prices).ravel()
        all_sums = (sums[:, None] + errors).ravel()
        best = _undominated(all_elements, all_sums, budget.latent_elements)
        choices.append((best // len(pairs), best % len(pairs)))
        elements, sums = all_elements[best], all_sums[best]
    ranks: list[Ranks] = []
    state = len(sums) - 1  # the smallest sum
    for pairs, (before, chosen) in zip(reversed(tables), reversed(choices), strict=True):
        _, key, value = pairs[int(chosen[state])]
        ranks.append((key, value))
        state = int(before[state])
    return ranks[::-1]


def _undominated(
    elements: NDArray[np.int64], sums: NDArray[np.float64], most: int
) -> NDArray[np.int64]:
    """Return indices of allocations within `most` elements that are not dominated, ascending."""
    order = np.lexsort((sums, elements))
    order = order[elements[order] <= most]
    least_before = np.minimum.accumulate(sums[order])
    improves = np.ones(len(order), dtype=bool)
    improves[1:] = sums[order][1:] < least_before[:-1]
    return order[improves]
