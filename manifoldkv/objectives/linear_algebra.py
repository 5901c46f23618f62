"""Gram matrices of grouped heads and the eigenvalue problems they lead to, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from manifoldkv.basis import Basis, HeadGrouping, orthonormal_basis

RELATIVE_FLOOR = 1e-10
"""Eigenvalues of a weight below this share of the largest count as this share."""


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


def weighted_closed_form(gram: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the pair of `count` columns each that minimises ``||G^½ (I - down upᵀ) W^½||``.

    By Eckart–Young the best approximation of G^½ W^½ of that rank is its truncated SVD U S Vᵀ =
    G^½ W^½ V Vᵀ, which is attained by down = W^½ V and up = W^-½ V; ``upᵀ down`` is the identity.

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
    _, down, up = weighted_directions(gram, weight)
    return down[..., :count], up[..., :count]


def weighted_directions(gram: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return all columns that `weighted_closed_form` chooses from, and what each of them saves.

    Parameters
    ----------
    gram, weight : Tensor
        Positive semidefinite, symmetric or complex Hermitian, (…, p, p), as there.

    Returns
    -------
    tuple of Tensor
        The squared error that a column saves, (…, p), falling; down and up, (…, p, p).
    """
    values, vectors = torch.linalg.eigh(weight)
    values = torch.maximum(values, RELATIVE_FLOOR * values[..., -1:])
    root = (vectors * values.sqrt().unsqueeze(-2)) @ vectors.mH
    inverse_root = (vectors * values.rsqrt().unsqueeze(-2)) @ vectors.mH
    gains, right = torch.linalg.eigh(root @ gram @ root)
    right = right.flip(-1)
    return gains.flip(-1), root @ right, inverse_root @ right
