"""What a solver promises a study."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from manifoldkv.basis import Basis
from manifoldkv.objectives.base import Objective, Problem
from manifoldkv.registry import Registry
from manifoldkv.solvers.driver import check_loss

Status = Literal["exact", "converged", "stopped early", "all steps taken"]


@dataclass(frozen=True)
class Solution:
    """What a solver found.

    Parameters
    ----------
    basis : Basis
        In the dtype of the calibration data.
    history : list of float
        Training loss, per step or per epoch as the solver says; empty for a closed form.
    status : str
        ``"exact"`` (closed form), ``"converged"`` (no further descent), ``"stopped early"``
        (patience ran out) or ``"all steps taken"``.
    """

    basis: Basis
    history: list[float] = field(hash=False)
    status: Status


@dataclass(frozen=True)
class Solver(ABC):
    """Minimises a problem. Hyper-parameters are fields of a subclass, a frozen dataclass too."""

    def accepts(
        self, objective: Objective, site: Literal["key", "value"], grouping: str | int
    ) -> tuple[bool, str]:
        """Return whether this solver can solve the problems of an objective, and why not."""
        return True, ""

    def probe_run(self, share: float) -> tuple[Solver, float]:
        """Return a solver that does a part of the work, and how many times longer all of it takes.

        The time of a run is estimated from it. It is proportional to the data if not overridden.

        Parameters
        ----------
        share : float
            Of the calibration sequences, on which the other solver will work.
        """
        return self, 1 / share

    @abstractmethod
    def solve(self, problem: Problem, rank: int, seed: int = 0) -> Solution:
        """Return a basis with a small loss, and how it was found.

        Parameters
        ----------
        problem : Problem
            From an objective.
        rank : int
            Per KV head, 1 to head_dim.
        seed : int
            Of everything random. Same seed, same machine, same thread count: same basis.

        Raises
        ------
        ArgumentError
            If the rank does not fit.
            If the solver cannot solve this problem.
        RunError
            If a loss is not finite; no basis is returned then.
        """


SOLVERS: Registry[Solver] = Registry("solver", "manifoldkv.solvers")
register_solver = SOLVERS.register


def checked(loss: Tensor, problem: Problem, step: int) -> float:
    """Return the value of a loss.

    Raises
    ------
    RunError
        If it is not finite.
    """
    return check_loss(loss.item(), step, label_of(problem))


def label_of(problem: Problem) -> str:
    """Return layer and site of a problem, as progress bars and messages name it."""
    return f"layer {problem.activations.layer}, {problem.site}s"
