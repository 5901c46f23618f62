"""Latents as packed integers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from manifoldkv.plan.formats.integers import (
    PLANES,
    StaticIntegers,
    TokenIntegers,
    integers,
    offset_and_scale,
    pack_elements,
    spread,
    stored_ranges,
)
from manifoldkv.serve.cache.storage import GrowingTensor, Store, Tile, check_latents, split_tiles


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack integers below 2^bits, uint8 (..., n), into bytes (..., `packed_bytes`), 1 to 8 bits.

    They are cut into planes of 8, 4, 2 or 1 bits, the lowest first: 3 bits are 2 and 1. A byte
    holds elements that lie far apart, not neighbours: packing and unpacking then work on runs of
    bytes, which is several times as fast.
    """
    codes = functional.pad(codes, (0, -codes.shape[-1] % pack_elements(bits)))
    parts = [
        _packed_plane((codes >> shift) & (2**width - 1), width) for width, shift in _cuts(bits)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the `count` integers that `pack` was given, uint8 (..., count)."""
    cuts = _cuts(bits)
    parts = packed.split([packed.shape[-1] * width // bits for width, _ in cuts], dim=-1)
    codes = _unpacked_plane(parts[0], cuts[0][0])
    for part, (width, shift) in zip(parts[1:], cuts[1:], strict=True):
        codes = codes | (_unpacked_plane(part, width) << shift)
    return codes[..., :count]


def _cuts(bits: int) -> list[tuple[int, int]]:
    """Return the widths of the planes of integers, and how many lower bits lie in others."""
    widths = [width for width in PLANES if bits & width]
    return [(width, sum(widths[:place])) for place, width in enumerate(widths)]


def _packed_plane(codes: Tensor, bits: int) -> Tensor:
    """Lay the 8 / bits equal parts of (..., n) on each other: bytes (..., n·bits / 8)."""
    if bits == 8:
        return codes
    first, *others = codes.chunk(8 // bits, dim=-1)
    packed = first.clone()
    for plane, part in enumerate(others, 1):
        packed.add_(part, alpha=1 << bits * plane)
    return packed


def _unpacked_plane(packed: Tensor, bits: int) -> Tensor:
    """Separate what `_packed_plane` laid on each other: bytes (..., m) to (..., m·8 / bits)."""
    if bits == 8:
        return packed
    size = packed.shape[-1]
    codes = packed.new_empty(*packed.shape[:-1], size * 8 // bits)
    for plane, part in enumerate(codes.split(size, dim=-1)):
        torch.bitwise_and(packed >> bits * plane, 2**bits - 1, out=part)
    return codes


def _encode(x: Tensor, offset: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Round to packed integers."""
    return pack(integers(x, offset, scale, bits).to(torch.uint8), bits)


class StaticRangeStore(Store):
    """Integers in calibrated ranges.

    Parameters
    ----------
    quantizer : StaticIntegers
        Bits and ranges.
    features : int
        Latents of a head group.
    dtype : torch.dtype
        Of reconstructed elements.
    device : torch.device
        Of the layer.
    """

    def __init__(
        self, quantizer: StaticIntegers, features: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._bits = quantizer.bits
        self._features = features
        ranges = quantizer.ranges.to(device).unsqueeze(1)  # (G, 1, groups, 2)
        offset, scale = offset_and_scale(ranges, self._bits)
        self._offset = spread(offset, quantizer.group_size, features)  # (G, 1, features or 1)
        self._scale = spread(scale, quantizer.group_size, features)
        self._codes = GrowingTensor()
        self.parts = [self._codes]
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self._codes)

    def append(self, latents: Tensor) -> None:
        check_latents(latents, len(self._offset), self._features)
        self._codes.append(_encode(latents, self._offset, self._scale, self._bits))

    def tiles(self, first: int, size: int) -> Iterator[Tile]:
        codes = self._codes.view
        offset, scale = self._offset.to(self._dtype), self._scale.to(self._dtype)
        for start, stop in split_tiles(first, len(self), size):
            integers = unpack(codes[:, :, start:stop], self._bits, self._features)
            yield start - first, stop - first, integers.to(self._dtype) * scale + offset


class RangeStore(Store):
    """Integers in ranges found while decoding, each of a token and a group of features.

    Parameters
    ----------
    quantizer : TokenIntegers
        Bits and group size.
    features : int
        Latents of a head group.
    dtype : torch.dtype
        Of reconstructed elements.
    """

    def __init__(self, quantizer: TokenIntegers, features: int, dtype: torch.dtype) -> None:
        self._bits = quantizer.bits
        self._group = quantizer.group_size
        self._features = features
        self._codes = GrowingTensor()
        self._offsets = GrowingTensor()  # (B, G, n, groups)
        self._scales = GrowingTensor()
        self.parts = [self._codes, self._offsets, self._scales]
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self._codes)

    def append(self, latents: Tensor) -> None:
        check_latents(latents, latents.shape[1], self._features)
        offsets, scales = stored_ranges(latents, self._group, self._bits)
        offset, scale = self._of_features(offsets), self._of_features(scales)
        self._codes.append(_encode(latents, offset, scale, self._bits))
        self._offsets.append(offsets)
        self._scales.append(scales)

    def tiles(self, first: int, size: int) -> Iterator[Tile]:
        codes, offsets, scales = self._codes.view, self._offsets.view, self._scales.view
        for start, stop in split_tiles(first, len(self), size):
            offset = self._of_features(offsets[:, :, start:stop].to(self._dtype))
            scale = self._of_features(scales[:, :, start:stop].to(self._dtype))
            integers = unpack(codes[:, :, start:stop], self._bits, self._features)
            yield start - first, stop - first, integers.to(self._dtype) * scale + offset

    def _of_features(self, of_groups: Tensor) -> Tensor:
        """Return numbers of groups (B, G, n, groups), to be broadcast to all features."""
        return spread(of_groups, self._group, self._features)
