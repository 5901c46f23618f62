"""Orthonormal bases: points of a Grassmann manifold."""

from __future__ import annotations

import torch
from torch import Tensor

from manifoldkv.core.basis import Basis, orthonormal_basis
from manifoldkv.learn.manifolds.base import (
    BasisManifold,
    joint_eigenvectors,
    orthogonal_complement,
    ridged,
)
from manifoldkv.learn.manifolds.quasi_newton import Memory, Preconditioner, minimise

MODEL_MEMORY, MODEL_TOLERANCE, MODEL_EVALUATIONS = 20, 1e-3, 100
"""Steps remembered, relative gradient norm and evaluations of a descent on KQ-SVD's loss."""


class Orthonormal(BasisManifold):
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
