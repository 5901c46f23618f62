"""Contract of solvers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from manifoldkv.basis import Basis
from manifoldkv.objectives.base import Objective, Problem
from manifoldkv.registry import Registry
from manifoldkv.solvers.driver import check_loss

Status = Literal["exact", "converged", "stopped early", "all steps taken"]


@dataclass(frozen=True)
class Solution:
    """Result of a solver.

    Parameters
    ----------
    basis : Basis
        Solution in the dtype of the calibration data.
    history : list of float
        Training losses, per step or per epoch as the solver documents; empty for a closed form.
    status : str
        ``"exact"`` (closed form), ``"converged"`` (no further descent), ``"stopped early"``
        (patience exceeded) or ``"all steps taken"``.
    """

    basis: Basis
    history: list[float] = field(hash=False)
    status: Status


@dataclass(frozen=True)
class Solver(ABC):
    """Minimiser of a problem, a frozen dataclass whose fields are hyper-parameters."""

    joint: ClassVar[bool] = False
    """Whether the solutions of `solve_ranks` depend on all ranks together."""

    def accepts(
        self, objective: Objective, site: Literal["key", "value"], grouping: str | int
    ) -> tuple[bool, str]:
        """Return whether the solver accepts an objective's problems, and the reason if not."""
        return True, ""

    @abstractmethod
    def solve(self, problem: Problem, rank: int, seed: int = 0) -> Solution:
        """Return a basis with a small loss.

        Parameters
        ----------
        problem : Problem
            Problem of an objective.
        rank : int
            Rank per KV head, 1 to head_dim.
        seed : int
            Seed of everything random. Same seed, machine and thread count: same basis.

        Raises
        ------
        ArgumentError
            If the rank is not between 1 and head_dim, or the solver does not accept the problem.
        RunError
            If a loss is not finite.
        """

    def solve_ranks(
        self, problem: Problem, ranks: Sequence[int], seed: int = 0
    ) -> Iterator[tuple[int, Solution]]:
        """Yield ranks per KV head and their solutions, by default each solved by itself.

        Other parameters are those of `solve`.
        """
        for rank in ranks:
            yield rank, self.solve(problem, rank, seed)


SOLVERS: Registry[Solver] = Registry("solver", "manifoldkv.solvers")
register_solver = SOLVERS.register


def checked(loss: Tensor, problem: Problem, step: int) -> float:
    """Return the value of a loss, or raise `RunError` if it is not finite."""
    return check_loss(loss.item(), step, label_of(problem))


def label_of(problem: Problem) -> str:
    """Return layer and site of a problem, for progress bars and messages."""
    return f"layer {problem.activations.layer}, {problem.site}s"
