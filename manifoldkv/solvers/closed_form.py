"""Exact minimisers of objectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manifoldkv.modes import in_own_modes
from manifoldkv.objectives.base import Objective, Problem
from manifoldkv.solvers.base import Solution, Solver, register_solver


@register_solver("closed-form")
@dataclass(frozen=True)
class ClosedForm(Solver):
    """Closed form of a problem."""

    def accepts(
        self, objective: Objective, site: Literal["key", "value"], grouping: str | int
    ) -> tuple[bool, str]:
        return objective.has_closed_form(site, grouping)

    @in_own_modes
    def solve(self, problem: Problem, rank: int, seed: int = 0) -> Solution:
        return Solution(problem.closed_form(rank), history=[], status="exact")
