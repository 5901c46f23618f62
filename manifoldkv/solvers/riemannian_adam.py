"""Riemannian Adam over geoopt's Stiefel manifold, on sampled query rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import geoopt
import torch
from torch import Tensor

from manifoldkv.activations.layer import Batch
from manifoldkv.basis import Basis, check_rank, orthonormal_basis
from manifoldkv.objectives.base import Problem
from manifoldkv.objectives.linear_algebra import leading_eigenvectors
from manifoldkv.solvers.base import Solution, Solver, label_of, register_solver
from manifoldkv.solvers.driver import descend

BETAS = (0.9, 0.95)
"""Decay of the mean gradient and of its mean square. The usual 0.999 would remember the steep
first steps to the end and shorten all later ones."""


def riemannian_adam(
    points: Sequence[geoopt.ManifoldParameter], learning_rate: float
) -> geoopt.optim.RiemannianAdam:
    """Return the optimiser of points on manifolds, by which solvers and tuning move them."""
    return geoopt.optim.RiemannianAdam(points, lr=learning_rate, betas=BETAS, stabilize=10)


@register_solver("riemannian-adam")
@dataclass(frozen=True)
class RiemannianAdam(Solver):
    """Moves the basis itself along the manifold, from a closed form or a random point.

    Every step draws new sequences and new query rows, so that the rows that are looked at never
    become the rows that are fitted. Steps are long, and the noise they leave is averaged away: the
    solution is the subspace nearest to those of the second half of the steps (the leading
    eigenvectors of the mean of their projectors), while the learning rate falls to zero along a
    cosine. Where the whole loss is cheap (`Objective.full_batch_is_cheap`), all data are taken:
    there is no noise, and the last point counts. The history is the loss of each step.

    Parameters
    ----------
    steps : int
        Steps taken, if there is data enough for them.
    learning_rate : float
        At the start. geoopt's Adam normalises a step by the norm of the gradient over a whole
        matrix, so this is nearly the length of a step on the manifold.
    metric : {"canonical", "euclidean"}
        Metric of the Stiefel manifold.
    sequences_per_step : int
        Sequences in a sample.
    visits : int
        A sequence is drawn this often at most, on average: few sequences are not fitted for ever.
    rows : int
        Query rows of each of them: the cost of a step hardly depends on their length.
    start : {"initial", "random"}
        `Problem.initial`, or a random point.
    """

    steps: int = 300
    learning_rate: float = 1.5
    metric: Literal["canonical", "euclidean"] = "canonical"
    sequences_per_step: int = 4
    visits: int = 125
    rows: int = 64
    start: Literal["initial", "random"] = "initial"

    def probe_run(self, share: float) -> tuple[Solver, float]:
        """Return this solver with a few steps, which do not take longer on more data."""
        few = max(1, self.steps // 30)
        return replace(self, steps=few), self.steps / few

    def solve(self, problem: Problem, rank: int, seed: int = 0) -> Solution:
        check_rank(rank, problem.activations.head_dim)
        generator = torch.Generator().manual_seed(seed)
        manifold = geoopt.Stiefel(canonical=self.metric == "canonical")
        start = self._start(problem, rank, generator)
        columns = geoopt.ManifoldParameter(start, manifold=manifold)
        averaged = not problem.objective.full_batch_is_cheap
        steps = self.steps_on(problem)
        size = start.shape[-2]
        projectors = start.new_zeros(len(start), size, size, dtype=torch.float64)

        def add_projector(history: list[float]) -> bool:
            if averaged and 2 * len(history) > steps:
                late = columns.detach()
                projectors.add_((late @ late.mT).double())
            return False

        def basis() -> Basis:
            return Basis(columns, columns, problem.grouping)

        history = self.train(problem, basis, [columns], generator, add_projector)
        if averaged:
            final = leading_eigenvectors(projectors, columns.shape[-1]).to(columns)
        else:
            final = manifold.projx(columns.detach())
        return Solution(orthonormal_basis(final, problem.grouping), history, "all steps taken")

    def train(
        self,
        problem: Problem,
        basis: Callable[[], Basis],
        points: Sequence[geoopt.ManifoldParameter],
        generator: torch.Generator,
        callback: Callable[[list[float]], bool] | None = None,
    ) -> list[float]:
        """Train points of any manifolds in place and return the loss of each step.

        Parameters
        ----------
        problem : Problem
            Loss and data.
        basis : callable
            Returns the basis at the current points, differentiable in them.
        points : sequence of geoopt.ManifoldParameter
            Trained points; the manifold of each is its own, not `metric`.
        generator : torch.Generator
            Source of the samples.
        callback : callable, optional
            As in `descend`.

        Raises
        ------
        RunError
            If a loss is not finite.
        """
        steps = self.steps_on(problem)
        optimizer = riemannian_adam(points, self.learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

        def closure(step: int) -> float:
            loss = problem.loss(basis(), self.batch(problem, generator))
            loss.backward(inputs=points)
            return loss.item()

        return descend(
            closure, optimizer, schedule, steps, label=label_of(problem), callback=callback
        )

    def steps_on(self, problem: Problem) -> int:
        """Return the steps taken, fewer where there are few sequences."""
        if problem.objective.full_batch_is_cheap:
            return self.steps
        enough = self.visits * problem.activations.sequences / self.sequences_per_step
        return max(1, min(self.steps, math.floor(enough)))

    def _start(self, problem: Problem, rank: int, generator: torch.Generator) -> Tensor:
        if self.start == "initial":
            return problem.initial(rank).down.clone()
        grouping = problem.grouping
        size = problem.activations.head_dim * grouping.width
        normal = torch.randn(
            grouping.groups, size, rank * grouping.width, generator=generator, dtype=torch.float64
        )
        return torch.linalg.qr(normal).Q.to(problem.activations.cos)

    def batch(self, problem: Problem, generator: torch.Generator) -> Batch | None:
        """Return the sample of a step; None for all data."""
        if problem.objective.full_batch_is_cheap:
            return None
        activations = problem.activations
        sequences = random_sequences(activations.sequences, self.sequences_per_step, generator)
        rows = stratified_rows(activations.length, self.rows, generator)
        return Batch(sequences, rows)


def stratified_rows(length: int, count: int, generator: torch.Generator) -> Tensor | None:
    """Return a random position of each of `count` equal parts, (count,), or None if that is all."""
    if count >= length:
        return None
    edges = torch.linspace(0, length, count + 1, dtype=torch.float64)
    within = torch.rand(count, generator=generator, dtype=torch.float64)
    rows = (edges[:-1] + within * edges.diff()).floor()
    return rows.clamp(max=length - 1).long()


def random_sequences(total: int, count: int, generator: torch.Generator) -> Tensor:
    """Return indices of `count` different sequences, (count,); all of them if there are fewer."""
    return torch.randperm(total, generator=generator)[:count]
