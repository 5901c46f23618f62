"""Scales of tokens, in 8 bits and in 4.

Latents are divided by the rounded scale, and reconstructions are multiplied by it: its rounding
changes the step of a token and adds no error of its own. In 8 bits scales are float16 without its
sign and the last seven bits of its fraction, and are rounded by a sixteenth at most. In 4 bits they
are every third of these numbers from 0.22 to 8, and are rounded by a sixth at most between them.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOKEN_SCALE_BYTES = 1
"""Bytes of a scale in 8 bits."""
LARGEST_SCALE, SMALLEST_SCALE = 61440.0, 2.0**-14
"""Largest scale, and the smallest one that latents are divided by."""
INFINITY_CODE, NAN_CODE = 0xF8, 0xFC
"""Codes of scales that are not finite; all finite ones are below."""
SHORT_BITS = 4
"""Bits of a short scale."""
LOWEST_SHORT, SHORT_STEP = 102, 3
"""Code in 8 bits of the first short scale, and of each less that of the one before."""
NAN_SHORT = 15
"""Short code of a scale that is not a number, and mask of a short code; finite ones are below."""
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


def short_scales() -> Tensor:
    """Return the scales in 4 bits by code, (`NAN_SHORT`,), float32, increasing."""
    return scales_of(LOWEST_SHORT + SHORT_STEP * torch.arange(NAN_SHORT))
