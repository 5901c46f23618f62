"""Integers of mixed widths, cut into planes of 8, 4, 2 and 1 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor
from torch.nn import functional

from manifoldkv.plan.formats.integers import PLANES


@dataclass(frozen=True)
class _Range:
    """Neighbouring integers whose bits from `shift` on are in a plane."""

    start: int
    stop: int
    shift: int


class BitPlanes:
    """Byte layout of the integers of a token, of 1 to 8 bits each.

    A width is the sum of its planes, the widest of which holds the lowest bits: 3 bits are 2 and 1.
    Each byte of a plane holds distant integers, so that a plane is packed in a few passes for any
    number of widths. Tokens are the last dimension: passes run over neighbouring bytes.

    Parameters
    ----------
    widths : sequence of int
        Width of every integer in bits; passes are fewest where equal widths are neighbours.
    device : torch.device
        Device of the packed integers.
    """

    def __init__(self, widths: Sequence[int], device: torch.device) -> None:
        by_plane = {plane: _ranges(widths, plane) for plane in PLANES}
        self._planes = {plane: ranges for plane, ranges in by_plane.items() if ranges}
        self._shifts = {
            plane: torch.arange(0, 8, plane, dtype=torch.uint8, device=device).view(-1, 1, 1)
            for plane in self._planes
        }

    def pack(self, integers: Tensor) -> Tensor:
        """Return the bytes (…, bytes, n), uint8, of integers (…, count, n), uint8."""
        parts = []
        for plane, ranges in self._planes.items():
            bits = [integers[..., x.start : x.stop, :] >> x.shift & (2**plane - 1) for x in ranges]
            rows = torch.cat(bits, dim=-2)
            rows = functional.pad(rows, (0, 0, 0, -rows.shape[-2] % (8 // plane)))
            shifted = rows.unflatten(-2, (8 // plane, -1)) << self._shifts[plane]
            parts.append(shifted.sum(dim=-3, dtype=torch.uint8))
        return torch.cat(parts, dim=-2) if parts else integers

    def fields(self) -> Tensor:
        """Return where the bits of every integer are, (count, 4, 4), int64, on the CPU.

        Per integer and plane, lowest bits first: the row of the byte, the right shift and the mask
        that cut the bits out of it, and the left shift to their position. Fields without bits are
        last and 0.
        """
        count = max((x.stop for ranges in self._planes.values() for x in ranges), default=0)
        fields = torch.zeros(count, len(PLANES), 4, dtype=torch.int64)
        used = [0] * count
        first = 0
        for plane, ranges in self._planes.items():
            rows = ceil(sum(x.stop - x.start for x in ranges) * plane / 8)
            done = 0
            for x in ranges:
                for index in range(x.start, x.stop):
                    position, row = divmod(done, rows)
                    field = first + row, position * plane, 2**plane - 1, x.shift
                    fields[index, used[index]] = torch.tensor(field)
                    used[index] += 1
                    done += 1
            first += rows
        return fields

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Write the integers of packed bytes (…, bytes, n) to `out` (…, count, n), uint8."""
        first = 0
        for plane, ranges in self._planes.items():
            rows = ceil(sum(x.stop - x.start for x in ranges) * plane / 8)
            part = packed[..., first : first + rows, :].unsqueeze(-3)
            part = (part >> self._shifts[plane]).bitwise_and_(2**plane - 1).flatten(-3, -2)
            first, done = first + rows, 0
            for x in ranges:
                bits = part[..., done : done + x.stop - x.start, :]
                done += x.stop - x.start
                integers = out[..., x.start : x.stop, :]
                if x.shift:
                    integers.add_(bits, alpha=1 << x.shift)
                else:  # lowest bits come first
                    integers.copy_(bits)


def _ranges(widths: Sequence[int], plane: int) -> list[_Range]:
    """Return the fewest ranges of integers that have bits in a plane."""
    ranges: list[_Range] = []
    for index, width in enumerate(widths):
        if not width & plane:
            continue
        shift = sum(wider for wider in PLANES if wider > plane and width & wider)
        if ranges and (ranges[-1].stop, ranges[-1].shift) == (index, shift):
            ranges[-1] = _Range(ranges[-1].start, index + 1, shift)
        else:
            ranges.append(_Range(index, index + 1, shift))
    return ranges
