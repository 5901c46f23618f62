"""Groups of coordinates that share bits and ranges: errors, the best grouping, stored bytes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manifoldkv.plan.formats.integers import integers, offset_and_scale
from manifoldkv.plan.formats.quantizer import SCALE_BYTES

WIDTHS, SIZES = (2, 4, 8), (1, 16, 64, 256, 1024)
"""Bits of a coordinate beside 0, and coordinates of a group."""
ALIGNED = 16
"""Groups of more than one coordinate begin at multiples of it."""
RANGE_BITS = 16 * SCALE_BYTES
"""Bits of the offset and the scale of a group of a token."""


class Group(NamedTuple):
    """Neighbouring coordinates that share bits, and a range for each token."""

    start: int
    stop: int
    bits: int

    @property
    def cost(self) -> int:
        """Return the bits of a token before DEFLATE."""
        return (self.stop - self.start) * self.bits + RANGE_BITS if self.bits else 0


def codes_of(coordinates: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (n, size), uint8, and offset and scale (n, 1), float16, of a group."""
    own = coordinates[:, group.start : group.stop].float()
    offset, scale = offset_and_scale(torch.stack(own.aminmax(dim=1), dim=1), group.bits)
    offset, scale = offset.half().unsqueeze(1), scale.half().unsqueeze(1)
    return integers(own, offset, scale, group.bits).to(torch.uint8), offset, scale


def decoded(codes: Tensor, offset: Tensor, scale: Tensor) -> Tensor:
    """Return the coordinates (n, size), float32, of the codes of a group."""
    return codes.float() * scale.float() + offset.float()


def error_of(coordinates: Tensor, group: Group) -> Tensor:
    """Return the mean over tokens of the squared error of a group."""
    own = coordinates[:, group.start : group.stop]
    held = decoded(*codes_of(coordinates, group)) if group.bits else torch.zeros_like(own)
    return (held - own).square().sum(dim=1).mean()


def measured(sample: Tensor) -> dict[Group, float]:
    """Return the error of every group that may be chosen, on sampled tokens (n, p)."""
    size = sample.shape[1]
    groups = {
        Group(start, min(start + own, size), bits)
        for own in SIZES
        for start in range(0, size, min(own, ALIGNED))
        for bits in (0, *WIDTHS)
    }
    return {group: float(error_of(sample, group)) for group in sorted(groups)}


def allocated(errors: dict[Group, float], size: int, bits: int) -> list[Group]:
    """Return the groups of least error that cover all coordinates within the bits of a token.

    Dynamic programming over coordinates and bits: ``least[stop][b]`` is the least error of the
    coordinates before `stop` in at most 2 b bits, since all costs are even.
    """
    budget = bits // 2
    least = np.full((size + 1, budget + 1), np.inf, dtype=np.float32)
    least[0] = 0
    by_stop: dict[int, list[Group]] = {}
    for group in errors:
        by_stop.setdefault(group.stop, []).append(group)
    chosen: NDArray[np.uint16] = np.zeros((size + 1, budget + 1), dtype=np.uint16)
    for stop in range(1, size + 1):
        for index, group in enumerate(by_stop[stop]):
            cost = group.cost // 2
            if cost > budget:
                continue
            error = least[group.start, : budget + 1 - cost] + errors[group]
            better = error < least[stop, cost:]
            least[stop, cost:][better] = error[better]
            chosen[stop, cost:][better] = index
    groups, stop = [], size
    while stop:
        group = by_stop[stop][chosen[stop, budget]]
        groups.append(group)
        stop, budget = group.start, budget - group.cost // 2
    return groups[::-1]


def stored(coordinates: Tensor, groups: list[Group]) -> bytes:
    """Return the ranges and the packed codes of tokens (n, p), group after group."""
    parts = []
    for group in groups:
        if group.bits:
            codes, *ranges = codes_of(coordinates, group)
            parts += [x.numpy().tobytes() for x in ranges]
            bits = np.unpackbits(codes.numpy()[..., None], axis=-1)[..., -group.bits :]
            parts.append(np.packbits(bits.reshape(len(codes), -1), axis=-1).tobytes())
    return b"".join(parts)
