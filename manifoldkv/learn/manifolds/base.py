"""Bases of a problem as points of a manifold, with preconditioners of the site.

A loss depends on the projector ``down upᵀ`` only. That of an orthonormal basis is a subspace, a
point of a Grassmann manifold; that of an oblique basis is a pair of subspaces, the range and the
complement of the kernel. Leading dimensions of a point are a product of manifolds. All tensors of
this module are float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from geoopt.manifolds.base import Manifold
from torch import Tensor

from manifoldkv.core.basis import Basis
from manifoldkv.learn.manifolds.grassmann import Grassmann
from manifoldkv.learn.manifolds.quasi_newton import Preconditioner
from manifoldkv.learn.objectives import KQSVD
from manifoldkv.learn.objectives.base import Problem
from manifoldkv.learn.objectives.gram import GramObjective
from manifoldkv.learn.objectives.linear_algebra import leading_eigenvectors
from manifoldkv.statistics.layer import Batch

RIDGE = 1e-3
"""Multiple of the mean eigenvalue that is added to matrices of a preconditioner."""
FLOOR = 1e-6
"""Smallest eigenvalue of a matrix whose root is inverted, relative to the largest."""


class BasisManifold(ABC):
    """Bases of a problem at one rank as points of a manifold.

    Parameters
    ----------
    problem : Problem
        Problem whose bases are points.
    rank : int
        Rank per KV head.
    """

    manifold: Manifold = Grassmann()
    """Manifold of the points, or of each factor of a product."""
    nested: ClassVar[bool] = False
    """Whether a point has the bases of several ranks."""

    def __init__(self, problem: Problem, rank: int) -> None:
        self.problem = problem
        self.rank = rank
        self.columns = rank * problem.grouping.width
        self.gram, self.weight = problem.once(site_matrices)

    @abstractmethod
    def start(self) -> Tensor:
        """Return the starting point."""

    @abstractmethod
    def basis(self, point: Tensor) -> Basis:
        """Return the basis of a point in float64, differentiable in it."""

    @abstractmethod
    def preconditioner(self, point: Tensor) -> Preconditioner:
        """Return the inverse Hessian of a quadratic model of the loss at a point."""

    @abstractmethod
    def final(self, point: Tensor) -> Basis:
        """Return the basis of a point in the dtype of the calibration data."""

    def loss(self, point: Tensor, batch: Batch | None) -> Tensor:
        """Return the loss of a point, differentiable in it."""
        return self.problem.loss(self.basis(point).like(self.problem.activations.cos), batch)

    def projector(self, point: Tensor) -> Tensor:
        """Return orthogonal projectors (…, p, p) that determine a point and can be averaged."""
        return point @ point.mT

    def nearest(self, projector: Tensor) -> Tensor:
        """Return the point nearest to a mean of projectors."""
        return leading_eigenvectors(projector, self.columns)


def site_matrices(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return G and W of a quadratic model of a loss, (groups, p, p), of mean diagonal 1.

    Those of the objective if it is quadratic, else those of KQ-SVD: Gram matrices of keys or
    values, and of what reads them.
    """
    objective = problem.objective if isinstance(problem.objective, GramObjective) else KQSVD()
    quadratic = objective.problem(
        problem.activations, problem.site, problem.grouping, problem.rotary, problem.metric
    )
    gram, weight = objective.matrices(quadratic, None)
    if weight is None:
        weight = torch.eye(gram.shape[-1]).to(gram).expand_as(gram)
    if problem.grouping.groups == 1:
        gram, weight = gram.sum(dim=0, keepdim=True), weight.sum(dim=0, keepdim=True)
    return _of_mean_one(gram), _of_mean_one(weight)


def _mean_diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None]


def _of_mean_one(matrix: Tensor) -> Tensor:
    mean = _mean_diagonal(matrix)
    identity = torch.eye(matrix.shape[-1]).to(matrix)
    return torch.where(mean > 0, matrix / mean, identity)


def orthogonal_complement(columns: Tensor) -> Tensor:
    """Return an orthonormal basis (…, p, p - c) of the complement of columns (…, p, c)."""
    return torch.linalg.qr(columns, mode="complete").Q[..., columns.shape[-1] :]


def ridged(matrix: Tensor) -> Tensor:
    """Return positive semidefinite matrices of about 1 with a multiple of the identity added."""
    if not matrix.numel():
        return matrix
    scale = _mean_diagonal(matrix).clamp(min=FLOOR)  # some directions may have no variance
    return matrix + RIDGE * scale * torch.eye(matrix.shape[-1]).to(matrix)


def roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the root of a positive semidefinite matrix and the inverse of the root."""
    values, vectors = torch.linalg.eigh(matrix)
    roots = values.clamp(min=FLOOR * values[..., -1:]).sqrt().unsqueeze(-2)
    return (vectors * roots) @ vectors.mT, (vectors / roots) @ vectors.mT


def joint_eigenvectors(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return a and V with Vᵀ second V = I and Vᵀ first V = diag(a), for positive matrices."""
    inverse = torch.linalg.inv(torch.linalg.cholesky(second))
    values, vectors = torch.linalg.eigh(inverse @ first @ inverse.mT)
    return values, inverse.mT @ vectors
