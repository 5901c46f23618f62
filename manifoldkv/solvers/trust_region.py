"""Riemannian trust region of pymanopt on the Grassmann manifold."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pymanopt
import torch
from numpy.typing import NDArray
from pymanopt.manifolds import Grassmann
from pymanopt.optimizers import TrustRegions
from torch import Tensor

from manifoldkv.activations.layer import Batch
from manifoldkv.basis import check_rank
from manifoldkv.objectives.base import Problem
from manifoldkv.solvers.base import Solution, Solver, Status, register_solver
from manifoldkv.solvers.families import Orthonormal
from manifoldkv.solvers.quasi_newton import norm
from manifoldkv.solvers.riemannian_lbfgs import Evaluated
from manifoldkv.solvers.samples import sample_of_rows

Array = NDArray[np.float64]

ITERATIONS = 100
"""Largest number of steps on one sample."""
EXACT_TOLERANCE = 1e-7
"""Gradient norm at which descent on a cheap loss ends, relative to the start or to the loss."""


@register_solver("trust-region")
@dataclass(frozen=True)
class TrustRegion(Solver):
    """Trust region with truncated conjugate gradients, on samples of more and more query rows.

    Every sample has four times the rows of the one before. Products with the Hessian are
    differences of gradients (Boumal 2015, RTR-FD); the preconditioner is that of
    `RiemannianLBFGS`. With a cheap loss (`Objective.full_batch_is_cheap`) descent is on all data.
    The history is the loss of each accepted point.

    Parameters
    ----------
    rows : int
        Number of query rows of the first sample.
    samples : int
        Number of samples.
    tolerance : float
        Norm of the gradient, relative to the start, at which the first sample is left; each
        further one halves it, as four times the rows halve the error of a gradient.
    """

    rows: int = 256
    samples: int = 2
    tolerance: float = 0.1

    def solve(self, problem: Problem, rank: int, seed: int = 0) -> Solution:
        check_rank(rank, problem.activations.head_dim)
        family = Orthonormal(problem, rank)
        point = family.start()
        if rank == problem.activations.head_dim:
            return Solution(family.final(point), [], "converged")
        evaluate = Evaluated(family)
        history: list[float] = []
        if problem.objective.full_batch_is_cheap:
            loss, gradient = evaluate(point, None)
            target = EXACT_TOLERANCE * max(loss, norm(gradient))  # the start may be the optimum
            point, converged = _descended(evaluate, point, None, target, history)
        else:
            generator = torch.Generator().manual_seed(seed)
            for index in range(self.samples):
                batch = sample_of_rows(problem.activations, self.rows * 4**index, generator)
                if not index:
                    start = norm(evaluate(point, batch)[1])
                target = self.tolerance / 2**index * start
                point, converged = _descended(evaluate, point, batch, target, history)
        status: Status = "converged" if converged else "all steps taken"
        return Solution(family.final(point), history, status)


def _descended(
    evaluate: Evaluated, point: Tensor, batch: Batch | None, target: float, history: list[float]
) -> tuple[Tensor, bool]:
    """Return the point after descent to a gradient norm, and whether it was reached.

    Appends the losses of all points to the history.
    """
    descent = _Descent(evaluate, point.shape, batch)
    optimizer = TrustRegions(max_iterations=ITERATIONS, min_gradient_norm=target, verbosity=0)
    result = optimizer.run(descent.problem(), initial_point=descent.array(point))
    history += descent.history
    return descent.tensor(result.point), bool(result.gradient_norm <= target)


class _Descent:
    """A loss on one sample as a problem of pymanopt; the last evaluation is held."""

    def __init__(self, evaluate: Evaluated, shape: torch.Size, batch: Batch | None) -> None:
        self._evaluate = evaluate
        self._family = evaluate.family
        self._batch = batch
        self._shape = shape
        self._last: tuple[bytes, float, Tensor] | None = None
        self.history: list[float] = []
        # Differences of gradients are most exact over the root of the rounding error.
        self._width = math.sqrt(torch.finfo(self._family.problem.activations.dtype).eps)

    def problem(self) -> pymanopt.Problem:
        """Return the problem with gradient, Hessian and preconditioner."""
        groups, rows, columns = self._shape
        manifold = Grassmann(rows, columns, k=groups)

        @pymanopt.function.numpy(manifold)  # type: ignore[untyped-decorator]
        def cost(point: Array) -> float:
            return self._at(point)[0]

        @pymanopt.function.numpy(manifold)  # type: ignore[untyped-decorator]
        def gradient(point: Array) -> Array:
            loss, result = self._at(point)
            self.history.append(loss)  # pymanopt asks at points that it accepts alone
            return self.array(result)

        @pymanopt.function.numpy(manifold)  # type: ignore[untyped-decorator]
        def hessian(point: Array, vector: Array) -> Array:
            return self.array(self._hessian(point, self.tensor(vector)))

        def preconditioner(point: Array, vector: Array) -> Array:
            return self.array(self._family.preconditioner(self.tensor(point))(self.tensor(vector)))

        return pymanopt.Problem(
            manifold,
            cost,
            riemannian_gradient=gradient,
            riemannian_hessian=hessian,
            preconditioner=preconditioner,
        )

    def array(self, tensor: Tensor) -> Array:
        """Return a point or vector as pymanopt has it: without a leading dimension of 1."""
        array: Array = (tensor[0] if len(tensor) == 1 else tensor).numpy()
        return array

    def tensor(self, array: Array) -> Tensor:
        """Return a point or vector of pymanopt as (groups, p, c)."""
        return torch.from_numpy(np.ascontiguousarray(array)).view(self._shape)

    def _at(self, point: Array) -> tuple[float, Tensor]:
        key = point.tobytes()
        if self._last is None or self._last[0] != key:
            self._last = (key, *self._evaluate(self.tensor(point), self._batch))
        return self._last[1:]

    def _hessian(self, point: Array, vector: Tensor) -> Tensor:
        """Return the difference of gradients along a tangent vector."""
        length = norm(vector)
        if not length:
            return vector
        manifold, here = self._family.manifold, self.tensor(point)
        width = self._width / length
        _, there = self._evaluate(manifold.retr(here, width * vector), self._batch)
        return manifold.proju(here, there - self._at(point)[1]) / width
