"""Riemannian L-BFGS on Grassmann manifolds, with few query rows first and all of them later."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import torch
from torch import Tensor

from manifoldkv.activations.layer import Batch
from manifoldkv.basis import check_rank
from manifoldkv.objectives.base import Problem
from manifoldkv.solvers.base import Solution, Solver, Status, checked, register_solver
from manifoldkv.solvers.families import Family, Oblique, Orthonormal
from manifoldkv.solvers.quasi_newton import Memory, minimise, norm
from manifoldkv.solvers.samples import row_batches, sample_of_rows

REMEMBERED = 20
"""Steps of the memory of L-BFGS."""
EVALUATIONS = 500
"""Largest number of evaluations of a loss on one sample, or of a cheap loss."""
EXACT_TOLERANCE = 1e-8
"""Relative gradient norm at which descent on a cheap loss ends."""
LONGEST_STEP = 0.3
"""Length of the longest step on sampled rows, in radians."""


@register_solver("riemannian-l-bfgs")
@dataclass(frozen=True)
class RiemannianLBFGS(Solver):
    """Riemannian L-BFGS on the Grassmann manifold: orthonormal bases.

    Descent begins on one sample of query rows, with a line search, and ends when its gradient is
    small. As a larger sample would cost most of the time in its first evaluations, further rows are
    streamed instead: every step takes rows that no step took before, and goes a part of the
    quasi-Newton step of their gradient; the solution is the subspace nearest to those of the second
    half of the steps. With a cheap loss (`Objective.full_batch_is_cheap`) all descent is on all
    data. The history is the loss of each step.

    The inverse Hessian is that of L-BFGS over a preconditioner of Gram matrices of the site (see
    `manifoldkv.solvers.families`).

    Parameters
    ----------
    rows : int
        Number of query rows of the sample and of every later step.
    sequences_per_step : int
        Number of sequences of the rows of a later step.
    tolerance : float
        Norm of the gradient on the sample, relative to the start, at which the stream begins.
    steps : int
        Number of steps of the stream.
    step_size : float
        Fraction of the quasi-Newton step in the stream.
    """

    rows: int = 256
    sequences_per_step: int = 16
    tolerance: float = 0.1
    steps: int = 64
    step_size: float = 0.8

    family: ClassVar[type[Family]] = Orthonormal

    def solve(self, problem: Problem, rank: int, seed: int = 0) -> Solution:
        check_rank(rank, problem.activations.head_dim)
        family = self.family(problem, rank)
        point, history, status = self.descend(family, seed)
        return Solution(family.final(point), history, status)

    def descend(self, family: Family, seed: int) -> tuple[Tensor, list[float], Status]:
        """Return the point of least loss of a family, the loss of each step and the status.

        Raises
        ------
        RunError
            If a loss is not finite.
        """
        problem = family.problem
        generator = torch.Generator().manual_seed(seed)
        cheap = problem.objective.full_batch_is_cheap
        sample = None if cheap else sample_of_rows(problem.activations, self.rows, generator)
        evaluate = Evaluated(family)
        memory = Memory(family.manifold, REMEMBERED)
        point, history, converged = minimise(
            lambda x: evaluate(x, sample),
            family.start(),
            family.preconditioner,
            memory,
            tolerance=EXACT_TOLERANCE if cheap else self.tolerance,
            evaluations=EVALUATIONS,
        )
        if cheap or family.rank == problem.activations.head_dim:
            return point, history, "converged" if converged else "all steps taken"
        point, losses = self._stream(evaluate, point, memory, generator)
        return point, history + losses, "all steps taken"

    def _stream(
        self, evaluate: Evaluated, point: Tensor, memory: Memory, generator: torch.Generator
    ) -> tuple[Tensor, list[float]]:
        """Take steps on new rows; return the mean of the later points, and all losses."""
        family = evaluate.family
        activations = family.problem.activations
        rows = max(1, self.rows // min(self.sequences_per_step, activations.sequences))
        batches = row_batches(activations, self.sequences_per_step, rows, generator)
        projectors = torch.zeros_like(family.projector(point))
        losses: list[float] = []
        for batch in islice(batches, self.steps):
            loss, gradient = evaluate(point, batch)
            losses.append(loss)
            step = memory.newton_step(point, gradient, family.preconditioner(point))
            length = min(self.step_size, LONGEST_STEP / max(norm(step), LONGEST_STEP))
            point = family.manifold.retr(point, length * step)
            if 2 * len(losses) > self.steps:
                projectors += family.projector(point)
        return family.nearest(projectors), losses


@register_solver("oblique")
@dataclass(frozen=True)
class ObliqueLBFGS(RiemannianLBFGS):
    """Riemannian L-BFGS over pairs of subspaces: oblique bases.

    Projection and reconstruction are not transposes: twice the parameters, the same cache. The
    start is the closed form of KQ-SVD.
    """

    family: ClassVar[type[Family]] = Oblique


class Evaluated:
    """Loss and Riemannian gradient of the points of a family."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self._count = 0

    def __call__(self, point: Tensor, batch: Batch | None) -> tuple[float, Tensor]:
        family, leaf = self.family, point.clone().requires_grad_()
        loss = family.loss(leaf, batch)
        (gradient,) = torch.autograd.grad(loss, leaf)
        self._count += 1
        value = checked(loss, family.problem, self._count)
        return value, family.manifold.egrad2rgrad(point, gradient)
