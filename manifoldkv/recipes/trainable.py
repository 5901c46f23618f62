"""Bases of a plan as trainable points on manifolds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import geoopt
import torch
from torch import Tensor, nn

from manifoldkv.basis import Basis, detached
from manifoldkv.commuting import commuting_basis, complex_columns
from manifoldkv.manifolds.grassmann import Grassmann
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.site import SitePlan


class TrainableBases:
    """Trainable bases of a plan; those of full rank are constant."""

    def __init__(self, plan: CompressionPlan, device: torch.device) -> None:
        self._layers = [
            (trainable(layer.key.basis, device), trainable(layer.value.basis, device))
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


def trainable(basis: Basis, device: torch.device) -> _RealBasis | _CommutingBasis:
    """Return a basis as trainable points on its manifolds."""
    return _CommutingBasis(basis, device) if basis.commuting else _RealBasis(basis, device)


class _RealBasis(nn.Module):
    """Trainable real basis: `down` and, unless it is orthonormal, the span of `up`.

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


class _CommutingBasis(nn.Module):
    """Trainable commuting basis: one or two subspaces of C^g for every frequency.

    Frequencies of equal rank are one batch. Those of rank 0 or g are constant.
    """

    def __init__(self, basis: Basis, device: torch.device) -> None:
        super().__init__()
        self._start = basis
        down, up = complex_columns(basis)  # (G, g, pairs)
        columns = (down,) if basis.orthonormal else (down, up)
        self._columns = [x.to(device) for x in columns]
        self._indices = _columns_by_rank(basis, device)
        self._points = [
            # (G, frequencies, g, r) of indices (frequencies, r)
            [_point(columns[:, :, index].movedim(1, 2)) for index in self._indices]
            for columns in self._columns
        ]
        self._registered = nn.ParameterList(p for points in self._points for p in points)

    def forward(self) -> Basis | None:
        return self._basis(self._points) if self._indices else None

    def trained(self) -> Basis:
        """Return the basis at the current points, in the dtype of the plan."""
        if not self._indices:
            return self._start
        spans = [[_span(x.detach().to(torch.complex128)) for x in xs] for xs in self._points]
        basis = self._basis(spans).like(self._start.down)
        down = detached(basis.down)
        return replace(basis, down=down, up=down if basis.orthonormal else detached(basis.up))

    def _basis(self, spans: Sequence[Sequence[Tensor]]) -> Basis:
        """Return the real basis with the columns of `spans` in place of the trained ones."""
        down = up = self._with(self._columns[0], spans[0])
        if len(spans) > 1:
            duals = [_dual(up, down) for up, down in zip(spans[1], spans[0], strict=True)]
            up = self._with(self._columns[1], duals)
        start = self._start
        return commuting_basis(down, up, start.frequencies or (), start.grouping, start.head_dim)

    def _with(self, columns: Tensor, parts: Sequence[Tensor]) -> Tensor:
        columns = columns.to(parts[0].dtype)
        for index, part in zip(self._indices, parts, strict=True):
            columns = columns.index_copy(2, index.flatten(), part.movedim(2, 1).flatten(2))
        return columns


def _point(columns: Tensor) -> geoopt.ManifoldParameter:
    return geoopt.ManifoldParameter(_span(columns), Grassmann())


def _columns_by_rank(basis: Basis, device: torch.device) -> list[Tensor]:
    """Return the indices of columns by frequency, (frequencies, r) for every rank r < g."""
    frequencies = basis.frequencies or ()
    by_rank: dict[int, list[list[int]]] = {}
    for frequency in sorted(set(frequencies)):
        columns = [i for i, other in enumerate(frequencies) if other == frequency]
        if len(columns) < basis.grouping.width:
            by_rank.setdefault(len(columns), []).append(columns)
    return [torch.tensor(columns, device=device) for _, columns in sorted(by_rank.items())]


def _dual(span: Tensor, down: Tensor) -> Tensor:
    """Return the columns `up` of a span for which ``upᴴ down`` is the identity."""
    return torch.linalg.solve(span.mH @ down, span.mH).mH


def _span(columns: Tensor) -> Tensor:
    """Return orthonormal columns of the same span, with the same signs or phases."""
    wide = torch.promote_types(columns.dtype, torch.float64)
    q, r = torch.linalg.qr(columns.to(wide))
    return (q * r.diagonal(dim1=-2, dim2=-1).sgn().unsqueeze(-2)).to(columns.dtype)
