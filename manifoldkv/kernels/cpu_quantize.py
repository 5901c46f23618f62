"""Numba kernel that rounds and packs latents of mixed widths; compiled when it is imported."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import float32, int64, uint8, void

Array = np.ndarray[Any, Any]

HALF_MAX, HALF_TINY = np.float32(65504), np.float32(2**-14)
"""Largest finite float16, and its smallest normal number."""
_OPTIONS = {"error_model": "numpy", "nogil": True, "_nrt": False}


@numba.njit(float32(float32), inline="always", **_OPTIONS)
def _as_half(x: Any) -> Any:
    """Round to float16, ties to even, of 0 to `HALF_MAX`."""
    if x != x:
        return x
    # Adding a power of 2 leaves as many bits behind the point as float16 has.
    unit = HALF_TINY
    while unit * np.float32(2) <= x:
        unit *= np.float32(2)
    large = unit * np.float32(2**13) * np.float32(1.5)
    return np.float32(np.float32(x + large) - large)


@numba.njit(
    void(
        float32[:, ::1],
        int64[:, :, ::1],
        float32[:, ::1],
        uint8[:, :, ::1],
        float32[::1],
        float32[:, ::1],
    ),
    cache=True,
    **_OPTIONS,
)
def quantize(
    latents: Array, fields: Array, numbers: Array, codes: Array, scales: Array, out: Array
) -> None:
    """Write codes (B, bytes, m), scales (B · m,) and reconstructions of latents (B · m, r).

    Columns of `numbers` are deviation, step, half of the range and gain of every latent.
    """
    tokens, r = latents.shape
    per_text = codes.shape[2]
    for token in range(tokens):
        total = np.float32(0)
        for i in range(r):
            ratio = latents[token, i] / numbers[i, 0]
            total += ratio * ratio
        scale = np.sqrt(total / np.float32(r))
        scale = _as_half(HALF_MAX if scale > HALF_MAX else scale)
        scales[token] = scale
        divisor = HALF_TINY if scale < HALF_TINY else scale
        batch, column = token // per_text, token % per_text
        for i in range(r):
            half = numbers[i, 2]
            code = np.floor(latents[token, i] / divisor / numbers[i, 1]) + half
            if not code > 0:  # nor NaN
                code = np.float32(0)
            elif code > 2 * half - 1:
                code = 2 * half - 1
            integer = int64(code)
            for plane in range(4):
                mask = fields[i, plane, 2]
                if mask:
                    bits = (integer >> fields[i, plane, 3]) & mask
                    codes[batch, fields[i, plane, 0], column] |= uint8(bits << fields[i, plane, 1])
            middle = np.float32(integer) + np.float32(0.5) - half
            out[token, i] = middle * numbers[i, 1] * numbers[i, 3] * scale


@numba.njit(
    void(float32[:, ::1], float32[:, ::1], float32[:, ::1], float32[:, ::1]),
    cache=True,
    fastmath={"contract", "reassoc", "nsz"},
    **_OPTIONS,
)
def project(x: Array, expected: Array, down: Array, latents: Array) -> None:
    """Write the latents of x less the expected x, (tokens, r).

    `expected` is (tokens, D), or (1, D) for all tokens, and `down` is (r, D).
    """
    tokens, features = x.shape
    for token in range(tokens):
        mean = expected[min(token, len(expected) - 1)]
        for i in range(len(down)):
            total = np.float32(0)
            for f in range(features):
                total += (x[token, f] - mean[f]) * down[i, f]
            latents[token, i] = total
