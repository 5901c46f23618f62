"""L-BFGS on the manifolds of geoopt."""

from __future__ import annotations

import math
from collections.abc import Callable

from geoopt.manifolds.base import Manifold
from torch import Tensor

SUFFICIENT_DECREASE = 1e-4
FIRST_STEP = 0.3
"""Length of the first step, in radians."""
SHORTEST_STEP = 1e-6
"""Smallest fraction of a quasi-Newton step that the line search tries."""
LEAST_CURVATURE = 1e-8
"""Smallest cosine between a step and the change of the gradient along it that is remembered."""
ROUNDING = 2e-14
"""Smallest predicted decrease of a loss, relative to it, that is not rounding."""

LossAndGradient = Callable[[Tensor], tuple[float, Tensor]]
Preconditioner = Callable[[Tensor], Tensor]
"""Approximate inverse Hessian: a symmetric positive linear map of tangent vectors."""


class Memory:
    """Last steps and changes of the gradient: an inverse Hessian (Nocedal 1980).

    Transport between tangent spaces is projection, so that a cautious update (a step without
    positive curvature is not remembered) keeps it positive.

    Parameters
    ----------
    manifold : geoopt.Manifold
        Manifold of the points, with the metric of the surrounding space.
    size : int
        Largest number of steps.
    """

    def __init__(self, manifold: Manifold, size: int) -> None:
        self.manifold = manifold
        self._size = size
        self._steps: list[Tensor] = []
        self._changes: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Tensor, change: Tensor) -> None:
        """Remember a step and the change of the gradient along it, if it has curvature."""
        if inner(step, change) > LEAST_CURVATURE * norm(step) * norm(change):
            self._steps = [*self._steps, step][-self._size :]
            self._changes = [*self._changes, change][-self._size :]

    def newton_step(self, point: Tensor, gradient: Tensor, precondition: Preconditioner) -> Tensor:
        """Return minus the inverse Hessian times a gradient, tangent at a point."""
        pairs = []
        for step, change in zip(self._steps, self._changes, strict=True):
            moved = self.manifold.proju(point, step), self.manifold.proju(point, change)
            if (curvature := inner(*moved)) > LEAST_CURVATURE * norm(moved[0]) * norm(moved[1]):
                pairs.append((*moved, curvature))
        weights = []
        for step, change, curvature in reversed(pairs):
            weights.append(inner(step, gradient) / curvature)
            gradient = gradient - weights[-1] * change
        result = precondition(gradient)
        if pairs:
            _, change, curvature = pairs[-1]
            result = result * (curvature / inner(change, precondition(change)))
        for (step, change, curvature), weight in zip(pairs, reversed(weights), strict=True):
            result = result + (weight - inner(change, result) / curvature) * step
        return -self.manifold.proju(point, result)


def minimise(
    function: LossAndGradient,
    point: Tensor,
    preconditioner: Callable[[Tensor], Preconditioner],
    memory: Memory,
    *,
    tolerance: float,
    evaluations: int,
) -> tuple[Tensor, list[float], bool]:
    """Minimise a function on the manifold of a memory; the loss decreases with every step.

    Parameters
    ----------
    function : callable
        Loss and Riemannian gradient at a point.
    point : Tensor
        Starting point, float64.
    preconditioner : callable
        Preconditioner at a point.
    memory : Memory
        Memory of steps, changed in place.
    tolerance : float
        Norm of the gradient, relative to that at the start, at which to stop.
    evaluations : int
        Largest number of evaluations of the function.

    Returns
    -------
    tuple
        Last point, losses of all points, and whether the tolerance was reached or no decrease above
        rounding is left.
    """
    manifold = memory.manifold
    loss, gradient = function(point)
    history, used = [loss], 1
    target = tolerance * norm(gradient)
    while norm(gradient) > target and used < evaluations:
        step = memory.newton_step(point, gradient, preconditioner(point))
        slope = inner(gradient, step)
        if -slope <= ROUNDING * abs(loss):
            return point, history, True
        length = 1.0 if len(memory) else min(1.0, FIRST_STEP / norm(step))
        while True:
            trial = manifold.retr(point, length * step)
            trial_loss, trial_gradient = function(trial)
            used += 1
            if trial_loss <= loss + SUFFICIENT_DECREASE * length * slope:
                break
            if length < SHORTEST_STEP or used >= evaluations:
                return point, history, False
            length *= _shorter(loss, trial_loss, length * slope)
        memory.add(
            manifold.proju(trial, length * step),
            trial_gradient - manifold.proju(trial, gradient),
        )
        point, loss, gradient = trial, trial_loss, trial_gradient
        history.append(loss)
    return point, history, norm(gradient) <= target


def inner(first: Tensor, second: Tensor) -> float:
    """Return the inner product of two tangent vectors of a product of manifolds."""
    return float((first * second).sum())


def norm(vector: Tensor) -> float:
    """Return the norm of a tangent vector of a product of manifolds."""
    return math.sqrt(inner(vector, vector))


def _shorter(loss: float, trial: float, slope: float) -> float:
    """Return the factor to the minimum of the parabola through two losses, 0.1 to 0.5."""
    if not math.isfinite(trial):
        return 0.1
    return max(0.1, min(0.5, -slope / (2 * (trial - loss - slope))))
