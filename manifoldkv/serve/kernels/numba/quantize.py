"""Numba kernels that round and pack latents of mixed widths; compiled when they are imported.

A view of a tensor (B, rows, m) with tokens last is a flat array and the strides of batch and rows.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import float32, int64, uint8, void
from numba.types import Tuple

from manifoldkv.plan.formats.scales import LARGEST_SCALE, NAN_CODE, SMALLEST_SCALE
from manifoldkv.serve.kernels.views import Array, View

LARGEST, SMALLEST = np.float32(LARGEST_SCALE), np.float32(SMALLEST_SCALE)
_OPTIONS = {"error_model": "numpy", "nogil": True, "_nrt": False}
_MATRIX = float32[:, ::1]
_TABLES = Tuple((int64[:, :, ::1], _MATRIX, int64))
_CODES = Tuple((uint8[::1], int64, int64))


@numba.njit(Tuple((float32, uint8))(float32), inline="always", **_OPTIONS)
def _rounded(x: Any) -> Any:
    """Round a scale of 0 to `LARGEST_SCALE` or NaN as `scale_codes` does; also return its code."""
    if x != x:
        return x, np.uint8(NAN_CODE)
    unit, exponent = SMALLEST, 0
    while unit * np.float32(2) <= x:
        unit *= np.float32(2)
        exponent += 1
    # Adding a power of 2 leaves three bits behind the point.
    large = unit * np.float32(2**20) * np.float32(1.5)
    rounded = np.float32(np.float32(x + large) - large)
    return rounded, np.uint8(8 * exponent + int64(rounded / unit * np.float32(8)))


@numba.njit(void(_MATRIX, int64, _TABLES, _CODES, _MATRIX), cache=True, **_OPTIONS)
def quantize(
    latents: Array,
    per_text: int,
    tables: tuple[Array, Array, int],
    codes: View,
    out: Array,
) -> None:
    """Write codes (B, bytes, m) and reconstructions of latents (B · m, r).

    Tables are the positions of integers; deviation, step, half of the range and gain of every
    latent; and the bytes of a token, the last of which is the code of its scale. `out` may be
    `latents`.
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
        scale, code = _rounded(LARGEST if scale > LARGEST else scale)
        first = batch * codes[1] + column
        for row in range(bytes_per_token - 1):
            codes[0][first + row * codes[2]] = 0
        codes[0][first + (bytes_per_token - 1) * codes[2]] = code
        divisor = SMALLEST if scale < SMALLEST else scale
        for i in range(r):
            half = numbers[i, 2]
            place = np.floor(latents[token, i] / divisor / numbers[i, 1]) + half
            if not place > 0:  # nor NaN
                place = np.float32(0)
            elif place > 2 * half - 1:
                place = 2 * half - 1
            integer = int64(place)
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
    void(_MATRIX, _MATRIX, _MATRIX, int64, _TABLES, _CODES, _MATRIX),
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
    out: Array,
) -> None:
    """Write what `quantize` does, for the latents of x less the expected x, (B · m, D).

    `expected` is (B · m, D), or (1, D) for all tokens, and `down` is (r, D).
    """
    _project(x, expected, down, out)
    quantize(out, per_text, tables, codes, out)
