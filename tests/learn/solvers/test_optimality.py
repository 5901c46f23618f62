"""Iterative solvers against optima that were found without them."""

import numpy as np
import pymanopt
import pytest
import torch
from pymanopt.manifolds import Grassmann
from pymanopt.optimizers import TrustRegions

from manifoldkv.core.basis import Basis, HeadGrouping
from manifoldkv.core.errors import ArgumentError
from manifoldkv.learn.objectives import Problem
from manifoldkv.learn.objectives.eigen_attention import EigenAttention
from manifoldkv.learn.objectives.k_svd import KSVD
from manifoldkv.learn.objectives.kq_svd import KQSVD
from manifoldkv.learn.objectives.layer_output import LayerOutput
from manifoldkv.learn.solvers.closed_form import ClosedForm
from manifoldkv.learn.solvers.predictor import Predictor
from manifoldkv.learn.solvers.riemannian_adam import RiemannianAdam
from manifoldkv.testing import HEAD_DIM, KV_HEADS, tiny_activations

RANK = 3


def problem_of(objective, site="key", grouping="shared", dtype=torch.float64) -> Problem:
    return objective.problem(tiny_activations(dtype), site, HeadGrouping(grouping, KV_HEADS))


@pytest.mark.parametrize("objective", [KSVD(), EigenAttention()])
@pytest.mark.parametrize("grouping", ["shared", 1, "all"])
@pytest.mark.parametrize("metric", ["canonical", "euclidean"])
def test_riemannian_adam_from_a_random_start_reaches_the_closed_form(objective, grouping, metric):
    rate = 3.0 if metric == "canonical" else 1.0
    solver = RiemannianAdam(start="random", metric=metric, learning_rate=rate)
    problem = problem_of(objective, "key", grouping)
    exact = problem.loss(problem.closed_form(RANK)).item()
    found = problem.loss(solver.solve(problem, RANK, seed=1).basis).item()
    assert exact <= found * (1 + 1e-12)
    assert found == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize(("site", "grouping"), [("key", "shared"), ("key", 1), ("value", 1)])
def test_riemannian_adam_finds_the_optimum_pymanopt_finds(site, grouping):
    """KQ-SVD restricted to orthonormal bases has no closed form; the oracle is a second-order
    method on the Grassmannian with derivatives written by hand."""
    problem = problem_of(KQSVD(), site, grouping)
    gram, weight = [x.numpy() for x in problem.objective.matrices(problem, None)]
    groups = [range(KV_HEADS)] if grouping == "shared" else [[h] for h in range(KV_HEADS)]
    best = sum(grassmann_optimum(gram[list(g)], weight[list(g)]) for g in groups)
    best /= np.einsum("hij,hij->", gram, weight)
    found = problem.loss(RiemannianAdam().solve(problem, RANK).basis).item()
    assert found == pytest.approx(best, rel=1e-4)


def grassmann_optimum(gram: np.ndarray, weight: np.ndarray) -> float:
    """Least Σ tr(D G D W) over D = I - PPᵀ, best of three random starts."""
    manifold = Grassmann(HEAD_DIM, RANK)
    identity = np.eye(HEAD_DIM)

    @pymanopt.function.numpy(manifold)
    def cost(p):
        d = identity - p @ p.T
        return np.einsum("hij,hij->", gram @ d, d @ weight)

    @pymanopt.function.numpy(manifold)
    def euclidean_gradient(p):
        d = identity - p @ p.T
        outer = (gram @ d @ weight + weight @ d @ gram).sum(axis=0)
        return -(outer + outer.T) @ p

    @pymanopt.function.numpy(manifold)
    def euclidean_hessian(p, x):
        d, step = identity - p @ p.T, -(x @ p.T + p @ x.T)
        outer = (gram @ d @ weight + weight @ d @ gram).sum(axis=0)
        change = (gram @ step @ weight + weight @ step @ gram).sum(axis=0)
        return -(outer + outer.T) @ x - (change + change.T) @ p

    quadratic = pymanopt.Problem(
        manifold,
        cost,
        euclidean_gradient=euclidean_gradient,
        euclidean_hessian=euclidean_hessian,
    )
    np.random.seed(0)  # noqa: NPY002 (pymanopt draws its starts from here)
    return min(TrustRegions(verbosity=0).run(quadratic).cost for _ in range(3))


@pytest.mark.parametrize(("site", "grouping"), [("key", "shared"), ("value", 1)])
def test_layer_output_solvers_agree_and_beat_their_start(site, grouping):
    problem = problem_of(LayerOutput(), site, grouping)
    start = problem.loss(problem.initial(RANK)).item()
    adam = problem.loss(RiemannianAdam(steps=300).solve(problem, RANK).basis).item()
    predictor = problem.loss(Predictor().solve(problem, RANK).basis).item()
    assert adam < 0.97 * start
    assert predictor < start
    assert adam < 1.02 * predictor


def test_predictor_stops_when_epochs_no_longer_improve():
    problem = problem_of(KSVD())
    full_rank = Predictor().solve(problem, HEAD_DIM)
    assert full_rank.status == "stopped early"
    assert len(full_rank.history) == 6  # the first epoch, and patience


def test_predictor_history_is_a_loss_per_epoch():
    problem = problem_of(KSVD())
    solution = Predictor(epochs=3).solve(problem, RANK)
    assert len(solution.history) == 3
    assert solution.status == "all steps taken"
    assert solution.history[-1] < solution.history[0]


def test_predictor_returns_the_basis_of_its_best_epoch():
    class Turning(Problem):
        """Asks for the opposite after the first epoch."""

        calls = 0

        def loss(self, basis, batch=None):
            self.calls += 1
            error = super().loss(basis, batch)
            return error if self.calls <= 2 else 2 - error

    activations = tiny_activations()
    grouping = HeadGrouping("shared", KV_HEADS)
    batch = -(-activations.sequences // 2)  # two steps an epoch
    predictor = Predictor(epochs=6, key_batch=batch)
    solution = predictor.solve(Turning(KSVD(), activations, "key", grouping), RANK)
    assert len(solution.history) == 6
    assert min(solution.history) == solution.history[0]
    found = KSVD().problem(activations, "key", grouping).loss(solution.basis).item()
    assert found < solution.history[0]


def test_closed_form_refuses_with_the_reason():
    accepted, reason = ClosedForm().accepts(LayerOutput(), "key", "shared")
    assert not accepted
    assert "not linear in its bases" in reason
    problem = problem_of(LayerOutput())
    with pytest.raises(ArgumentError, match="no closed form"):
        ClosedForm().solve(problem, RANK)


def test_riemannian_adam_stays_on_the_manifold_in_float32():
    problem = problem_of(LayerOutput(), "value", 1, torch.float32)
    columns = RiemannianAdam(steps=100).solve(problem, RANK).basis.down
    identity = torch.eye(RANK).expand(KV_HEADS, RANK, RANK)
    torch.testing.assert_close(columns.mT @ columns, identity, rtol=0, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_riemannian_adam_takes_as_few_steps_as_one(steps):
    solution = RiemannianAdam(steps=steps).solve(problem_of(LayerOutput(), "value", 1), RANK)
    assert len(solution.history) == steps
    assert solution.basis.orthonormal


def test_oblique_optimum_is_no_worse_than_the_orthonormal_one():
    problem = problem_of(KQSVD(), "key", 1)
    orthonormal = RiemannianAdam().solve(problem, RANK).basis
    assert isinstance(orthonormal, Basis)
    assert orthonormal.orthonormal
    assert problem.loss(problem.closed_form(RANK)) <= problem.loss(orthonormal)
