"""Bases of a plan as trainable points on manifolds."""

from __future__ import annotations

from dataclasses import replace

import geoopt
import torch
from torch import Tensor, nn

from manifoldkv.core.basis import Basis, detached
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.site import SitePlan


class TrainableBases:
    """Trainable bases of a plan; those of full rank are constant."""

    def __init__(self, plan: CompressionPlan, device: torch.device) -> None:
        self._layers = [
            (_TrainableBasis(layer.key.basis, device), _TrainableBasis(layer.value.basis, device))
            for layer in plan.layers
        ]

    def parameters(self) -> list[nn.Parameter]:
        """Return the points of all bases."""
        return [p for layer in self._layers for site in layer for p in site.parameters()]

    def now(self) -> dict[int, tuple[Basis | None, Basis | None]]:
        """Return the current bases of keys and values by layer, None at full rank."""
        return {index: (key(), value()) for index, (key, value) in enumerate(self._layers)}

    @torch.no_grad()
    def plan(self, start: CompressionPlan) -> CompressionPlan:
        """Return the plan `start` with the trained bases."""
        layers = [
            replace(layer, key=SitePlan(key.trained()), value=SitePlan(value.trained()))
            for layer, (key, value) in zip(start.layers, self._layers, strict=True)
        ]
        return replace(start, layers=tuple(layers))


class _TrainableBasis(nn.Module):
    """Trainable basis: `down` and, unless it is orthonormal, the span of `up`.

    The projector of an oblique basis depends on the two spans only, so both points are orthonormal.
    """

    def __init__(self, basis: Basis, device: torch.device) -> None:
        super().__init__()
        self._start = basis
        self._full = basis.rank == basis.head_dim
        if not self._full:
            manifold = geoopt.Stiefel(canonical=True)
            self._down = geoopt.ManifoldParameter(_span(basis.down).to(device), manifold=manifold)
            if not basis.orthonormal:
                self._up = geoopt.ManifoldParameter(_span(basis.up).to(device), manifold=manifold)

    def forward(self) -> Basis | None:
        if self._full:
            return None
        if self._start.orthonormal:
            return Basis(self._down, self._down, self._start.grouping)
        return Basis(self._down, _dual(self._up, self._down), self._start.grouping)

    def trained(self) -> Basis:
        """Return the basis at the current points, in the dtype of the plan."""
        if self._full:
            return self._start
        down = detached(_span(self._down.double()))
        up = down
        if not self._start.orthonormal:
            up = detached(_dual(detached(self._up.double()), down))
        return Basis(down, up, self._start.grouping).like(self._start.down)


def _dual(span: Tensor, down: Tensor) -> Tensor:
    """Return the columns `up` of a span for which ``upᵀ down`` is the identity."""
    return torch.linalg.solve(span.mT @ down, span.mT).mT


def _span(columns: Tensor) -> Tensor:
    """Return orthonormal columns of the same span, with the same signs."""
    q, r = torch.linalg.qr(columns.double())
    return (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).to(columns.dtype)
