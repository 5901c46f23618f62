"""Rank rules and measures of rank sensitivity."""

from manifoldkv.learn.ranks.base import (
    RANK_RULES,
    LayerBases,
    RankProblem,
    RankRule,
    register_rank_rule,
)
from manifoldkv.learn.ranks.budget import (
    CANDIDATES,
    PAPER_CANDIDATES,
    Budget,
    Ranks,
    candidate_ranks,
)
from manifoldkv.learn.ranks.given import GivenRanks
from manifoldkv.learn.ranks.optimal import Optimal
from manifoldkv.learn.ranks.sequential import Sequential
from manifoldkv.learn.ranks.threshold import Threshold
from manifoldkv.learn.ranks.uniform import Uniform

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
