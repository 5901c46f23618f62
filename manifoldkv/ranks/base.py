"""Contract of rank rules and the problem they solve."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.basis import Basis, Rotary, Site
from manifoldkv.ranks.budget import CANDIDATES, Budget, Ranks, candidate_ranks
from manifoldkv.registry import Registry
from manifoldkv.runs.checkpoints import Checkpoints
from manifoldkv.runs.executors import LOCAL, Executor

CandidateRanks = tuple[tuple[int, ...], tuple[int, ...]]
"""Key ranks and value ranks of a layer, each ascending."""


@dataclass(frozen=True)
class LayerBases:
    """Bases of keys and of values of one layer, by rank."""

    keys: dict[int, Basis]
    values: dict[int, Basis]

    def of(self, site: Site) -> dict[int, Basis]:
        """Return the bases of a site by rank."""
        return self.keys if site == "key" else self.values


@dataclass(frozen=True)
class RankProblem:
    """Bases, data and budget of a choice of ranks.

    Parameters
    ----------
    model : PreTrainedModel
        Uncompressed model.
    tokens : Tensor
        Calibration token ids, (sequences, length), int64.
    bases : sequence of LayerBases
        Bases of every layer at the candidate ranks of the rule.
    budget : Budget
        Largest size of the cache.
    rotary : {"pre", "post"}
        Whether keys are projected before or after rotation.
    executor : Executor
        Executor of independent measurements.
    checkpoints : Checkpoints
        Checkpoints of measurements, keyed by all that the bases depend on.
    """

    model: PreTrainedModel
    tokens: Tensor
    bases: Sequence[LayerBases]
    budget: Budget
    rotary: Rotary = "pre"
    executor: Executor = LOCAL
    checkpoints: Checkpoints = field(default_factory=Checkpoints)


@dataclass(frozen=True)
class RankRule(ABC):
    """Choice of the key rank and the value rank of every layer. Subclasses write `choose`.

    Parameters
    ----------
    candidates : tuple of float
        Candidate ranks of keys and of values as shares of head_dim, in (0, 1].
    multiple : int
        Divisor of all ranks but head_dim; 16 makes decoding fastest.
    """

    candidates: tuple[float, ...] = CANDIDATES
    multiple: int = 1

    def candidate_ranks(self, budget: Budget) -> list[CandidateRanks]:
        """Return the candidate ranks of every layer, which need bases.

        Raises
        ------
        ArgumentError
            If all choices exceed the budget.
        """
        ranks = candidate_ranks(budget.head_dim, self.candidates, self.multiple)
        if not ranks:
            budget.check([(budget.head_dim, budget.head_dim)] * budget.layers)
            ranks = (budget.head_dim,)
        budget.check([(ranks[0], ranks[0])] * budget.layers)
        return [(ranks, ranks)] * budget.layers

    @abstractmethod
    def choose(self, problem: RankProblem) -> list[Ranks]:
        """Return the ranks of every layer, among its candidates and within the budget.

        Parameters
        ----------
        problem : RankProblem
            Bases at the candidate ranks, data and budget.

        Raises
        ------
        ArgumentError
            If the budget cannot be met.
        """


RANK_RULES: Registry[RankRule] = Registry("rank rule", "manifoldkv.rank_rules")
register_rank_rule = RANK_RULES.register
