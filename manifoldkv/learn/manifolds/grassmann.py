"""Grassmann manifold with geoopt's interface, which has no Grassmann manifold.

Leading dimensions are a batch: a product of manifolds (Edelman, Arias and Smith 1998,
arXiv:physics/9806030).
"""

from __future__ import annotations

import torch
from geoopt.manifolds.base import Manifold
from torch import Tensor

Checked = tuple[bool, str | None]


class Grassmann(Manifold):
    """Subspaces, represented by X (…, n, p) with Xᵀ X = I, for losses that depend on X Xᵀ only.

    Tangent vectors U are horizontal, Xᵀ U = 0. Retraction is the polar factor of X + U; transport
    is projection onto the new tangent space.
    """

    name = "Grassmann"
    ndim = 2
    reversible = False

    def _check_shape(self, shape: tuple[int, ...], name: str) -> Checked:
        ok, reason = super()._check_shape(shape, name)
        if ok and shape[-1] > shape[-2]:
            return False, f"`{name}` has {shape[-1]} columns, more than its {shape[-2]} rows"
        return ok, reason

    def _check_point_on_manifold(
        self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> Checked:
        product = x.mT @ x
        identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand_as(product)
        if torch.allclose(product, identity, atol=atol, rtol=rtol):
            return True, None
        return False, f"`X^T X != I` with atol={atol}, rtol={rtol}"

    def _check_vector_on_tangent(
        self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> Checked:
        if torch.allclose(self.proju(x, u), u, atol=atol, rtol=rtol):
            return True, None
        return False, f"`u` is not tangent with atol={atol}, rtol={rtol}"

    def projx(self, x: Tensor) -> Tensor:
        """Return the nearest point, the polar factor."""
        left, _, right = torch.linalg.svd(x, full_matrices=False)
        return left @ right

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """Return the nearest tangent vector."""
        return u - x @ (x.mT @ u)

    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """Return the Riemannian gradient, the horizontal part of torch's gradient."""
        return self.proju(x, u)

    def inner(
        self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False
    ) -> Tensor:
        """Return tr(Uᵀ V)."""
        product = u * (u if v is None else v)
        return product.sum(dim=(-1, -2), keepdim=keepdim)

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """Return the retraction of a tangent vector."""
        return self.projx(x + u)

    expmap = retr

    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Return a tangent vector at x transported to y."""
        return self.proju(y, v)
