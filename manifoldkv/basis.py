"""Low-rank bases of keys or values, and head groupings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from manifoldkv.errors import ArgumentError, PlanError
from manifoldkv.modes import in_own_modes

Site = Literal["key", "value"]
"""Cached tensor that a basis projects: keys or values."""
SITES: tuple[Site, Site] = ("key", "value")
Rotary = Literal["pre", "post"]
"""Whether keys are projected before rotation or after it."""

ORTHONORMAL_TOLERANCE = 1e-4
"""Largest entry of PᵀP - I of a float32 basis that counts as orthonormal."""


@dataclass(frozen=True)
class HeadGrouping:
    """Groups of KV heads that share a basis.

    ``"shared"``: one d×r basis for every head (the paper's keys). An integer g: g heads are
    concatenated and share a (g·d)×(g·r) basis; 1 is a basis per head (the paper's values),
    ``"all"`` is one group of all heads. The cached bytes are the same for every grouping.

    Parameters
    ----------
    name : str or int
        ``"shared"``, ``"all"`` or the number of concatenated heads.
    heads : int
        KV heads of the layer.

    Raises
    ------
    ArgumentError
        If the name is unknown, or the number does not divide `heads`.
    """

    name: str | int
    heads: int

    def __post_init__(self) -> None:
        parse_grouping(self.name)
        if isinstance(self.name, int) and self.heads % self.name:
            divisors = [g for g in range(1, self.heads + 1) if self.heads % g == 0]
            raise ArgumentError(
                f"grouping {self.name} does not divide the {self.heads} KV heads; "
                f"possible: shared, all, {', '.join(map(str, divisors))}"
            )

    @property
    def width(self) -> int:
        """Return the number of heads concatenated in one basis."""
        if self.name == "shared":
            return 1
        return self.heads if self.name == "all" else int(self.name)

    @property
    def groups(self) -> int:
        """Return the number of bases."""
        return 1 if self.name == "shared" else self.heads // self.width

    def split(self, x: Tensor) -> Tensor:
        """Concatenate the features of grouped heads: (B, H, n, d) to (B, H/width, n, width·d)."""
        if self.width == 1:
            return x
        batch, heads, tokens, features = x.shape
        runs = x.reshape(batch, heads // self.width, self.width, tokens, features)
        return runs.transpose(2, 3).reshape(batch, heads // self.width, tokens, -1)

    def merge(self, x: Tensor) -> Tensor:
        """Separate the heads that `split` joined: (B, H/width, n, width·d) to (B, H, n, d)."""
        if self.width == 1:
            return x
        batch, runs, tokens, features = x.shape
        parts = x.reshape(batch, runs, tokens, self.width, features // self.width)
        return parts.transpose(2, 3).reshape(batch, runs * self.width, tokens, -1)


def parse_grouping(value: str | int) -> str | int:
    """Return a grouping from its text: ``"shared"``, ``"all"`` or a positive number.

    Raises
    ------
    ArgumentError
        If the grouping is unknown.
    """
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if value in ("shared", "all") or (isinstance(value, int) and value >= 1):
        return value
    raise ArgumentError(
        f"unknown head grouping {value!r}; known: shared, all, or a number of heads"
    )


@dataclass(frozen=True, eq=False, repr=False)
class Basis:
    """A low-rank basis for the keys or values of one layer.

    Two bases are equal if all their elements are; `projector_distance` compares projectors.

    Parameters
    ----------
    down : Tensor
        Down-projection, (groups, width·d, width·r), float32 or float64.
    up : Tensor
        Up-projection, same shape. The same tensor for an orthonormal basis; for an oblique one
        ``upᵀ down`` is the identity too, but ``down upᵀ`` is not symmetric.
    grouping : HeadGrouping
        Groups of heads, one for each basis.
    """

    down: Tensor
    up: Tensor
    grouping: HeadGrouping

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Basis):
            return NotImplemented
        return (
            self.grouping == other.grouping
            and self.orthonormal == other.orthonormal
            and equal(self.down, other.down)
            and equal(self.up, other.up)
        )

    def __hash__(self) -> int:
        return hash((self.grouping, self.orthonormal, self.down.shape))

    def __repr__(self) -> str:
        kind = "orthonormal" if self.orthonormal else "oblique"
        return f"Basis(rank {self.rank} of {self.head_dim}, {kind}, {self.grouping})"

    @property
    def orthonormal(self) -> bool:
        """Return whether `up` is the tensor `down`."""
        return self.down is self.up

    @property
    def rank(self) -> int:
        """Return the number of elements cached per token and KV head, r."""
        return self.down.shape[-1] // self.grouping.width

    @property
    def head_dim(self) -> int:
        """Return the number of features of a head, d."""
        return self.down.shape[-2] // self.grouping.width

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of both projections."""
        return self.down.dtype

    def like(self, x: Tensor) -> Basis:
        """Return the basis in the dtype and on the device of `x`."""
        down = self.down.to(x)
        up = down if self.orthonormal else self.up.to(x)
        return Basis(down, up, self.grouping)

    def project(self, x: Tensor) -> Tensor:
        """Return the reconstruction of `x`, (B, H, n, d), in the same shape."""
        basis = self.like(x)
        latents = self.grouping.split(x) @ basis.down  # (B, H/width, n, width·r)
        return self.grouping.merge(latents @ basis.up.mT)

    def projector(self) -> Tensor:
        """Return ``down upᵀ``, (groups, width·d, width·d), which determines every loss."""
        return self.down @ self.up.mT


def equal(first: Tensor | None, second: Tensor | None) -> bool:
    """Return whether two tensors agree in elements, shape, dtype and device, or are both None."""
    if first is None or second is None:
        return first is second
    alike = first.dtype == second.dtype and first.device == second.device
    return alike and torch.equal(first, second)


def orthonormal_basis(columns: Tensor, grouping: HeadGrouping) -> Basis:
    """Return the basis of orthonormal columns (groups, width·d, width·r), signs fixed.

    Raises
    ------
    ArgumentError
        If the columns are not orthonormal to `ORTHONORMAL_TOLERANCE`.
    """
    error = orthonormality_error(Basis(columns, columns, grouping))
    if not error <= ORTHONORMAL_TOLERANCE:
        raise ArgumentError(f"columns are not orthonormal: largest entry of PᵀP - I is {error:.1e}")
    columns = fix_signs(columns)
    return Basis(down=columns, up=columns, grouping=grouping)


@in_own_modes
def identity_basis(grouping: HeadGrouping, head_dim: int) -> Basis:
    """Return the identity as a basis of full rank, float32."""
    columns = torch.eye(head_dim * grouping.width).repeat(grouping.groups, 1, 1)
    return Basis(columns, columns, grouping)


def orthonormality_error(basis: Basis) -> float:
    """Return the largest entry of ``|upᵀ down - I|``; NaN if an element is not finite."""
    # In float64: torch may multiply float32 in fewer bits (set_float32_matmul_precision).
    product = basis.up.mT.double() @ basis.down.double()
    identity = torch.eye(product.shape[-1], dtype=product.dtype, device=product.device)
    return float((product - identity).abs().max())


def fix_signs(columns: Tensor) -> Tensor:
    """Flip columns (…, p, c) so that the largest entry of each is positive, for equal files."""
    largest = columns.abs().argmax(dim=-2, keepdim=True)
    return columns * columns.gather(-2, largest).sign()


@in_own_modes
def principal_angles(first: Basis, second: Basis) -> Tensor:
    """Return principal angles in radians between the spans of two bases, (groups, width·r)."""
    cosines = torch.linalg.svdvals(_orthonormal_span(first.up).mT @ _orthonormal_span(second.up))
    return cosines.clamp(max=1.0).arccos()


@in_own_modes
def projector_distance(first: Basis, second: Basis) -> float:
    """Return the Frobenius norm of the difference of two projectors."""
    return float(torch.linalg.vector_norm(first.projector() - second.projector()))


def _orthonormal_span(columns: Tensor) -> Tensor:
    return torch.linalg.qr(columns).Q


def check_rotary(rotary: Rotary) -> None:
    """Raise `PlanError` unless `rotary` is a rotary space."""
    if rotary not in get_args(Rotary):
        raise PlanError(f"unknown rotary space {rotary!r}; known: pre, post")


def check_rank(rank: int, head_dim: int) -> None:
    """Raise `ArgumentError` unless 1 <= rank <= head_dim."""
    if not 1 <= rank <= head_dim:
        raise ArgumentError(f"rank {rank} is not between 1 and head_dim {head_dim}")


def rank_from_ratio(ratio: float, head_dim: int) -> int:
    """Return the integer rank nearest to ``ratio * head_dim``.

    Raises
    ------
    ArgumentError
        If the rank is not between 1 and `head_dim`.
    """
    # NaN and infinity cannot be rounded.
    rank = round(ratio * head_dim) if math.isfinite(ratio) else 0
    if not 1 <= rank <= head_dim:
        raise ArgumentError(
            f"rank ratio {ratio:g} gives rank {rank} of head_dim {head_dim}; "
            f"possible ratios: {1 / head_dim:g} to 1"
        )
    return rank


def detached(tensor: Tensor) -> Tensor:
    """Return a tensor without gradient, on the CPU and contiguous, as plans store it."""
    return tensor.detach().cpu().contiguous()
