"""Oblique bases: points of a product of two Grassmann manifolds."""

from __future__ import annotations

import torch
from torch import Tensor

from manifoldkv.core.basis import Basis
from manifoldkv.learn.manifolds.base import BasisManifold, ridged, roots
from manifoldkv.learn.manifolds.quasi_newton import Preconditioner
from manifoldkv.learn.objectives.base import Problem
from manifoldkv.learn.objectives.linear_algebra import representable


class Oblique(BasisManifold):
    """Pairs of subspaces (2, groups, p, c) in coordinates in which the site is white.

    With the roots of G and W of `site_matrices`, D = G^-½ X₀ and U = W^-½ X₁ span the range and the
    complement of the kernel of the projector, D (UᵀD)^-1 Uᵀ. The start is the closed form of
    KQ-SVD, the truncated SVD of G^½ W^½.
    """

    def __init__(self, problem: Problem, rank: int) -> None:
        super().__init__(problem, rank)
        self.gram_root, self.gram_inverse = roots(self.gram)
        self.weight_root, self.weight_inverse = roots(self.weight)

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
