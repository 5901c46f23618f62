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
    residual matters (the identity where it is None). This is the squared Frobenius norm of the
    residual ``x - x down upᵀ``, seen through W, relative to that of x itself.
    """

    full_batch_is_cheap = True

    @abstractmethod
    def matrices(self, sequences: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """G and W of some sequences (None: all) by run, both (runs, width·d, width·d), float64."""

    def data(self, sequences: Tensor | None = None) -> Tensor:
        """As in `Problem`, but not kept: a Gram matrix needs each number once."""
        batch = None if sequences is None else Batch(sequences)
        made = self.activations.projections(self.rotary, batch)
        return made.keys if self.site == "key" else made.values

    @cached_property
    def _whole(self) -> tuple[Tensor, Tensor | None]:
        return self.matrices(None)

    def loss(self, basis: Basis, batch: Batch | None = None) -> Tensor:
        gram, weight = self._whole if batch is None else self.matrices(batch.sequences)
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
        dtype = self.activations.dtype
        gram, weight = self._whole
        if weight is None:
            return leading_basis(gram, rank, self.grouping, dtype)
        down, up = weighted_closed_form(gram, weight, rank * self.grouping.width)
        return Basis(down.to(dtype), up.to(dtype), self.grouping)

    def initial(self, rank: int) -> Basis:
        check_rank(rank, self.activations.head_dim)
        return leading_basis(self._whole[0], rank, self.grouping, self.activations.dtype)
