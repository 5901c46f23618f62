"""Riemannian L-BFGS, with few query rows first and all of them later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from manifoldkv.core.basis import check_rank
from manifoldkv.core.errors import ArgumentError
from manifoldkv.core.modes import in_own_modes
from manifoldkv.learn.manifolds import MANIFOLDS, BasisManifold, Flags
from manifoldkv.learn.manifolds.quasi_newton import Memory, minimise, norm
from manifoldkv.learn.objectives.base import Problem
from manifoldkv.learn.solvers.base import Solution, Solver, Status, checked, register_solver
from manifoldkv.learn.solvers.samples import row_batches, sample_of_rows
from manifoldkv.statistics.layer import Batch

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
    """Riemannian L-BFGS on a manifold of bases.

    Descent begins on one sample of query rows, with a line search, and ends when its gradient is
    small. As a larger sample would cost most of the time in its first evaluations, further rows are
    streamed instead: every step takes rows that no step took before, and goes a part of the
    quasi-Newton step of their gradient; the solution is the subspace nearest to those of the second
    half of the steps. With a cheap loss (`Objective.full_batch_is_cheap`) all descent is on all
    data. The history is the loss of each step.

    The inverse Hessian is that of L-BFGS over a preconditioner of Gram matrices of keys or values
    (see `manifoldkv.learn.manifolds`).

    On a flag manifold the bases of all ranks are found together: the descent is on the mean loss of
    all ranks (Ye, Wong and Lim 2022, arXiv:1907.00949), and the leading columns of a basis are the
    basis of any smaller rank.

    Parameters
    ----------
    manifold : {"grassmann", "oblique", "flag", "oblique-flag"}
        Orthonormal bases; pairs of subspaces, whose projection and reconstruction are not
        transposes (twice the parameters, the same cache); or nested bases of either kind.
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

    manifold: str = "grassmann"
    rows: int = 256
    sequences_per_step: int = 16
    tolerance: float = 0.1
    steps: int = 64
    step_size: float = 0.8

    def __post_init__(self) -> None:
        if self.manifold not in MANIFOLDS:
            known = ", ".join(MANIFOLDS)
            raise ArgumentError(f"unknown manifold {self.manifold!r}; known: {known}")

    @property
    def joint(self) -> bool:
        return MANIFOLDS[self.manifold].nested

    @in_own_modes
    def solve(self, problem: Problem, rank: int, seed: int = 0) -> Solution:
        check_rank(rank, problem.activations.head_dim)
        if self.joint:
            ((_, solution),) = self.solve_ranks(problem, [rank], seed)
            return solution
        points = MANIFOLDS[self.manifold](problem, rank)
        point, history, status = self.descend(points, seed)
        return Solution(points.final(point), history, status)

    @in_own_modes
    def solve_ranks(
        self, problem: Problem, ranks: Sequence[int], seed: int = 0
    ) -> Iterator[tuple[int, Solution]]:
        flags = MANIFOLDS[self.manifold]
        if not issubclass(flags, Flags):
            yield from super().solve_ranks(problem, ranks, seed)
            return
        ranks = sorted(set(ranks))
        for rank in ranks:
            check_rank(rank, problem.activations.head_dim)
        smaller = [rank for rank in ranks if rank < problem.activations.head_dim]
        points = flags(problem, smaller or ranks)
        point, history, status = self.descend(points, seed)
        for rank, basis in points.bases(point, ranks):
            yield rank, Solution(basis, history, status)

    def descend(self, points: BasisManifold, seed: int) -> tuple[Tensor, list[float], Status]:
        """Return the point of least loss, the loss of each step and the status.

        Raises
        ------
        RunError
            If a loss is not finite.
        """
        problem = points.problem
        generator = torch.Generator().manual_seed(seed)
        cheap = problem.objective.full_batch_is_cheap
        sample = None if cheap else sample_of_rows(problem.activations, self.rows, generator)
        evaluate = Evaluated(points)
        memory = Memory(points.manifold, REMEMBERED)
        point, history, converged = minimise(
            lambda x: evaluate(x, sample),
            points.start(),
            points.preconditioner,
            memory,
            tolerance=EXACT_TOLERANCE if cheap else self.tolerance,
            evaluations=EVALUATIONS,
        )
        if cheap or points.rank == problem.activations.head_dim:
            return point, history, "converged" if converged else "all steps taken"
        point, losses = self._stream(evaluate, point, memory, generator)
        return point, history + losses, "all steps taken"

    def _stream(
        self, evaluate: Evaluated, point: Tensor, memory: Memory, generator: torch.Generator
    ) -> tuple[Tensor, list[float]]:
        """Take steps on new rows; return the mean of the later points, and all losses."""
        points = evaluate.points
        activations = points.problem.activations
        rows = max(1, self.rows // min(self.sequences_per_step, activations.sequences))
        batches = row_batches(activations, self.sequences_per_step, rows, generator)
        projectors = torch.zeros_like(points.projector(point))
        losses: list[float] = []
        for batch in islice(batches, self.steps):
            loss, gradient = evaluate(point, batch)
            losses.append(loss)
            step = memory.newton_step(point, gradient, points.preconditioner(point))
            length = min(self.step_size, LONGEST_STEP / max(norm(step), LONGEST_STEP))
            point = points.manifold.retr(point, length * step)
            if 2 * len(losses) > self.steps:
                projectors += points.projector(point)
        return points.nearest(projectors), losses


@register_solver("oblique")
@dataclass(frozen=True)
class ObliqueLBFGS(RiemannianLBFGS):
    """Riemannian L-BFGS over pairs of subspaces: oblique bases, from the closed form of KQ-SVD."""

    manifold: str = "oblique"


@register_solver("flag")
@dataclass(frozen=True)
class Flag(RiemannianLBFGS):
    """Riemannian L-BFGS over flags: nested orthonormal bases of all ranks by one solve."""

    manifold: str = "flag"
    steps: int = 128


@register_solver("oblique-flag")
@dataclass(frozen=True)
class ObliqueFlag(RiemannianLBFGS):
    """Riemannian L-BFGS over pairs of flags: nested oblique bases of all ranks by one solve."""

    manifold: str = "oblique-flag"


class Evaluated:
    """Loss and Riemannian gradient of the points of a points."""

    def __init__(self, points: BasisManifold) -> None:
        self.points = points
        self._count = 0

    def __call__(self, point: Tensor, batch: Batch | None) -> tuple[float, Tensor]:
        points, leaf = self.points, point.clone().requires_grad_()
        loss = points.loss(leaf, batch)
        (gradient,) = torch.autograd.grad(loss, leaf)
        self._count += 1
        value = checked(loss, points.problem, self._count)
        return value, points.manifold.egrad2rgrad(point, gradient)
