"""Gram matrices of grouped heads and their eigenvalue problems, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from manifoldkv.basis import ORTHONORMAL_TOLERANCE, Basis, HeadGrouping, orthonormal_basis

RELATIVE_FLOOR = 1e-10
"""Smallest eigenvalue of a weight, relative to the largest."""
HELD_TOLERANCE = ORTHONORMAL_TOLERANCE / 2
"""Largest entry of ``upᵀ down - I`` in float32."""
NEGLIGIBLE = 1e-9
"""Gain of a useless column, relative to the largest gain."""
LARGEST_NORM = 16.0
"""Largest norm of columns of down and of up for which float32 represents the identity."""


def gram_by_group(x: Tensor, grouping: HeadGrouping) -> Tensor:
    """Return Gram matrices of x (S, H, n, d), (H/width, width·d, width·d), float64."""
    groups = grouping.split(x).transpose(0, 1).flatten(1, 2).double()  # (H/width, S·n, width·d)
    return groups.mT @ groups


def block_diagonal(blocks: Tensor, grouping: HeadGrouping) -> Tensor:
    """Return block-diagonal matrices (H/width, width·d, width·d) of blocks (H, d, d)."""
    by_group = blocks.unflatten(0, (-1, grouping.width))  # (H/width, width, d, d)
    return torch.stack([torch.block_diag(*group) for group in by_group])


def leading_eigenvectors(gram: Tensor, count: int) -> Tensor:
    """Return orthonormal eigenvectors of the `count` largest eigenvalues, in falling order."""
    return torch.linalg.eigh(gram).eigenvectors.flip(-1)[..., :count]


def leading_basis(gram: Tensor, rank: int, grouping: HeadGrouping, dtype: torch.dtype) -> Basis:
    """Return the orthonormal basis with the largest trace of Gram matrices by head group."""
    if grouping.groups == 1:
        gram = gram.sum(dim=0, keepdim=True)
    columns = leading_eigenvectors(gram, rank * grouping.width)
    return orthonormal_basis(columns.to(dtype), grouping)


@torch.no_grad()
def weighted_closed_form(gram: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return down and up, (groups, p, count), that minimise ``||G^½ (I - down upᵀ) W^½||``.

    By Eckart–Young the best approximation of G^½ W^½ of that rank is its truncated SVD U S Vᵀ =
    G^½ W^½ V Vᵀ, with down = W^½ V and up = W^-½ V; ``upᵀ down`` is the identity.

    With few tokens some directions have no variance or weight, and a W^-½ too large for float32 to
    represent the identity. Useless columns are then replaced by the directions of most variance in
    the residual, and all are scaled to equal norms in down and up.

    Parameters
    ----------
    gram, weight : Tensor
        Positive semidefinite matrices, (groups, p, p). Eigenvalues of the weight are clamped to
        `RELATIVE_FLOOR` of the largest, so that its inverse exists.
    """
    gains, down, up = weighted_directions(gram, weight)
    pairs = [
        representable(*group)
        for group in zip(gram, gains, down[..., :count], up[..., :count], strict=True)
    ]
    return torch.stack([down for down, _ in pairs]), torch.stack([up for _, up in pairs])


def representable(gram: Tensor, gains: Tensor, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return down and up of a group, (p, count), whose product float32 represents as identity."""
    down, up = same_size(down, up)
    product = up.mT.float().double() @ down.float().double()
    if product.is_meta:  # a layer without weights
        return down, up
    if float((product - torch.eye(len(product)).to(product)).abs().max()) <= HELD_TOLERANCE:
        return down, up
    count = down.shape[1]
    down, up = _balanced(down, up)
    useful = gains[:count] > NEGLIGIBLE * gains[0]
    kept = int((useful & (down.norm(dim=0) <= LARGEST_NORM)).cumprod(dim=0).sum())
    down, up = down[:, :kept], up[:, :kept]
    residual = torch.eye(len(gram)).to(gram) - down @ up.mT  # an oblique projector, (p, p)
    span = torch.linalg.svd(residual).U[:, : len(gram) - kept]
    columns = span @ leading_eigenvectors(span.mT @ gram @ span, count - kept)
    more_down, more_up = _balanced(columns, residual.mT @ columns)
    return torch.cat([down, more_down], dim=1), torch.cat([up, more_up], dim=1)


def same_size(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return down and up (…, p, count) scaled by one number to equal norms, for 16 bits.

    Ratios between latents, and so the relative weights of their errors, do not change.
    """
    ratio = torch.linalg.matrix_norm(up) / torch.linalg.matrix_norm(down)
    scale = ratio.sqrt()[..., None, None]
    return down * scale, up / scale


def _balanced(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return columns scaled to equal norms in down and up."""
    scale = (up.norm(dim=0) / down.norm(dim=0)).sqrt()
    return down * scale, up / scale


def weighted_directions(gram: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return gains and all columns that `weighted_closed_form` selects from.

    Parameters
    ----------
    gram, weight : Tensor
        Positive semidefinite matrices, symmetric or complex Hermitian, (…, p, p).

    Returns
    -------
    tuple of Tensor
        Reductions of the squared error, (…, p), descending; down and up, (…, p, p).
    """
    values, vectors = torch.linalg.eigh(weight)
    largest = values[..., -1:]
    # A weight of 0 is replaced by the identity.
    values = torch.where(largest > 0, values.clamp(min=RELATIVE_FLOOR * largest), 1.0)
    root = (vectors * values.sqrt().unsqueeze(-2)) @ vectors.mH
    inverse_root = (vectors * values.rsqrt().unsqueeze(-2)) @ vectors.mH
    gains, right = torch.linalg.eigh(root @ gram @ root)
    right = right.flip(-1)
    return gains.flip(-1), root @ right, inverse_root @ right
