"""Laws of objectives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from manifoldkv.core.basis import Basis, HeadGrouping, Rotary, Site
from manifoldkv.core.errors import ArgumentError
from manifoldkv.learn.objectives import OBJECTIVES, Objective, Problem
from manifoldkv.statistics.layer import Batch
from manifoldkv.testing.checks import assert_describable, assert_orthonormal
from manifoldkv.testing.tiny import HEAD_DIM, KV_HEADS, random_basis, tiny_activations


class ObjectiveConformance:
    """Laws of `objective`; narrow `sites`, `groupings` or `rotaries` where it needs that."""

    objective: Objective
    sites: ClassVar[tuple[Site, ...]] = ("key", "value")
    groupings: ClassVar[tuple[str | int, ...]] = ("shared", 1, "all")
    rotaries: ClassVar[tuple[Rotary, ...]] = ("pre", "post")

    def problems(self) -> Iterator[Problem]:
        for site, name, rotary in product(self.sites, self.groupings, self.rotaries):
            grouping = HeadGrouping(name, KV_HEADS)
            yield self.objective.problem(tiny_activations(), site, grouping, rotary)

    def test_full_rank_costs_nothing(self) -> None:
        for problem in self.problems():
            assert abs(problem.loss(random_basis(HEAD_DIM, problem.grouping, 0)).item()) < 1e-6

    def test_less_than_full_rank_costs_something(self) -> None:
        for problem in self.problems():
            loss = problem.loss(random_basis(HEAD_DIM // 2, problem.grouping, 0)).item()
            assert math.isfinite(loss)
            assert loss > 1e-4

    def test_loss_sees_the_projector_only(self) -> None:
        for problem in self.problems():
            basis = random_basis(3, problem.grouping, 0)
            columns = basis.down.shape[-1]
            generator = torch.Generator().manual_seed(1)
            mixing = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
            rotation = torch.linalg.qr(mixing).Q
            rotated = Basis(basis.down @ rotation, basis.up @ rotation, basis.grouping)
            oblique = Basis(
                basis.down @ mixing, basis.up @ torch.linalg.inv(mixing).mT, basis.grouping
            )
            expected = problem.loss(basis)
            torch.testing.assert_close(problem.loss(rotated), expected, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(problem.loss(oblique), expected, rtol=1e-5, atol=1e-7)

    def test_gradient_is_the_slope_of_the_loss(self) -> None:
        for problem in self.problems():
            columns = random_basis(3, problem.grouping, 0).down.clone().requires_grad_()
            direction = random_basis(3, problem.grouping, 1).down

            def loss_at(p: Tensor, problem: Problem = problem) -> Tensor:
                return problem.loss(Basis(p, p, problem.grouping))

            (gradient,) = torch.autograd.grad(loss_at(columns), [columns])
            step = 1e-4
            ahead = loss_at(columns.detach() + step * direction)
            behind = loss_at(columns.detach() - step * direction)
            slope = (ahead - behind) / (2 * step)
            torch.testing.assert_close((gradient * direction).sum(), slope, rtol=2e-2, atol=2e-3)

    def test_without_a_batch_all_data_count(self) -> None:
        for problem in self.problems():
            basis = random_basis(3, problem.grouping, 0)
            everything = Batch(torch.arange(problem.activations.sequences))
            torch.testing.assert_close(problem.loss(basis), problem.loss(basis, everything))

    def test_start_is_orthonormal(self) -> None:
        for problem in self.problems():
            basis = problem.initial(3)
            assert basis.rank == 3
            assert basis.orthonormal
            assert_orthonormal(basis)

    def test_closed_form_is_optimal_or_refused(self) -> None:
        for problem in self.problems():
            exists, reason = self.objective.has_closed_form(problem.site, problem.grouping.name)
            if not exists:
                assert reason
                try:
                    problem.closed_form(3)
                except ArgumentError:
                    continue
                raise AssertionError("closed_form answers although has_closed_form denies it")
            best = problem.loss(problem.closed_form(3)).item()
            for seed in range(5):
                assert best <= problem.loss(random_basis(3, problem.grouping, seed)).item() + 1e-12
            assert best <= problem.loss(problem.initial(3)).item() + 1e-12

    def test_provenance_can_name_it(self) -> None:
        assert_describable(OBJECTIVES.describe(self.objective))

    def test_closed_form_improves_with_rank(self) -> None:
        for problem in self.problems():
            if self.objective.has_closed_form(problem.site, problem.grouping.name)[0]:
                losses = [problem.loss(problem.closed_form(r)).item() for r in (1, 3, 6, HEAD_DIM)]
                assert losses == sorted(losses, reverse=True)
                assert losses[-1] < 1e-6
