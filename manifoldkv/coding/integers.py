"""How latents are rounded to integers, as a plan describes it."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal, get_args

import torch
from torch import Tensor

from manifoldkv.errors import PlanError

BITS = (2, 3, 4, 8)

PLANES = (8, 4, 2, 1)
"""Widths of the planes that integers are cut into, so that each fills whole bytes."""


Layout = Literal["static", "token", "kivi"]


LAYOUTS: tuple[Layout, ...] = get_args(Layout)


SCALE_BYTES = 2
"""Scales and offsets that are computed while decoding are stored in float16."""


@dataclass(frozen=True)
class Quantization:
    """How latents are rounded to integers.

    Parameters
    ----------
    bits : {8, 4, 3, 2}
        Of every stored element.
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
        Tokens that KIVI's layout never rounds; no meaning otherwise.
    """

    bits: int = 4
    layout: Layout = "static"
    group_size: int = 64
    residual: int = 64

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise PlanError(f"latents of {self.bits} bits are not supported; possible: 2, 3, 4, 8")
        if self.layout not in LAYOUTS:
            raise PlanError(f"unknown layout {self.layout!r}; known: {', '.join(LAYOUTS)}")
        if self.group_size < 1 or self.residual < 0:
            raise PlanError("group_size must be at least 1 and residual at least 0")

    def code_bytes(self, features: int) -> int:
        """Return the bytes of `features` packed elements."""
        return packed_bytes(features, self.bits)

    def groups(self, features: int) -> int:
        """Return the number of ranges of `features` neighbouring features."""
        return ceil(features / self.group_size)

    def exact_tokens(self, tokens: int) -> int:
        """Return how many of the newest of `tokens` tokens are not rounded."""
        if self.layout != "kivi":
            return 0
        return tokens - max(0, tokens - self.residual) // self.group_size * self.group_size


def pack_elements(bits: int) -> int:
    """Return the number of elements of some bits, 1 to 8, that fill whole bytes together."""
    return 8 // (bits & -bits)  # the lowest bit that is set is the narrowest plane


def packed_bytes(elements: int, bits: int) -> int:
    """Return the bytes of elements that are packed; three-bit ones are packed in eights."""
    return ceil(elements / pack_elements(bits)) * pack_elements(bits) * bits // 8


def check_layout(quantization: Quantization | None, index: int, window: int | None) -> None:
    """Raise `PlanError` if a layer cannot hold latents in this layout."""
    if quantization is None or quantization.layout != "kivi":
        return
    if window is not None:
        raise PlanError(
            f"layer {index} has a sliding window, where KIVI's runs of tokens do not fit; use the "
            "static or the token layout"
        )


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
