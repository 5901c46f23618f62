"""Equal ranks in all layers."""

from __future__ import annotations

from dataclasses import dataclass

from manifoldkv.core.errors import ArgumentError
from manifoldkv.learn.ranks.base import CandidateRanks, RankProblem, RankRule, register_rank_rule
from manifoldkv.learn.ranks.budget import Budget, Ranks, candidate_ranks


@register_rank_rule("uniform")
@dataclass(frozen=True)
class Uniform(RankRule):
    """The largest, most even pair of ranks within the budget, the same for every layer.

    Of two uneven pairs the one with the larger value rank is chosen: value errors grow faster.

    Parameters
    ----------
    candidates : tuple of float
        As in `RankRule`; empty for all integers.
    multiple : int
        As in `RankRule`.
    """

    candidates: tuple[float, ...] = ()

    def candidate_ranks(self, budget: Budget) -> list[CandidateRanks]:
        key, value = self._pair(budget)
        return [((key,), (value,))] * budget.layers

    def choose(self, problem: RankProblem) -> list[Ranks]:
        return [self._pair(problem.budget)] * problem.budget.layers

    def _pair(self, budget: Budget) -> Ranks:
        d = budget.head_dim
        shares = self.candidates or tuple(rank / d for rank in range(1, d + 1))
        ranks = candidate_ranks(d, shares, self.multiple)
        if not ranks:
            raise ArgumentError(f"no candidate rank of {self} is between 1 and head_dim {d}")
        budget.check([(ranks[0], ranks[0])] * budget.layers)
        most = budget.latent_elements // max(1, sum(budget.latent_tokens))
        pairs = [(k, v) for k in ranks for v in ranks if k + v <= most]
        return max(pairs, key=lambda pair: (sum(pair), -abs(pair[0] - pair[1]), pair[1]))
