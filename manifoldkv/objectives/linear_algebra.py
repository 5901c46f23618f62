"""Gram matrices of grouped heads and the eigenvalue problems they lead to, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from manifoldkv.basis import ORTHONORMAL_TOLERANCE, Basis, HeadGrouping, orthonormal_basis

RELATIVE_FLOOR = 1e-10
"""Eigenvalues of a weight below this share of the largest count as this share."""
HELD_TOLERANCE = ORTHONORMAL_TOLERANCE / 2
"""Largest entry of ``upᵀ down - I`` in float32."""
NEGLIGIBLE = 1e-9
"""A column with less than this share of the gain of the first one counts as useless."""
LARGEST_NORM = 16.0
"""Largest norm of a column of down and of up at which float32 holds the identity."""


def gram_by_group(x: Tensor, grouping: HeadGrouping) -> Tensor:
    """Return Gram matrices of (S, H, n, d) by head group: (H/width, width·d, width·d), float64."""
    groups = grouping.split(x).transpose(0, 1).flatten(1, 2).double()  # (H/width, S·n, width·d)
    return groups.mT @ groups


def block_diagonal(blocks: Tensor, grouping: HeadGrouping) -> Tensor:
    """Return blocks (H, d, d) on the diagonals of head groups: (H/width, width·d, width·d)."""
    by_group = blocks.unflatten(0, (-1, grouping.width))  # (H/width, width, d, d)
    return torch.stack([torch.block_diag(*group) for group in by_group])


def leading_eigenvectors(gram: Tensor, count: int) -> Tensor:
    """Return orthonormal eigenvectors of the `count` largest eigenvalues, largest first."""
    return torch.linalg.eigh(gram).eigenvectors.flip(-1)[..., :count]


def leading_basis(gram: Tensor, rank: int, grouping: HeadGrouping, dtype: torch.dtype) -> Basis:
    """Return the orthonormal basis that keeps most of the trace of Gram matrices by head group."""
    if grouping.groups == 1:
        gram = gram.sum(dim=0, keepdim=True)
    columns = leading_eigenvectors(gram, rank * grouping.width)
    return orthonormal_basis(columns.to(dtype), grouping)


@torch.no_grad()
def weighted_closed_form(gram: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the pair of `count` columns each that minimises ``||G^½ (I - down upᵀ) W^½||``.

    By Eckart–Young the best approximation of G^½ W^½ of that rank is its truncated SVD U S Vᵀ =
    G^½ W^½ V Vᵀ, which is attained by down = W^½ V and up = W^-½ V; ``upᵀ down`` is the identity.

    With few tokens there are directions without variance or weight, in which W^-½ is so large that
    float32 does not hold the identity. There, useless columns are replaced by the directions of
    most variance in the residual, and all are scaled to equal norms in down and up.

    Parameters
    ----------
    gram, weight : Tensor
        Positive semidefinite, (groups, p, p). Eigenvalues of the weight are raised to
        at least `RELATIVE_FLOOR` of the largest, so that its inverse exists.

    Returns
    -------
    tuple of Tensor
        down and up, (groups, p, count).
    """
    gains, down, up = weighted_directions(gram, weight)
    pairs = [
        _representable(*group)
        for group in zip(gram, gains, down[..., :count], up[..., :count], strict=True)
    ]
    return torch.stack([down for down, _ in pairs]), torch.stack([up for _, up in pairs])


def _representable(gram: Tensor, gains: Tensor, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return down and up of a group, (p, count), such that float32 holds their identity."""
    down, up = same_size(down, up)
    product = up.mT.float().double() @ down.float().double()
    if product.is_meta:  # of a dry run without weights
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
    """Return down and up (…, p, count) scaled by one number to equal norms, which 16 bits hold.

    Ratios between latents do not change, so errors in all of them still weigh the same.
    """
    ratio = torch.linalg.matrix_norm(up) / torch.linalg.matrix_norm(down)
    scale = ratio.sqrt()[..., None, None]
    return down * scale, up / scale


def _balanced(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return columns scaled to equal norms in down and up."""
    scale = (up.norm(dim=0) / down.norm(dim=0)).sqrt()
    return down * scale, up / scale


def weighted_directions(gram: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return all columns that `weighted_closed_form` chooses from, and the gain of each.

    Parameters
    ----------
    gram, weight : Tensor
        Positive semidefinite, symmetric or complex Hermitian, (…, p, p), as there.

    Returns
    -------
    tuple of Tensor
        Gains, the reductions of the squared error, (…, p), descending; down and up, (…, p, p).
    """
    values, vectors = torch.linalg.eigh(weight)
    largest = values[..., -1:]
    # Without any weight, all directions weigh the same.
    values = torch.where(largest > 0, values.clamp(min=RELATIVE_FLOOR * largest), 1.0)
    root = (vectors * values.sqrt().unsqueeze(-2)) @ vectors.mH
    inverse_root = (vectors * values.rsqrt().unsqueeze(-2)) @ vectors.mH
    gains, right = torch.linalg.eigh(root @ gram @ root)
    right = right.flip(-1)
    return gains.flip(-1), root @ right, inverse_root @ right
