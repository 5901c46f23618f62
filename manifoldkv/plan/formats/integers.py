"""Latents as integers, and the layouts that users choose them by.

An element x of a range [low, high] is stored as the integer nearest to (x - low) / scale with
scale = (high - low) / (2^bits - 1). Ranges that are computed while decoding are stored as float16
(low, scale) pairs, and elements are rounded against the stored pair.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from manifoldkv.core.basis import Basis
from manifoldkv.core.errors import PlanError
from manifoldkv.plan.formats.quantizer import SCALE_BYTES, Quantizer, straight_through

BITS = (2, 3, 4, 8)

PLANES = (8, 4, 2, 1)
"""Widths of the planes that integers are cut into, so that each fills whole bytes."""

Layout = Literal["static", "token"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True)
class Quantization:
    """Bits and layout of the integers that `quantize` rounds latents to.

    Parameters
    ----------
    bits : {8, 4, 3, 2}
        Bits of every stored element.
    layout : {"static", "token"}
        ``"static"``, the paper's: keys in ranges calibrated per head and group of features, values
        in a range per token and group of features. ``"token"``: keys in such a range too, so that
        no range is calibrated; with `full_rank_plan` it is the integer cache of inference engines.
    group_size : int
        Features that share a range. A last group may be shorter.

    Raises
    ------
    PlanError
        If bits or layout are unknown, or a number is too small.
    """

    bits: int = 4
    layout: Layout = "static"
    group_size: int = 64

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise PlanError(f"unknown layout {self.layout!r}; known: {', '.join(LAYOUTS)}")
        self.values()  # checks the numbers

    def keys(self, ranges: Tensor | None = None) -> Integers:
        """Return the quantizer of keys. `ranges` are those of `StaticIntegers`, if static."""
        if ranges is None:
            return TokenIntegers(self.bits, self.group_size)
        return StaticIntegers(self.bits, self.group_size, ranges)

    def values(self) -> Integers:
        """Return the quantizer of values."""
        return TokenIntegers(self.bits, self.group_size)


@dataclass(frozen=True, eq=False)
class Integers(Quantizer):
    """Integers of one width. Ranges are shared by groups of elements.

    Parameters
    ----------
    bits : {8, 4, 3, 2}
        Bits of every element.
    group_size : int
        Neighbouring elements that share a range. The last group may be shorter.
    """

    bits: int
    group_size: int
    ranges_of: ClassVar[str]
    """Elements that share a range, in words."""

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise PlanError(f"bits must be one of 2, 3, 4, 8, got {self.bits}")
        if self.group_size < 1:
            raise PlanError(f"group_size must be >= 1, got {self.group_size}")

    def check(self, name: str, basis: Basis, window: int | None) -> None:
        return

    @property
    def format(self) -> str:
        return f"{self.bits}-bit integers {self.ranges_of}"

    def nbytes(self, tokens: int, features: int, itemsize: int) -> int:
        return tokens * packed_bytes(features, self.bits)

    def token_bits(self, features: int) -> float:
        return float(self.bits * features)


@dataclass(frozen=True, eq=False)
class StaticIntegers(Integers):
    """Integers in calibrated ranges, which are part of the plan; elements outside are clamped.

    Parameters
    ----------
    ranges : Tensor
        Smallest and largest element by head group and group of features, (G, groups, 2), float32
        or float64.
    """

    name: ClassVar[str] = "static-integers"
    ranges_of: ClassVar[str] = "in calibrated ranges"

    ranges: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranges.dtype not in (torch.float32, torch.float64):
            raise PlanError(f"ranges must be float32 or float64, got {self.ranges.dtype}")
        if not bool(self.ranges.isfinite().all()):
            raise PlanError("ranges must be finite")
        if self.ranges.ndim != 3 or not bool((self.ranges.diff(dim=-1) >= 0).all()):
            raise PlanError("ranges must be (head groups, feature groups, 2), low before high")

    def check(self, name: str, basis: Basis, window: int | None) -> None:
        heads, features = basis.grouping.heads // basis.grouping.width, basis.down.shape[2]
        expected = (heads, ceil(features / self.group_size), 2)
        if tuple(self.ranges.shape) != expected:
            raise PlanError(f"{name}: ranges are {tuple(self.ranges.shape)}, must be {expected}")

    def reconstruct(self, latents: Tensor) -> Tensor:
        features = latents.shape[-1]
        offset, scale = offset_and_scale(self.ranges.to(latents).unsqueeze(1), self.bits)
        offset = spread(offset, self.group_size, features)  # (G, 1, features or 1)
        scale = spread(scale, self.group_size, features)
        return integers(latents, offset, scale, self.bits) * scale + offset


@dataclass(frozen=True, eq=False)
class TokenIntegers(Integers):
    """Integers in a range per token and group of features."""

    name: ClassVar[str] = "token-integers"
    ranges_of: ClassVar[str] = "in ranges per token"

    def reconstruct(self, latents: Tensor) -> Tensor:
        features = latents.shape[-1]
        offsets, scales = stored_ranges(latents, self.group_size, self.bits)
        offset = spread(offsets, self.group_size, features)
        scale = spread(scales, self.group_size, features)
        codes = integers(latents, offset, scale, self.bits)
        return codes * scale.to(codes) + offset.to(codes)

    def nbytes(self, tokens: int, features: int, itemsize: int) -> int:
        ranges = tokens * ceil(features / self.group_size)
        return super().nbytes(tokens, features, itemsize) + ranges * 2 * SCALE_BYTES


def pack_elements(bits: int) -> int:
    """Return the number of elements of some bits, 1 to 8, that fill whole bytes together."""
    return 8 // (bits & -bits)  # the lowest bit that is set is the narrowest plane


def packed_bytes(elements: int, bits: int) -> int:
    """Return the bytes of elements that are packed; three-bit ones are packed in eights."""
    return ceil(elements / pack_elements(bits)) * pack_elements(bits) * bits // 8


def group_ranges(x: Tensor, group_size: int, dims: tuple[int, ...] = ()) -> Tensor:
    """Return the smallest and largest element of each group of features, over `dims` too.

    Parameters
    ----------
    x : Tensor
        (..., features)
    group_size : int
        Neighbouring features of a group; the last may have fewer.
    dims : tuple of int
        Further dimensions of x to take extremes over; they disappear.

    Returns
    -------
    Tensor
        (..., groups, 2)
    """
    missing = -x.shape[-1] % group_size
    # Repeating the last feature changes no extreme.
    padded = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], dim=-1)
    grouped = padded.unflatten(-1, (-1, group_size))
    low, high = grouped.amin(dim=-1), grouped.amax(dim=-1)  # (..., groups)
    if dims:
        low, high = low.amin(dim=dims), high.amax(dim=dims)
    return torch.stack([low, high], dim=-1)


def stored_ranges(x: Tensor, group_size: int, bits: int) -> tuple[Tensor, Tensor]:
    """Return offsets and scales of groups of features, (..., groups) each, float16.

    Parameters
    ----------
    x : Tensor
        (..., features)
    group_size : int
        Features that share a range.
    bits : int
        Of the integers.
    """
    offset, scale = offset_and_scale(group_ranges(x.float(), group_size), bits)
    return offset.half(), scale.half()


def offset_and_scale(ranges: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return offsets and scales (...) of ranges (..., 2)."""
    low, high = ranges.unbind(-1)
    return low, (high - low) / (2**bits - 1)


def spread(of_groups: Tensor, group_size: int, features: int) -> Tensor:
    """Return numbers of groups (..., groups) by feature, (..., features).

    If it is one group, its last dimension stays 1: broadcasting is cheaper than repeating.
    """
    if of_groups.shape[-1] in (1, features):
        return of_groups
    return of_groups.repeat_interleave(group_size, dim=-1)[..., :features]


def integers(x: Tensor, offset: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Return the integers that elements are rounded to, computed in float32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    scaled = (x - offset.to(x.dtype)) / torch.where(scale > 0, scale, 1).to(x.dtype)
    return straight_through(scaled, scaled.round()).clamp(0, 2**bits - 1)
