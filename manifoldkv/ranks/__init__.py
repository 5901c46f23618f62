"""Rank rules and measures of rank sensitivity."""

from manifoldkv.ranks.base import (
    RANK_RULES,
    LayerBases,
    RankProblem,
    RankRule,
    register_rank_rule,
)
from manifoldkv.ranks.budget import CANDIDATES, PAPER_CANDIDATES, Budget, Ranks, candidate_ranks
from manifoldkv.ranks.given import GivenRanks
from manifoldkv.ranks.optimal import Optimal
from manifoldkv.ranks.sequential import Sequential
from manifoldkv.ranks.threshold import Threshold
from manifoldkv.ranks.uniform import Uniform

__all__ = [
    "CANDIDATES",
    "PAPER_CANDIDATES",
    "RANK_RULES",
    "Budget",
    "GivenRanks",
    "LayerBases",
    "Optimal",
    "RankProblem",
    "RankRule",
    "Ranks",
    "Sequential",
    "Threshold",
    "Uniform",
    "candidate_ranks",
    "register_rank_rule",
]
