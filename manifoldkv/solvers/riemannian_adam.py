"""Riemannian Adam on geoopt's Stiefel manifold, with sampled query rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from manifoldkv.solvers.samples import random_sequences, stratified_rows

BETAS = (0.9, 0.95)
"""Decay rates of the mean gradient and its mean square. The usual 0.999 lets the steep first steps
shorten all later ones."""


def riemannian_adam(
    points: Sequence[geoopt.ManifoldParameter], learning_rate: float
) -> geoopt.optim.RiemannianAdam:
    """Return the optimiser of points on manifolds that solvers and tuning use."""
    return geoopt.optim.RiemannianAdam(points, lr=learning_rate, betas=BETAS, stabilize=10)


@register_solver("riemannian-adam")
@dataclass(frozen=True)
class RiemannianAdam(Solver):
    """Riemannian Adam from the initial basis of an objective or from a random point.

    Every step samples sequences and query rows, which prevents overfitting. Steps are long, and
    their noise is averaged: the solution is the subspace nearest to those of the second half of the
    steps (the leading eigenvectors of their mean projector), while the learning rate decays to zero
    along a cosine. With a cheap loss (`Objective.full_batch_is_cheap`), steps are on all data and
    the solution is the last point. The history is the loss of each step.

    Parameters
    ----------
    steps : int
        Largest number of steps.
    learning_rate : float
        Initial learning rate. geoopt's Adam normalises a step by the norm of the gradient of a
        whole matrix, so this is nearly the length of a step on the manifold.
    metric : {"canonical", "euclidean"}
        Metric of the Stiefel manifold.
    sequences_per_step : int
        Number of sequences of a step.
    visits : int
        Largest mean number of samples of a sequence, which limits the steps.
    rows : int
        Number of query rows of each sequence of a step.
    start : {"initial", "random"}
        Starting point: `Problem.initial` or a random one.
    """

    steps: int = 300
    learning_rate: float = 1.5
    metric: Literal["canonical", "euclidean"] = "canonical"
    sequences_per_step: int = 4
    visits: int = 125
    rows: int = 64
    start: Literal["initial", "random"] = "initial"

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
        """Train points on any manifolds in place and return the loss of each step.

        Parameters
        ----------
        problem : Problem
            Loss and data.
        basis : callable
            Function that returns the basis at the current points, differentiable in them.
        points : sequence of geoopt.ManifoldParameter
            Points on their manifolds; `metric` has no effect.
        generator : torch.Generator
            Random generator of the samples.
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
        """Return the number of steps, smaller with few sequences."""
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
        """Return a sample of data for a step; None for all."""
        if problem.objective.full_batch_is_cheap:
            return None
        activations = problem.activations
        sequences = random_sequences(activations.sequences, self.sequences_per_step, generator)
        rows = stratified_rows(activations.length, self.rows, generator)
        return Batch(sequences, rows)
