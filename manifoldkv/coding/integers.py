"""Latents as integers, and the layouts that users choose them by.

An element x of a range [low, high] is stored as the integer nearest to (x - low) / scale with
scale = (high - low) / (2^bits - 1). Ranges that are computed while decoding are stored as float16
(low, scale) pairs, and elements are rounded against the stored pair.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from manifoldkv.basis import Basis
from manifoldkv.coding.quantizer import SCALE_BYTES, Quantizer, straight_through
from manifoldkv.errors import PlanError

BITS = (2, 3, 4, 8)

PLANES = (8, 4, 2, 1)
"""Widths of the planes that integers are cut into, so that each fills whole bytes."""

Layout = Literal["static", "token", "kivi"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True)
class Quantization:
    """Bits and layout of the integers that `quantize` rounds latents to.

    Parameters
    ----------
    bits : {8, 4, 3, 2}
        Bits of every stored element.
    layout : {"static", "token", "kivi"}
        ``"static"``, the paper's: keys in ranges calibrated per head and group of features, values
        in a range per token and group of features. ``"token"``: keys in such a range too, so that
        no range is calibrated; with `full_rank_plan` it is the integer cache of inference engines.
        ``"kivi"``: keys in a range per feature and run of `group_size` tokens, values as above; the
        newest tokens stay exact until a whole run has left a window of `residual` tokens. Such a
        cache takes no padded batch, cannot be cropped (no assisted decoding) and does not fit
        sliding windows; the other two can do all of this.
    group_size : int
        Features (or, for KIVI's keys, tokens) that share a range. A last group may be shorter.
    residual : int
        Newest tokens that KIVI's layout does not round; unused by the others.

    Raises
    ------
    PlanError
        If bits or layout are unknown, or a number is too small.
    """

    bits: int = 4
    layout: Layout = "static"
    group_size: int = 64
    residual: int = 64

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise PlanError(f"unknown layout {self.layout!r}; known: {', '.join(LAYOUTS)}")
        self.values()  # checks the numbers

    def check_windows(self, windows: Sequence[int | None]) -> None:
        """Raise `PlanError` if a layer with a sliding window cannot hold the layout."""
        if self.layout == "kivi":
            for index, window in enumerate(windows):
                _check_no_window(f"layer {index}", window)

    def keys(self, ranges: Tensor | None = None) -> Integers:
        """Return the quantizer of keys. `ranges` are those of `StaticIntegers`, if static."""
        if self.layout == "kivi":
            return FeatureIntegers(self.bits, self.group_size, self.residual)
        if ranges is None:
            return TokenIntegers(self.bits, self.group_size)
        return StaticIntegers(self.bits, self.group_size, ranges)

    def values(self) -> Integers:
        """Return the quantizer of values."""
        residual = self.residual if self.layout == "kivi" else None
        return TokenIntegers(self.bits, self.group_size, residual)


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
    residual: ClassVar[int | None] = None
    """Number of newest tokens that are not rounded; None if tokens are rounded at once."""
    ranges_of: ClassVar[str]
    """Elements that share a range, in words."""

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise PlanError(f"bits must be one of 2, 3, 4, 8, got {self.bits}")
        if self.group_size < 1:
            raise PlanError(f"group_size must be >= 1, got {self.group_size}")
        if self.residual is not None and self.residual < 0:
            raise PlanError(f"residual must be >= 0, got {self.residual}")

    def check(self, name: str, basis: Basis, window: int | None) -> None:
        if self.run is not None:
            _check_no_window(name, window)

    @property
    def format(self) -> str:
        return f"{self.bits}-bit integers {self.ranges_of}"

    @property
    def run(self) -> int | None:
        return None if self.residual is None else self.group_size

    def exact_tokens(self, tokens: int) -> int:
        """Return how many of the newest of `tokens` tokens are not rounded."""
        if self.residual is None:
            return 0
        return tokens - max(0, tokens - self.residual) // self.group_size * self.group_size

    def reconstruct(self, latents: Tensor) -> Tensor:
        rounded = latents.shape[-2] - self.exact_tokens(latents.shape[-2])
        first, rest = latents[..., :rounded, :], latents[..., rounded:, :]
        return torch.cat([self._reconstruct(first), rest], dim=-2) if rounded else latents

    @abstractmethod
    def _reconstruct(self, latents: Tensor) -> Tensor:
        """Return latents (..., n, features) with all tokens rounded."""

    def nbytes(self, tokens: int, features: int, itemsize: int) -> int:
        exact = self.exact_tokens(tokens)
        rounded = tokens - exact
        ranges = self._ranges(rounded, features) * 2 * SCALE_BYTES
        return rounded * packed_bytes(features, self.bits) + ranges + exact * features * itemsize

    def _ranges(self, tokens: int, features: int) -> int:
        """Return the stored ranges of some rounded tokens: one per token and group of features."""
        return tokens * ceil(features / self.group_size)

    def bytes_per_token(self, features: int, itemsize: int) -> float:
        start, run = self.residual or 0, self.run or 1
        last = self.nbytes(start + run, features, itemsize)
        return (last - self.nbytes(start, features, itemsize)) / run

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

    def _reconstruct(self, latents: Tensor) -> Tensor:
        features = latents.shape[-1]
        offset, scale = offset_and_scale(self.ranges.to(latents).unsqueeze(1), self.bits)
        offset = spread(offset, self.group_size, features)  # (G, 1, features or 1)
        scale = spread(scale, self.group_size, features)
        return integers(latents, offset, scale, self.bits) * scale + offset

    def _ranges(self, tokens: int, features: int) -> int:
        return 0


@dataclass(frozen=True, eq=False)
class TokenIntegers(Integers):
    """Integers in a range per token and group of features.

    Parameters
    ----------
    residual : int or None
        Newest tokens that are not rounded until a run of `group_size` tokens leaves them; None if
        tokens are rounded at once.
    """

    name: ClassVar[str] = "token-integers"
    ranges_of: ClassVar[str] = "in ranges per token"

    residual: int | None = None  # type: ignore[misc]

    def _reconstruct(self, latents: Tensor) -> Tensor:
        return _rounded(latents.unsqueeze(-2), self.bits, self.group_size).squeeze(-2)


@dataclass(frozen=True, eq=False)
class FeatureIntegers(Integers):
    """Integers in a range per feature and run of `group_size` tokens: KIVI's keys.

    Parameters
    ----------
    residual : int
        Newest tokens that are not rounded until a whole run leaves them.
    """

    name: ClassVar[str] = "feature-integers"
    ranges_of: ClassVar[str] = "in ranges per feature"

    residual: int = 64  # type: ignore[misc]

    def _reconstruct(self, latents: Tensor) -> Tensor:
        by_run = latents.unflatten(-2, (-1, self.group_size))
        return _rounded(by_run, self.bits, 1).flatten(-3, -2)

    def _ranges(self, tokens: int, features: int) -> int:
        return tokens // self.group_size * features


def _check_no_window(name: str, window: int | None) -> None:
    if window is not None:
        raise PlanError(
            f"{name} has a sliding window of {window} tokens, which KIVI's runs of tokens do not "
            "fit: use the static or the token layout"
        )


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


def stored_ranges(by_run: Tensor, group_size: int, bits: int) -> tuple[Tensor, Tensor]:
    """Return offsets and scales of runs of tokens, float16.

    Parameters
    ----------
    by_run : Tensor
        (..., runs, tokens, features)
    group_size : int
        Features that share a range.
    bits : int
        Of the integers.

    Returns
    -------
    tuple of Tensor
        (..., runs, groups) each.
    """
    ranges = group_ranges(by_run.float(), group_size, dims=(by_run.ndim - 2,))
    offset, scale = offset_and_scale(ranges, bits)
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


def _rounded(by_run: Tensor, bits: int, group_size: int) -> Tensor:
    """Return runs of tokens (..., runs, tokens, features) rounded in a range of each run."""
    features = by_run.shape[-1]
    offset, scale = stored_ranges(by_run, group_size, bits)
    offset = spread(offset, group_size, features).unsqueeze(-2)
    scale = spread(scale, group_size, features).unsqueeze(-2)
    codes = integers(by_run, offset, scale, bits)
    return codes * scale.to(codes) + offset.to(codes)
