"""Scales of tokens in 8 bits: float16 without its sign and the last seven bits of its fraction.

Latents are divided by the rounded scale, and reconstructions are multiplied by it: its rounding, by
a sixteenth at most, changes the step of a token and adds no error of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOKEN_SCALE_BYTES = 1
"""Bytes of the scale of a token."""
LARGEST_SCALE, SMALLEST_SCALE = 61440.0, 2.0**-14
"""Largest scale, and the smallest one that latents are divided by."""
INFINITY_CODE, NAN_CODE = 0xF8, 0xFC
"""Codes of scales that are not finite; all finite ones are below."""
_DROPPED = 7
"""Bits of the fraction of float16 that are left out."""


def scale_codes(scales: Tensor) -> Tensor:
    """Return the codes of scales >= 0, uint8, rounded to the nearest, ties to even.

    Scales above `LARGEST_SCALE` get its code.
    """
    x = scales.detach().float().clamp(max=LARGEST_SCALE)
    bits = x.view(torch.int32)
    bits = (bits + 0x7FFFF + (bits >> 20 & 1)) >> 20  # of float32, eight of them its exponent
    small = (x / SMALLEST_SCALE * 8).round().nan_to_num(0).int()
    codes = torch.where(x < SMALLEST_SCALE, small, bits - 8 * 112)
    return codes.masked_fill(x.isnan(), NAN_CODE).to(torch.uint8)


def scales_of(codes: Tensor) -> Tensor:
    """Return the scales of codes, float32."""
    return (codes.to(torch.int16) << _DROPPED).view(torch.float16).float()
