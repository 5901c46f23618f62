"""Quadratic problems: losses that depend on the data through Gram matrices alone."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property

import torch
from torch import Tensor

from manifoldkv.basis import Basis, check_rank
from manifoldkv.objectives.base import Batch, Problem
from manifoldkv.objectives.linear_algebra import leading_basis, weighted_closed_form


class GramProblem(Problem):
    """Minimise Σ_g tr(Dᵀ G_g D W_g) / Σ_g tr(G_g W_g) with D = I - down upᵀ.

    G is the Gram matrix of what is projected, the weight W says how much each direction of the
    residual matters (identity where `weight` is None). This is the squared Frobenius norm of the
    residual ``x - x down upᵀ``, seen through W, relative to that of x itself.
    """

    full_batch_is_cheap = True

    @abstractmethod
    def gram(self, sequences: Tensor | None) -> Tensor:
        """Gram matrices of some sequences (None: all) by run, (runs, width·d, width·d)."""

    def weight(self, sequences: Tensor | None) -> Tensor | None:
        """Weights of the residual by run, shaped like `gram`, or None."""
        return None

    @cached_property
    def _whole(self) -> tuple[Tensor, Tensor | None]:
        return self.gram(None), self.weight(None)

    def loss(self, basis: Basis, batch: Batch | None = None) -> Tensor:
        if batch is None:
            gram, weight = self._whole
        else:
            gram, weight = self.gram(batch.sequences), self.weight(batch.sequences)
        # The leading axis of `gram` is runs; a shared basis has one group and broadcasts.
        projector = basis.projector().to(gram.dtype)
        residual = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device) - projector
        if weight is None:
            lost = (residual * (gram @ residual)).sum()
            return (lost / gram.diagonal(dim1=-2, dim2=-1).sum()).to(basis.down.dtype)
        lost = ((gram @ residual) * (residual @ weight)).sum()
        return (lost / (gram * weight).sum()).to(basis.down.dtype)

    def closed_form(self, rank: int) -> Basis:
        """Leading eigenvectors of G; with a weight, the oblique pair of `weighted_closed_form`."""
        check_rank(rank, self.activations.head_dim)
        dtype = self.activations.keys.dtype
        gram, weight = self._whole
        if weight is None:
            return leading_basis(gram, rank, self.grouping, dtype)
        down, up = weighted_closed_form(gram, weight, rank * self.grouping.width)
        return Basis(down.to(dtype), up.to(dtype), self.grouping)

    def initial(self, rank: int) -> Basis:
        check_rank(rank, self.activations.head_dim)
        return leading_basis(self._whole[0], rank, self.grouping, self.activations.keys.dtype)
