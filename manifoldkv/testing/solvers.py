"""Laws of solvers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from manifoldkv.core.basis import Basis, HeadGrouping, Site
from manifoldkv.core.errors import ArgumentError, RunError
from manifoldkv.learn.objectives import KSVD, Objective, Problem
from manifoldkv.learn.solvers import SOLVERS, Solver
from manifoldkv.statistics.layer import Batch
from manifoldkv.testing.checks import assert_describable, assert_orthonormal
from manifoldkv.testing.once import once
from manifoldkv.testing.tiny import HEAD_DIM, KV_HEADS, random_basis, tiny_activations


class _Solved(NamedTuple):
    """A solution shared by several laws."""

    basis: Basis
    history: list[float]
    random_state_is_left: bool
    """Whether torch's global random state is unchanged."""


class SolverConformance:
    """Laws of `solver` on problems of `objective`.

    Every problem is solved once, and once more to compare two solutions.
    """

    solver: Solver
    objective: Objective = KSVD()
    groupings: ClassVar[tuple[str | int, ...]] = ("shared", 1, "all")

    def problems(self, dtype: torch.dtype = torch.float64) -> Iterator[Problem]:
        sites: tuple[Site, ...] = ("key", "value")
        for site, name in product(sites, self.groupings):
            if self.solver.accepts(self.objective, site, name)[0]:
                make = partial(self._problem, site, name, dtype)
                yield once((self.objective,), (site, name, dtype), make)

    def _problem(self, site: Site, name: str | int, dtype: torch.dtype) -> Problem:
        grouping = HeadGrouping(name, KV_HEADS)
        return self.objective.problem(tiny_activations(dtype), site, grouping)

    def _solved(self, problem: Problem, rank: int = 3) -> _Solved:
        return once((self.solver, problem), rank, partial(self._solve, problem, rank))

    def _solve(self, problem: Problem, rank: int) -> _Solved:
        before = torch.get_rng_state()
        solution = self.solver.solve(problem, rank, seed=7)
        return _Solved(solution.basis, solution.history, torch.equal(before, torch.get_rng_state()))

    def test_some_problem_is_accepted(self) -> None:
        assert list(self.problems()), "the solver accepts no problem of the objective"

    def test_basis_has_the_rank_and_dtype_asked_for(self) -> None:
        for dtype in (torch.float32, torch.float64):
            for problem in self.problems(dtype):
                basis = self._solved(problem).basis
                assert basis.rank == 3
                assert basis.head_dim == HEAD_DIM
                assert basis.down.dtype == dtype
                assert not basis.down.requires_grad

    def test_basis_is_a_projector(self) -> None:
        for problem in self.problems():
            basis = self._solved(problem).basis
            projector = basis.projector()
            torch.testing.assert_close(projector @ projector, projector, rtol=0, atol=1e-8)
            if basis.orthonormal:
                assert_orthonormal(basis)

    def test_full_rank_costs_nothing(self) -> None:
        for problem in self.problems():
            assert abs(problem.loss(self._solved(problem, HEAD_DIM).basis).item()) < 1e-6

    def test_solution_beats_random_bases(self) -> None:
        for problem in self.problems():
            loss = problem.loss(self._solved(problem).basis).item()
            for seed in range(5):
                assert loss < problem.loss(random_basis(3, problem.grouping, seed)).item()

    def test_same_seed_gives_the_same_bytes(self) -> None:
        for problem in self.problems():
            first, second = self._solved(problem).basis, self._solve(problem, 3).basis
            assert torch.equal(first.down, second.down)
            assert torch.equal(first.up, second.up)

    def test_provenance_can_name_it(self) -> None:
        assert_describable(SOLVERS.describe(self.solver))

    def test_global_random_state_is_left_alone(self) -> None:
        for problem in self.problems():
            assert self._solved(problem).random_state_is_left

    def test_impossible_ranks_are_refused(self) -> None:
        for problem in self.problems():
            for rank in (0, HEAD_DIM + 1):
                try:
                    self.solver.solve(problem, rank)
                except ArgumentError as error:
                    assert str(rank) in str(error)
                else:
                    raise AssertionError(f"rank {rank} of head_dim {HEAD_DIM} is accepted")

    def test_loss_that_is_not_finite_is_an_error(self) -> None:
        for problem in self.problems():
            if not self._solved(problem).history:
                continue  # a solver that never asks for the loss
            broken = _Broken().problem(problem.activations, problem.site, problem.grouping)
            try:
                self.solver.solve(broken, 3)
            except RunError as error:
                assert "layer 1" in str(error)
                assert problem.site in str(error)
                assert "step" in str(error)
            else:
                raise AssertionError("a basis is returned although the loss is not a number")


class _Broken(Objective):
    """An objective whose loss is not a number."""

    def loss(self, problem: Problem, basis: Basis, batch: Batch | None = None) -> Tensor:
        return basis.down.sum() * float("nan")
