"""Ranks chosen in advance."""

from __future__ import annotations

from dataclasses import dataclass

from manifoldkv.core.basis import check_rank
from manifoldkv.core.errors import ArgumentError
from manifoldkv.learn.ranks.base import CandidateRanks, RankProblem, RankRule
from manifoldkv.learn.ranks.budget import Budget, Ranks


@dataclass(frozen=True)
class GivenRanks(RankRule):
    """Ranks chosen in advance, those of another plan, say, to compare bases at equal ranks.

    Parameters
    ----------
    ranks : tuple of tuple of int
        Key rank and value rank of every layer.
    """

    ranks: tuple[Ranks, ...] = ()

    def candidate_ranks(self, budget: Budget) -> list[CandidateRanks]:
        if len(self.ranks) != budget.layers:
            raise ArgumentError(
                f"ranks must be those of {budget.layers} layers, got {len(self.ranks)}"
            )
        for pair in self.ranks:
            for rank in pair:
                check_rank(rank, budget.head_dim)
        budget.check(self.ranks)
        return [((key,), (value,)) for key, value in self.ranks]

    def choose(self, problem: RankProblem) -> list[Ranks]:
        return list(self.ranks)
