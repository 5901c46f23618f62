"""Laws of descent on Grassmann and flag manifolds; pymanopt and closed forms are the oracles."""

from itertools import pairwise

import pymanopt
import pytest
import torch
from torch import Tensor

from manifoldkv.basis import HeadGrouping, orthonormality_error
from manifoldkv.objectives import KQSVD, KSVD, EigenAttention, LayerOutput, Problem
from manifoldkv.solvers import (
    Flag,
    ObliqueFlag,
    ObliqueLBFGS,
    RiemannianAdam,
    RiemannianLBFGS,
)
from manifoldkv.solvers.families import Family, Oblique, Orthonormal
from manifoldkv.solvers.flag import Flags, ObliqueFlags, OrthonormalFlags
from manifoldkv.solvers.quasi_newton import inner
from manifoldkv.solvers.riemannian_lbfgs import Evaluated
from manifoldkv.testing import HEAD_DIM, KV_HEADS, tiny_activations

RANK = 3
RANKS = (1, 3, 5)
SOLVERS = (RiemannianLBFGS(), ObliqueLBFGS(), Flag(), ObliqueFlag())


def problem_of(objective, site="key", grouping="shared") -> Problem:
    return objective.problem(tiny_activations(), site, HeadGrouping(grouping, KV_HEADS))


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def rotation(*shape: int, seed: int = 1) -> Tensor:
    return torch.linalg.qr(noise(*shape, seed=seed)).Q


def turned_start(family: Family) -> Tensor:
    """A point near the start: at the start itself some gradients are zero."""
    point = family.start()
    return family.manifold.retr(point, 0.3 * family.manifold.proju(point, noise(*point.shape)))


def families(objective, site, grouping) -> list[Family]:
    problem = problem_of(objective, site, grouping)
    nested = OrthonormalFlags(problem, RANKS), ObliqueFlags(problem, RANKS)
    return [Orthonormal(problem, RANK), Oblique(problem, RANK), *nested]


def geodesic(family: Family, point: Tensor, vector: Tensor) -> Tensor:
    if isinstance(family, Flags):  # geoopt's exponential map of the Stiefel manifold
        return family.manifold.expmap(point, vector)
    shape = point.shape
    flat, direction = (x.reshape(-1, *shape[-2:]).squeeze(0).numpy() for x in (point, vector))
    copies = point.numel() // shape[-1] // shape[-2]
    oracle = pymanopt.manifolds.Grassmann(*shape[-2:], k=copies)
    return torch.from_numpy(oracle.exp(flat, direction)).view(shape)


@pytest.mark.parametrize("objective", [KQSVD(), LayerOutput()])
@pytest.mark.parametrize(("site", "grouping"), [("key", "shared"), ("value", 1), ("key", "all")])
class TestGradients:
    def test_are_slopes_along_geodesics(self, objective, site, grouping):
        for family in families(objective, site, grouping):
            evaluate, point = Evaluated(family), turned_start(family)
            vector = family.manifold.proju(point, noise(*point.shape, seed=3))
            vector /= vector.norm()
            slope = inner(evaluate(point, None)[1], vector)
            exact = family.problem.objective.full_batch_is_cheap  # others attend in float32
            width, tolerance = (1e-5, 1e-5) if exact else (2e-4, 1e-2)
            ends = [geodesic(family, point, sign * width * vector) for sign in (1, -1)]
            losses = [evaluate(end, None)[0] for end in ends]
            found = (losses[0] - losses[1]) / (2 * width)
            assert found == pytest.approx(slope, rel=tolerance, abs=tolerance / 100)

    def test_turn_with_the_columns(self, objective, site, grouping):
        for family in families(objective, site, grouping):
            evaluate, point = Evaluated(family), turned_start(family)
            counts = getattr(family, "counts", [family.columns])
            turn = torch.zeros(*point.shape[:-2], point.shape[-1], point.shape[-1]).double()
            for first, last in pairwise([0, *counts]):
                turn[..., first:last, first:last] = rotation(
                    *point.shape[:-2], last - first, last - first
                )
            loss, gradient = evaluate(point, None)
            turned_loss, turned_gradient = evaluate(point @ turn, None)
            assert turned_loss == pytest.approx(loss, rel=1e-9)
            torch.testing.assert_close(turned_gradient, gradient @ turn, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("solver", [RiemannianLBFGS(steps=8), ObliqueLBFGS(steps=8)])
def test_the_solution_does_not_depend_on_the_columns_of_the_start(solver, monkeypatch):
    problem = problem_of(LayerOutput(), "key", 1)
    expected = solver.solve(problem, RANK).basis.projector()
    family = solver.family
    start = family.start

    def turned(self) -> Tensor:
        point = start(self)
        return point @ rotation(*point.shape[:-2], point.shape[-1], point.shape[-1])

    monkeypatch.setattr(family, "start", turned)
    found = solver.solve(problem, RANK).basis.projector()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("solver", "objective", "grouping"),
    [
        (solver, objective, grouping)
        for solver in (RiemannianLBFGS(), Flag())
        for objective in (KSVD(), EigenAttention())
        for grouping in ("shared", 1, "all")
    ]
    + [(s, KQSVD(), x) for s in (ObliqueLBFGS(), ObliqueFlag()) for x in (1, "all")],
)
def test_descent_from_a_random_point_ends_at_the_closed_form(
    solver, objective, grouping, monkeypatch
):
    problem = problem_of(objective, "key", grouping)
    for family in (Orthonormal, Oblique):
        start = family.start

        def random(self, start=start) -> Tensor:
            point = start(self)
            return rotation(*point.shape)

        monkeypatch.setattr(family, "start", random)
    exact = problem.loss(problem.closed_form(RANK)).item()
    found = problem.loss(solver.solve(problem, RANK).basis).item()
    assert found == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("solver", SOLVERS)
