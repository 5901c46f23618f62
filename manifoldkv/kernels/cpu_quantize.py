"""Numba kernels that round and pack latents of mixed widths; compiled when they are imported.

A view of a tensor (B, rows, m) with tokens last is a flat array and the strides of batch and rows.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import float32, int64, uint8, uint16, void
from numba.types import Tuple

from manifoldkv.kernels.views import Array, View

HALF_MAX, HALF_TINY = np.float32(65504), np.float32(2**-14)
"""Largest finite float16, and its smallest normal number."""
HALF_NAN = np.uint16(0x7E00)
_OPTIONS = {"error_model": "numpy", "nogil": True, "_nrt": False}
_MATRIX = float32[:, ::1]
_TABLES = Tuple((int64[:, :, ::1], _MATRIX, int64))
_CODES, _SCALES = Tuple((uint8[::1], int64, int64)), Tuple((uint16[::1], int64, int64))


@numba.njit(Tuple((float32, uint16))(float32), inline="always", **_OPTIONS)
def _as_half(x: Any) -> Any:
    """Round to float16, ties to even, for x of 0 to `HALF_MAX` or NaN; also return its bits."""
    if x != x:
        return x, HALF_NAN
    unit, exponent = HALF_TINY, 0
    while unit * np.float32(2) <= x:
        unit *= np.float32(2)
        exponent += 1
    # Adding a power of 2 leaves as many bits behind the point as float16 has.
    large = unit * np.float32(2**13) * np.float32(1.5)
    half = np.float32(np.float32(x + large) - large)
    return half, np.uint16(1024 * exponent + int64(half / unit * np.float32(1024)))


@numba.njit(void(_MATRIX, int64, _TABLES, _CODES, _SCALES, _MATRIX), cache=True, **_OPTIONS)
def quantize(
    latents: Array,
    per_text: int,
    tables: tuple[Array, Array, int],
    codes: View,
    scales: View,
    out: Array,
) -> None:
    """Write codes (B, bytes, m), scales (B, 1, m) and reconstructions of latents (B · m, r).

    Tables are the positions of integers; deviation, step, half of the range and gain of every
    latent; and the bytes of a token. Scales are bits of float16, and `out` may be `latents`.
    """
    fields, numbers, bytes_per_token = tables
    tokens, r = latents.shape
    for token in range(tokens):
        batch, column = token // per_text, token % per_text
        total = np.float32(0)
        for i in range(r):
            ratio = latents[token, i] / numbers[i, 0]
            total += ratio * ratio
        scale = np.sqrt(total / np.float32(r))
        scale, bits = _as_half(HALF_MAX if scale > HALF_MAX else scale)
        scales[0][batch * scales[1] + column] = bits
        first = batch * codes[1] + column
        for row in range(bytes_per_token):
            codes[0][first + row * codes[2]] = 0
        divisor = HALF_TINY if scale < HALF_TINY else scale
        for i in range(r):
            half = numbers[i, 2]
            code = np.floor(latents[token, i] / divisor / numbers[i, 1]) + half
            if not code > 0:  # nor NaN
                code = np.float32(0)
            elif code > 2 * half - 1:
                code = 2 * half - 1
            integer = int64(code)
            for plane in range(4):
                row, left, mask, right = fields[i, plane]
                if mask:
                    part = (integer >> right) & mask
                    codes[0][first + row * codes[2]] |= uint8(part << left)
            middle = np.float32(integer) + np.float32(0.5) - half
            out[token, i] = middle * numbers[i, 1] * numbers[i, 3] * scale


@numba.njit(
    void(_MATRIX, _MATRIX, _MATRIX, _MATRIX),
    fastmath={"contract", "reassoc", "nsz"},
    **_OPTIONS,
)
def _project(x: Array, expected: Array, down: Array, latents: Array) -> None:
    tokens, features = x.shape
    for token in range(tokens):
        mean = expected[min(token, len(expected) - 1)]
        for i in range(len(down)):
            total = np.float32(0)
            for f in range(features):
                total += (x[token, f] - mean[f]) * down[i, f]
            latents[token, i] = total


@numba.njit(
    void(_MATRIX, _MATRIX, _MATRIX, int64, _TABLES, _CODES, _SCALES, _MATRIX),
    cache=True,
    **_OPTIONS,
)
def encode(
    x: Array,
    expected: Array,
    down: Array,
    per_text: int,
    tables: tuple[Array, Array, int],
    codes: View,
    scales: View,
    out: Array,
) -> None:
    """Write what `quantize` does, for the latents of x less the expected x, (B · m, D).

    `expected` is (B · m, D), or (1, D) for all tokens, and `down` is (r, D).
    """
    _project(x, expected, down, out)
    quantize(out, per_text, tables, codes, scales, out)
