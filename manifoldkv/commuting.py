"""Bases of keys that commute with their rotation.

RoPE rotates features j and d/2 + j of every head by one angle, the same for all heads. As complex
numbers, the features of frequency j of the g heads of a group are a vector z of C^g, which rotation
multiplies by a scalar: every complex-linear map commutes with rotation. A commuting basis caches
c = Bᴴ z and reconstructs A c, where Bᴴ A = I, and is a real basis over the concatenated heads whose
latents are the real parts of all c, then their imaginary parts.

TransMLA (Meng et al. 2025, arXiv:2502.07864) has real orthogonal matrices in place of B.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manifoldkv.basis import Basis, HeadGrouping
from manifoldkv.errors import PlanError


def commuting_basis(
    down: Tensor,
    up: Tensor,
    frequencies: tuple[int, ...],
    grouping: HeadGrouping,
    head_dim: int,
) -> Basis:
    """Return the real basis of complex columns, one of C^g for every pair of latents.

    Parameters
    ----------
    down, up : Tensor
        B and A, (groups, g, pairs), complex; the same tensor for an orthonormal basis.
    frequencies : tuple of int
        Frequency of each column, (pairs,), between 0 and head_dim / 2 - 1.
    grouping : HeadGrouping
        Groups of heads, of width g.
    head_dim : int
        Features of a head, even.
    """
    columns = _real_columns(down, frequencies, head_dim)
    others = columns if up is down else _real_columns(up, frequencies, head_dim)
    return Basis(columns, others, grouping, frequencies)


def _real_columns(columns: Tensor, frequencies: tuple[int, ...], head_dim: int) -> Tensor:
    """Return the real matrix (groups, g·d, 2·pairs) of complex columns (groups, g, pairs)."""
    pairs = torch.arange(len(frequencies), device=columns.device)
    index = torch.tensor(frequencies, dtype=torch.long, device=columns.device)
    groups, width, count = columns.shape
    by_frequency = columns.new_zeros(groups, width, head_dim // 2, count)
    by_frequency[:, :, index, pairs] = columns
    # A column b of C^g becomes two, b and i·b, real parts above imaginary ones.
    both = torch.cat([by_frequency, 1j * by_frequency], dim=-1)  # (groups, g, d/2, 2·pairs)
    halves = torch.stack([both.real, both.imag], dim=2)  # (groups, g, 2, d/2, 2·pairs)
    return halves.reshape(groups, width * head_dim, 2 * count)


def complex_columns(basis: Basis) -> tuple[Tensor, Tensor]:
    """Return the arguments B and A of `commuting_basis`, (groups, g, pairs)."""
    down = _complex_columns(basis.down, basis)
    return down, down if basis.orthonormal else _complex_columns(basis.up, basis)


def _complex_columns(matrix: Tensor, basis: Basis) -> Tensor:
    frequencies = basis.frequencies or ()
    pairs = torch.arange(len(frequencies), device=matrix.device)
    index = torch.tensor(frequencies, dtype=torch.long, device=matrix.device)
    by_head = matrix.unflatten(1, (basis.grouping.width, 2, basis.head_dim // 2))
    return torch.complex(by_head[:, :, 0, index, pairs], by_head[:, :, 1, index, pairs])


def hermitian_parts(matrix: Tensor, width: int) -> Tensor:
    """Return the mean of a quadratic form of keys over all phases, by frequency.

    Parameters
    ----------
    matrix : Tensor
        Σ x xᵀ of features x of `width` concatenated heads, (groups, width·d, width·d), or another
        symmetric matrix. Rotating the keys does not change the result, Σ z zᴴ of each frequency,
        (groups, d/2, width, width), complex Hermitian.
    """
    head_dim = matrix.shape[-1] // width
    parts = matrix.unflatten(-1, (width, 2, head_dim // 2))
    parts = parts.unflatten(-4, (width, 2, head_dim // 2))  # (G, w, 2, d/2, w, 2, d/2)
    same = parts.diagonal(dim1=-4, dim2=-1)  # (G, w, 2, w, 2, d/2)
    real = same[:, :, 0, :, 0] + same[:, :, 1, :, 1]
    imaginary = same[:, :, 1, :, 0] - same[:, :, 0, :, 1]
    return torch.complex(real, imaginary).movedim(-1, 1)  # (G, d/2, w, w)


def check_commuting(name: str, basis: Basis) -> None:
    """Raise `PlanError` unless a basis with frequencies commutes with the rotation."""
    frequencies = basis.frequencies
    if frequencies is None:
        return
    half = basis.head_dim // 2
    possible = [j for j in frequencies if type(j) is int and 0 <= j < half]
    if basis.head_dim % 2 or basis.grouping.name == "shared" or possible != sorted(frequencies):
        raise PlanError(
            f"{name}: a commuting basis of {basis.head_dim} features a head cannot have "
            f"frequencies {list(frequencies)}"
        )
    columns = basis.down.shape[-1]
    if 2 * len(frequencies) != columns:
        raise PlanError(f"{name}: {len(frequencies)} frequencies of {columns} latents")
    rebuilt = commuting_basis(*complex_columns(basis), frequencies, basis.grouping, basis.head_dim)
    if not (torch.equal(rebuilt.down, basis.down) and torch.equal(rebuilt.up, basis.up)):
        raise PlanError(f"{name}: the basis has frequencies but does not commute with the rotation")