def test_losses_on_all_data_fall_with_every_step(solver):
    history = solver.solve(problem_of(KQSVD(), "key", 1), RANK).history
    assert history
    assert all(later <= earlier for earlier, later in pairwise(history))


@pytest.mark.parametrize("solver", [Flag(steps=8), ObliqueFlag(steps=8)])
@pytest.mark.parametrize("objective", [KQSVD(), LayerOutput()])
@pytest.mark.parametrize("grouping", ["shared", 1, "all"])
class TestFlags:
    def test_leading_columns_are_the_basis_of_every_rank(self, solver, objective, grouping):
        problem = problem_of(objective, "value", grouping)
        solutions = dict(solver.solve_ranks(problem, [HEAD_DIM, 1, 3, 3]))
        assert list(solutions) == [1, 3, HEAD_DIM]
        widest = solutions[HEAD_DIM].basis
        for rank, solution in solutions.items():
            basis, columns = solution.basis, rank * problem.grouping.width
            assert basis.rank == rank
            assert orthonormality_error(basis) < 1e-9
            assert torch.equal(basis.down, widest.down[..., :columns])
            assert torch.equal(basis.up, widest.up[..., :columns])

    def test_more_columns_cost_less(self, solver, objective, grouping):
        problem = problem_of(objective, "value", grouping)
        solutions = dict(solver.solve_ranks(problem, range(1, HEAD_DIM)))
        losses = [problem.loss(solution.basis).item() for solution in solutions.values()]
        assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(
    ("flags", "family"), [(OrthonormalFlags, Orthonormal), (ObliqueFlags, Oblique)]
)
def test_bases_of_a_flag_are_those_of_its_leading_columns(flags, family):
    problem = problem_of(KQSVD(), "key", "all")
    nested = flags(problem, RANKS)
    point = turned_start(nested)
    for rank, basis in nested.bases(point, RANKS):
        alone = family(problem, rank).basis(point[..., : rank * KV_HEADS])
        torch.testing.assert_close(basis.projector(), alone.projector(), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("solver", "objective"), [(Flag(), KSVD()), (ObliqueFlag(), KQSVD())])
def test_a_flag_of_a_nested_optimum_is_optimal_at_every_rank(solver, objective):
    """The optima of K-SVD and of KQ-SVD are leading singular vectors, which are nested."""
    problem = problem_of(objective, "key", 1)
    for rank, solution in solver.solve_ranks(problem, RANKS):
        exact = problem.loss(problem.closed_form(rank)).item()
        assert problem.loss(solution.basis).item() == pytest.approx(exact, rel=1e-6)


def test_oblique_bases_are_better_than_orthonormal_ones():
    problem = problem_of(LayerOutput(), "key", "all")
    losses = [
        problem.loss(solver.solve(problem, RANK).basis).item()
        for solver in (ObliqueLBFGS(), RiemannianLBFGS())
    ]
    closed_form = KQSVD().problem(problem.activations, "key", problem.grouping).closed_form(RANK)
    assert losses[0] < losses[1]
    assert losses[0] < problem.loss(closed_form).item()


def test_layer_output_is_as_small_as_by_riemannian_adam():
    problem = problem_of(LayerOutput(), "value", 1)
    solvers = RiemannianLBFGS(), RiemannianAdam()
    losses = [problem.loss(solver.solve(problem, RANK).basis).item() for solver in solvers]
    assert losses[0] < 1.005 * losses[1]
