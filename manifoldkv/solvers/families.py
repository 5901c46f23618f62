"""Bases of a problem as points of a manifold, with preconditioners of the site.

A loss depends on the projector ``down upᵀ`` only. That of an orthonormal basis is a subspace, a
point of a Grassmann manifold; that of an oblique basis is a pair of subspaces, the range and the
complement of the kernel. Leading dimensions of a point are a product of manifolds. All tensors of
this module are float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from geoopt.manifolds.base import Manifold
from torch import Tensor

from manifoldkv.activations.layer import Batch
from manifoldkv.basis import Basis, orthonormal_basis
from manifoldkv.objectives import KQSVD
from manifoldkv.objectives.base import Problem
from manifoldkv.objectives.gram import GramObjective
from manifoldkv.objectives.linear_algebra import leading_eigenvectors, representable
from manifoldkv.solvers.grassmann import Grassmann
from manifoldkv.solvers.quasi_newton import Memory, Preconditioner, minimise

RIDGE = 1e-3
"""Multiple of the mean eigenvalue that is added to matrices of a preconditioner."""
FLOOR = 1e-6
"""Smallest eigenvalue of a matrix whose root is inverted, relative to the largest."""
MODEL_MEMORY, MODEL_TOLERANCE, MODEL_EVALUATIONS = 20, 1e-3, 100
"""Steps remembered, relative gradient norm and evaluations of a descent on KQ-SVD's loss."""


class Family(ABC):
    """Bases of a problem at one rank as points of a manifold.

    Parameters
    ----------
    problem : Problem
        Problem whose bases are points.
    rank : int
        Rank per KV head.
    """

    manifold: Manifold = Grassmann()

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


class Orthonormal(Family):
    """Subspaces X (groups, p, c): down = up = X."""

    def start(self) -> Tensor:
        """Return the minimiser of KQ-SVD's loss, which takes milliseconds from Gram matrices."""
        initial = self.problem.initial(self.rank).down.double()
        if self.problem.objective.full_batch_is_cheap:
            return initial
        start, _, _ = minimise(
            self.model,
            initial,
            self.preconditioner,
            Memory(self.manifold, MODEL_MEMORY),
            tolerance=MODEL_TOLERANCE,
            evaluations=MODEL_EVALUATIONS,
        )
        return start

    def model(self, point: Tensor) -> tuple[float, Tensor]:
        """Return KQ-SVD's loss and its Riemannian gradient."""
        loss, gradient = self.quadratic(point)
        return loss, self.manifold.egrad2rgrad(point, gradient)

    def quadratic(self, columns: Tensor) -> tuple[float, Tensor]:
        """Return tr(D G D W), D = I - X Xᵀ, of columns X (groups, p, c), and its gradient."""
        residual = torch.eye(columns.shape[-2]).to(columns) - columns @ columns.mT
        slope = self.gram @ residual @ self.weight
        return float((residual * slope).sum()), -2 * (slope + slope.mT) @ columns

    def basis(self, point: Tensor) -> Basis:
        return Basis(point, point, self.problem.grouping)

    def preconditioner(self, point: Tensor) -> Preconditioner:
        """Return the inverse Hessian of KQ-SVD's loss without its negative terms.

        With G and W of `site_matrices` and Y the orthogonal complement of X, a tangent vector
        Y Z maps to Y (YᵀWY Z XᵀGX + YᵀGY Z XᵀWX): two Kronecker products, diagonal in the
        generalised eigenvectors of their factors.
        """
        complement = orthogonal_complement(point)
        outside, left = joint_eigenvectors(
            ridged(complement.mT @ self.weight @ complement),
            ridged(complement.mT @ self.gram @ complement),
        )
        inside, right = joint_eigenvectors(
            ridged(point.mT @ self.gram @ point), ridged(point.mT @ self.weight @ point)
        )
        left = complement @ left
        curvature = outside.unsqueeze(-1) * inside.unsqueeze(-2) + 1
        return lambda vector: left @ ((left.mT @ vector @ right) / curvature) @ right.mT

    def final(self, point: Tensor) -> Basis:
        dtype = self.problem.activations.dtype
        return orthonormal_basis(point.to(dtype), self.problem.grouping)


class Oblique(Family):
    """Pairs of subspaces (2, groups, p, c) in coordinates in which the site is white.

    With the roots of G and W of `site_matrices`, D = G^-½ X₀ and U = W^-½ X₁ span the range and the
    complement of the kernel of the projector, D (UᵀD)^-1 Uᵀ. The start is the closed form of
    KQ-SVD, the truncated SVD of G^½ W^½.
    """

    def __init__(self, problem: Problem, rank: int) -> None:
        super().__init__(problem, rank)
        self.gram_root, self.gram_inverse = _roots(self.gram)
        self.weight_root, self.weight_inverse = _roots(self.weight)

    def start(self) -> Tensor:
        left, _, right = torch.linalg.svd(self.gram_root @ self.weight_root)
        return torch.stack([left[..., : self.columns], right.mT[..., : self.columns]])

    def basis(self, point: Tensor) -> Basis:
        down, up = self.gram_inverse @ point[0], self.weight_inverse @ point[1]
        return Basis(torch.linalg.solve(up.mT @ down, down, left=False), up, self.problem.grouping)

    def preconditioner(self, point: Tensor) -> Preconditioner:
        """Return a map by the latents' energies, to which the curvature of KQ-SVD's loss is equal
        for small residuals."""
        core = torch.linalg.inv(self._product(point))  # of G^½ (projector) W^½, (groups, c, c)
        energies = ridged(torch.stack([core @ core.mT, core.mT @ core]))
        return lambda vector: torch.linalg.solve(energies, vector, left=False)

    def final(self, point: Tensor) -> Basis:
        # Of all bases of a projector, the one of KQ-SVD's form: uncorrelated latents, falling.
        left, gains, right = torch.linalg.svd(torch.linalg.inv(self._product(point)))
        down = self.gram_inverse @ point[0] @ (left * gains.unsqueeze(-2))
        up = self.weight_inverse @ point[1] @ right.mT
        groups = zip(self.gram, gains, down, up, strict=True)
        pairs = [representable(*group) for group in groups]
        down, up = (
            torch.stack(parts).to(self.problem.activations.dtype)
            for parts in zip(*pairs, strict=True)
        )
        return Basis(down, up, self.problem.grouping)

    def _product(self, point: Tensor) -> Tensor:
        return (self.weight_inverse @ point[1]).mT @ (self.gram_inverse @ point[0])


def site_matrices(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return G and W of a quadratic model of a loss, (groups, p, p), of mean diagonal 1.

    Those of the objective if it is quadratic, else those of KQ-SVD: Gram matrices of keys or
    values, and of what reads them.
    """
    objective = problem.objective if isinstance(problem.objective, GramObjective) else KQSVD()
    quadratic = objective.problem(
        problem.activations, problem.site, problem.grouping, problem.rotary
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


def _roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the root of a positive semidefinite matrix and the inverse of the root."""
    values, vectors = torch.linalg.eigh(matrix)
    roots = values.clamp(min=FLOOR * values[..., -1:]).sqrt().unsqueeze(-2)
    return (vectors * roots) @ vectors.mT, (vectors / roots) @ vectors.mT


def joint_eigenvectors(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return a and V with Vᵀ second V = I and Vᵀ first V = diag(a), for positive matrices."""
    inverse = torch.linalg.inv(torch.linalg.cholesky(second))
    values, vectors = torch.linalg.eigh(inverse @ first @ inverse.mT)
    return values, inverse.mT @ vectors
