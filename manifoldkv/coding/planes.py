"""Integers of mixed widths, cut into planes of 8, 4, 2 and 1 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor
from torch.nn import functional

from manifoldkv.coding.integers import PLANES


@dataclass(frozen=True)
class _Range:
    """Neighbouring integers of which a plane holds the bits from `shift` on."""

    start: int
    stop: int
    shift: int


class BitPlanes:
    """How integers of some widths, 1 to 8 bits each, lie in the bytes of a token.

    A width is the sum of its planes, the widest of which holds the lowest bits: 3 bits are 2 and 1.
    A plane of all integers together fills its bytes, of which each holds integers that lie far
    apart: it is then packed and unpacked in a few passes, however many widths there are. Tokens
    are the last dimension everywhere, so that each pass runs over neighbouring bytes.

    Parameters
    ----------
    widths : sequence of int
        Of every integer; passes are fewest where equal ones are neighbours.
    device : torch.device
        Of what is packed.
    """

    def __init__(self, widths: Sequence[int], device: torch.device) -> None:
        found = {plane: _ranges(widths, plane) for plane in PLANES}
        self._planes = {plane: ranges for plane, ranges in found.items() if ranges}
        self._shifts = {
            plane: torch.arange(0, 8, plane, dtype=torch.uint8, device=device).view(-1, 1, 1)
            for plane in self._planes
        }

    def pack(self, integers: Tensor) -> Tensor:
        """Return the bytes (…, bytes, n) of integers (…, count, n), uint8 both."""
        parts = []
        for plane, ranges in self._planes.items():
            own = [integers[..., x.start : x.stop, :] >> x.shift & (2**plane - 1) for x in ranges]
            rows = torch.cat(own, dim=-2)
            rows = functional.pad(rows, (0, 0, 0, -rows.shape[-2] % (8 // plane)))
            shifted = rows.unflatten(-2, (8 // plane, -1)) << self._shifts[plane]
            parts.append(shifted.sum(dim=-3, dtype=torch.uint8))
        return torch.cat(parts, dim=-2) if parts else integers

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Write the integers that `pack` was given to `out` (…, count, n), uint8."""
        first = 0
        for plane, ranges in self._planes.items():
            rows = ceil(sum(x.stop - x.start for x in ranges) * plane / 8)
            part = packed[..., first : first + rows, :].unsqueeze(-3)
            part = (part >> self._shifts[plane]).bitwise_and_(2**plane - 1).flatten(-3, -2)
            first, done = first + rows, 0
            for x in ranges:
                own = part[..., done : done + x.stop - x.start, :]
                done += x.stop - x.start
                whole = out[..., x.start : x.stop, :]
                if x.shift:
                    whole.add_(own, alpha=1 << x.shift)
                else:  # lowest bits come first
                    whole.copy_(own)


def _ranges(widths: Sequence[int], plane: int) -> list[_Range]:
    """Return which integers a plane has bits of, in as few ranges as can be."""
    found: list[_Range] = []
    for index, width in enumerate(widths):
        if not width & plane:
            continue
        shift = sum(wider for wider in PLANES if wider > plane and width & wider)
        if found and (found[-1].stop, found[-1].shift) == (index, shift):
            found[-1] = _Range(found[-1].start, index + 1, shift)
        else:
            found.append(_Range(index, index + 1, shift))
    return found
