"""Quadratic objectives: losses that depend on the data through Gram matrices alone."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manifoldkv.core.basis import Basis, Site
from manifoldkv.core.errors import ArgumentError
from manifoldkv.learn.objectives.base import Objective, Problem
from manifoldkv.learn.objectives.linear_algebra import leading_basis, weighted_closed_form
from manifoldkv.statistics.layer import Batch
from manifoldkv.statistics.statistics import Statistics, TensorStatistics

SMALLEST = 1e-30
"""Smallest squared norm that an error is relative to."""


@dataclass(frozen=True)
class GramObjective(Objective):
    """Minimise Σ_g tr(Dᵀ G_g D W_g) / Σ_g tr(G_g W_g) with D = I - down upᵀ.

    G is the Gram matrix of keys or values x, W a weight of residuals, the identity if None. The
    loss is the squared Frobenius norm of the residual ``x - x down upᵀ`` in the metric W, relative
    to that of x.
    """

    full_batch_is_cheap: ClassVar[bool] = True
    has_metric: ClassVar[bool] = True
    weighs_residuals: ClassVar[bool] = False
    """Whether `matrices` returns a W, by head group."""

    @abstractmethod
    def matrices(self, problem: Problem, sequences: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return G and W by head group, (H/width, width·d, width·d), float64, of `sequences`.

        All sequences if None.
        """

    def metric(self, statistics: Statistics, layer: int, site: Site) -> Tensor:
        """Return W relative to the squared norm of x in it, which the loss is relative to."""
        of_tensor = statistics.layers[layer].of(site)
        weight = self.weight(of_tensor)
        return weight / (of_tensor.second * weight).sum().clamp(min=SMALLEST)

    @abstractmethod
    def weight(self, statistics: TensorStatistics) -> Tensor:
        """Return W of all heads of a layer, (D, D), float64."""

    def loss(self, problem: Problem, basis: Basis, batch: Batch | None = None) -> Tensor:
        if batch is None:
            gram, weight = problem.once(self._all_matrices)
        else:
            gram, weight = self.matrices(problem, batch.sequences)
        # The leading axis of `gram` is head groups; a shared basis has one and broadcasts.
        projector = basis.projector().to(gram.dtype)
        residual = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device) - projector
        if weight is None:
            error = (residual * (gram @ residual)).sum()
            return (error / gram.diagonal(dim1=-2, dim2=-1).sum()).to(basis.down.dtype)
        error = ((gram @ residual) * (residual @ weight)).sum()
        return (error / (gram * weight).sum()).to(basis.down.dtype)

    def has_closed_form(self, site: Site, grouping: str | int) -> tuple[bool, str]:
        if self.weighs_residuals and grouping == "shared":
            return False, (
                f"{type(self).__name__} has no closed form for a basis shared by all heads: each "
                "head weighs the residual differently; use grouping 1, a number of heads, or all"
            )
        return True, ""

    def closed_form(self, problem: Problem, rank: int) -> Basis:
        """Return leading eigenvectors of G; with a weight, the pair of `weighted_closed_form`."""
        exists, reason = self.has_closed_form(problem.site, problem.grouping.name)
        if not exists:
            raise ArgumentError(reason)
        gram, weight = problem.once(self._all_matrices)
        dtype, grouping = problem.activations.dtype, problem.grouping
        if weight is None:
            return leading_basis(gram, rank, grouping, dtype)
        down, up = weighted_closed_form(gram, weight, rank * grouping.width)
        return Basis(down.to(dtype), up.to(dtype), grouping)

    def initial(self, problem: Problem, rank: int) -> Basis:
        gram, _ = problem.once(self._all_matrices)
        return leading_basis(gram, rank, problem.grouping, problem.activations.dtype)

    def _all_matrices(self, problem: Problem) -> tuple[Tensor, Tensor | None]:
        return self.matrices(problem, None)
