"""Bases of a plan as trainable points of manifolds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import geoopt
import torch
from torch import Tensor, nn

from manifoldkv.basis import Basis, detached
from manifoldkv.commuting import commuting_basis, complex_columns
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.site import SitePlan
from manifoldkv.solvers.complex_stiefel import ComplexGrassmann


class MovingBases:
    """The bases of a plan; those of full rank do not move."""

    def __init__(self, plan: CompressionPlan, device: torch.device) -> None:
        self._layers = [
            (moving(layer.key.basis, device), moving(layer.value.basis, device))
            for layer in plan.layers
        ]

    def parameters(self) -> list[nn.Parameter]:
        """Return all that moves."""
        return [p for layer in self._layers for site in layer for p in site.parameters()]

    def now(self) -> dict[int, tuple[Basis | None, Basis | None]]:
        """Return what projects keys and values of every layer, None where nothing does."""
        return {index: (key(), value()) for index, (key, value) in enumerate(self._layers)}

    @torch.no_grad()
    def plan(self, start: CompressionPlan) -> CompressionPlan:
        """Return the plan with these bases."""
        layers = [
            replace(layer, key=SitePlan(key.stored()), value=SitePlan(value.stored()))
            for layer, (key, value) in zip(start.layers, self._layers, strict=True)
        ]
        return replace(start, layers=tuple(layers))


def moving(basis: Basis, device: torch.device) -> _MovingBasis | _MovingCommutingBasis:
    """Return a basis as trainable points of its manifolds."""
    return _MovingCommutingBasis(basis, device) if basis.commuting else _MovingBasis(basis, device)


class _MovingBasis(nn.Module):
    """One basis: `down` and, unless it is orthonormal, the subspace that is projected along.

    The projector of an oblique basis depends on the spans of `down` and `up` only, so that both
    stay orthonormal while they move.
    """

    def __init__(self, basis: Basis, device: torch.device) -> None:
        super().__init__()
        self._start = basis
        self._moves = basis.rank < basis.head_dim
        if self._moves:
            manifold = geoopt.Stiefel(canonical=True)
            self._down = geoopt.ManifoldParameter(_span(basis.down).to(device), manifold=manifold)
            if not basis.orthonormal:
                self._up = geoopt.ManifoldParameter(_span(basis.up).to(device), manifold=manifold)

    def forward(self) -> Basis | None:
        if not self._moves:
            return None
        if self._start.orthonormal:
            return Basis(self._down, self._down, self._start.grouping)
        return Basis(self._down, _dual(self._up, self._down), self._start.grouping)

    def stored(self) -> Basis:
        """Return the basis as a plan stores it."""
        if not self._moves:
            return self._start
        down = detached(_span(self._down.double()))
        up = down
        if not self._start.orthonormal:
            up = detached(_dual(detached(self._up.double()), down))
        return Basis(down, up, self._start.grouping).like(self._start.down)


class _MovingCommutingBasis(nn.Module):
    """A commuting basis: like `_MovingBasis`, a subspace or two of C^g for every frequency.

    Frequencies of as many latents move as one batch. Those of which all is kept, or nothing, do not
    move.
    """

    def __init__(self, basis: Basis, device: torch.device) -> None:
        super().__init__()
        self._start = basis
        down, up = (x.to(device) for x in complex_columns(basis))  # (G, g, pairs)
        self._columns = [down] if basis.orthonormal else [down, up]
        self._places = _places_of_moving(basis, device)
        self._points = [
            [
                geoopt.ManifoldParameter(_span(self._gathered(columns, at)), ComplexGrassmann())
                for at in self._places
            ]
            for columns in self._columns
        ]
        self._moving = nn.ParameterList(point for points in self._points for point in points)

    @staticmethod
    def _gathered(columns: Tensor, at: Tensor) -> Tensor:
        """Return the columns of some frequencies, (G, frequencies, g, r), at (frequencies, r)."""
        return columns[:, :, at].movedim(1, 2)

    def forward(self) -> Basis | None:
        if not self._places:
            return None
        return self._basis(self._points)

    def stored(self) -> Basis:
        """Return the basis as a plan stores it."""
        if not self._places:
            return self._start
        spans = [[_span(x.detach().to(torch.complex128)) for x in xs] for xs in self._points]
        found = self._basis(spans).like(self._start.down)
        down = detached(found.down)
        return replace(found, down=down, up=down if found.orthonormal else detached(found.up))

    def _basis(self, spans: Sequence[Sequence[Tensor]]) -> Basis:
        """Return the real basis with columns of these spans in the place of those that move."""
        down = spans[0]
        of_down = of_up = self._placed(self._columns[0], down)
        if len(spans) > 1:
            duals = [_dual(up, part) for up, part in zip(spans[1], down, strict=True)]
            of_up = self._placed(self._columns[1], duals)
        frequencies = self._start.frequencies or ()
        grouping, head_dim = self._start.grouping, self._start.head_dim
        return commuting_basis(of_down, of_up, frequencies, grouping, head_dim)

    def _placed(self, columns: Tensor, parts: Sequence[Tensor]) -> Tensor:
        columns = columns.to(parts[0].dtype)
        for at, part in zip(self._places, parts, strict=True):
            columns = columns.index_copy(2, at.flatten(), part.movedim(2, 1).flatten(2))
        return columns


def _places_of_moving(basis: Basis, device: torch.device) -> list[Tensor]:
    """Return which columns are of one frequency, (frequencies, r) for every r that leaves room."""
    frequencies = basis.frequencies or ()
    by_rank: dict[int, list[list[int]]] = {}
    for frequency in sorted(set(frequencies)):
        at = [i for i, own in enumerate(frequencies) if own == frequency]
        if len(at) < basis.grouping.width:
            by_rank.setdefault(len(at), []).append(at)
    return [torch.tensor(at, device=device) for _, at in sorted(by_rank.items())]


def _dual(span: Tensor, down: Tensor) -> Tensor:
    """Return the columns in a span for which ``upᵀ down``, or ``upᴴ down``, is the identity."""
    return torch.linalg.solve(span.mH @ down, span.mH).mH


def _span(columns: Tensor) -> Tensor:
    """Return orthonormal columns with the same span and the same signs, or phases."""
    wide = torch.promote_types(columns.dtype, torch.float64)
    q, r = torch.linalg.qr(columns.to(wide))
    return (q * r.diagonal(dim1=-2, dim2=-1).sgn().unsqueeze(-2)).to(columns.dtype)
