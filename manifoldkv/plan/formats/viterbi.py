"""Numba kernels that encode trellis-coded latents, compiled when they are imported.

States are the vector dimension of the Viterbi search. A state drops its last bits where a latent's
own bits enter, so that the states which lead to the same one are neighbours: their least cost is
found by halving.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import float32, int64, uint8, uint16, void
from numba.types import Tuple

from manifoldkv.plan.formats.scales import NAN_SHORT, SHORT_BITS
from manifoldkv.plan.formats.views import Array, View

WORST = np.float32(1e30)
"""Cost of a state that no path reaches."""
SHORTEST = 256
"""Fewest costs that `_add_errors` takes: shorter rows are repeated, since calls take time too."""
SCALES_TRIED = 9
"""Scales that are tried, from the root mean square on to about eight times as large."""
_OPTIONS = {
    "fastmath": {"contract", "reassoc", "arcp", "nsz"},
    "error_model": "numpy",
    "nogil": True,
    "_nrt": False,
}
_FLOATS, _BYTES, _MATRIX = float32[::1], uint8[::1], float32[:, ::1]
_TABLES = Tuple((int64[::1], _MATRIX, _MATRIX, _FLOATS, float32))
_VIEW = Tuple((_BYTES, int64, int64))
_SCRATCH = Tuple((_MATRIX, uint8[:, ::1], _FLOATS, uint16[::1]))


@numba.njit(**_OPTIONS)
def _halve(costs: Array, least: Array, is_second: Array) -> None:
    """Write the lower cost of each pair, and which one it is."""
    for i in range(len(least)):
        first, second = costs[2 * i], costs[2 * i + 1]
        less = second < first
        least[i] = second if less else first
        is_second[i] = less


@numba.njit(**_OPTIONS)
def _copy(out: Array, x: Array) -> None:
    for i in range(len(x)):
        out[i] = x[i]


@numba.njit(**_OPTIONS)
def _add_errors(out: Array, least: Array, codewords: Array, x: float, weight: float) -> None:
    for i in range(len(least)):
        error = x - codewords[i]
        out[i] = least[i] + weight * error * error


@numba.njit(
    void(_MATRIX, int64[::1], _FLOATS, _MATRIX, _SCRATCH, uint16[:, ::1]), cache=True, **_OPTIONS
)
def search(
    latents: Array,
    bits: Array,
    weights: Array,
    codebooks: Array,
    scratch: tuple[Array, ...],
    states: Array,
) -> None:
    """Write the states (n, r) whose codewords have the least weighted squared error.

    Latents (n, r) are in units of the codebooks (9, states), one for every number of own bits in
    `bits` (r,). The state of a latent is a window of the stream of all bits that begins with its
    own; bits beyond the last latent are 0. Scratch begins with costs (3, states + `SHORTEST`) and
    branches (r, states).
    """
    costs, branches = scratch[0], scratch[1]
    tokens, count = latents.shape
    size = codebooks.shape[1]
    now, then, tree = costs[0, :size], costs[1, :size], costs[2]
    for token in range(tokens):
        now[:] = WORST
        now[0] = np.float32(0)
        for i in range(count - 1, -1, -1):
            kept, start, least = size, 0, now
            for _ in range(bits[i]):
                kept >>= 1
                half = tree[start : start + kept]
                _halve(least, half, branches[i, start : start + kept])
                start, least = start + kept, half
            if kept < SHORTEST:
                start -= kept
                while kept < SHORTEST:
                    _copy(tree[start + kept : start + 2 * kept], tree[start : start + kept])
                    kept *= 2
                least = tree[start : start + SHORTEST]
            x, weight = latents[token, i], weights[i]
            for first in range(0, size, len(least)):
                part = slice(first, first + len(least))
                _add_errors(then[part], least, codebooks[bits[i], part], x, weight)
            now, then = then, now
        state = 0
        for other in range(1, size):
            if now[other] < now[state]:
                state = other
        for i in range(count):
            states[token, i] = state
            kept = size >> bits[i]
            state &= kept - 1
            start = size - 2 * kept  # of the last halving's row
            for _ in range(bits[i]):
                state = 2 * state + int64(branches[i, start + state])
                kept <<= 1
                start -= kept


@numba.njit(int64(_FLOATS, float32), **_OPTIONS)
def _nearest(scales: Array, x: float) -> int:
    """Return the index of the nearest of ascending scales; of two, the even one."""
    low, high = 0, len(scales) - 1
    while low < high:
        i = (low + high) // 2
        middle = (scales[i] + scales[i + 1]) / np.float32(2)
        if x > middle or (x == middle and i % 2 == 1):
            low = i + 1
        else:
            high = i
    return low


@numba.njit(int64(_FLOATS, _TABLES), **_OPTIONS)
def _scale_of(x: Array, tables: tuple[Any, ...]) -> int:
    """Return the code of the scale of a token with latents x, (r,)."""
    _, numbers, _, scales, noise = tables
    total = np.float32(0)
    for i in range(len(x)):
        ratio = x[i] / numbers[0, i]
        total += ratio * ratio
    deviation = np.sqrt(total / np.float32(len(x)))
    if np.isnan(deviation):
        return int64(NAN_SHORT)
    smallest, least = _nearest(scales, deviation), np.float32(np.inf)
    best = smallest
    for trial in range(SCALES_TRIED):
        code = min(smallest + trial, len(scales) - 1)
        scale, overload = scales[code], np.float32(0)
        for i in range(len(x)):
            beyond = max(np.abs(x[i]) - scale * numbers[3, i], np.float32(0))
            overload += beyond * beyond
        error = overload + noise * scale * scale
        if error < least:
            best, least = code, error
        if overload == 0:
            break
    return best


@numba.njit(
    void(_MATRIX, int64, _TABLES, _VIEW, _MATRIX, _SCRATCH, int64, int64),
    cache=True,
    **_OPTIONS,
)
def encode(
    latents: Array,
    per_text: int,
    tables: tuple[Any, ...],
    codes: View,
    out: Array,
    scratch: tuple[Array, ...],
    first: int,
    stop: int,
) -> None:
    """Write streams with scales (B, bytes, m), and reconstructions of latents (B · m, r).

    Only those of tokens first to stop are written. The last four bits of a stream are the code of
    the scale. Tables are the bits (r,); deviation, step, factor of a codeword, largest latent that
    is no outlier, and weight of squared errors, (5, r); the codebooks (9, states); all finite
    scales; and the squared error of a token without outliers at a scale of one. Scratch is that of
    `search`, and rows for scaled latents and for states.
    """
    bits, numbers, codebooks, of_codes, _ = tables
    count = len(bits)
    scaled, states = scratch[2][:count], scratch[3][:count]
    row = scaled.reshape((1, count)), states.reshape((1, count))
    size, length = 0, codebooks.shape[1]
    while 1 << size < length:
        size += 1
    for token in range(first, stop):
        x, batch, column = latents[token], token // per_text, token % per_text
        code = _scale_of(x, tables)
        scale = of_codes[code] if code < len(of_codes) else np.float32(np.nan)
        for i in range(len(x)):
            scaled[i] = x[i] / scale / numbers[1, i]
        search(row[0], bits, numbers[4], codebooks, scratch, row[1])
        place, held, pending = batch * codes[1] + column, 0, 0
        for i in range(len(x)):
            width, state = bits[i], int64(states[i])
            held = held << width | state >> (size - width)
            pending += width
            if pending >= 8:
                pending -= 8
                codes[0][place] = held >> pending & 255
                place += codes[2]
            out[token, i] = codebooks[width, state] * numbers[2, i] * scale
        byte = held << (8 - pending) & 255
        if pending > 8 - SHORT_BITS:
            codes[0][place] = byte
            place, byte = place + codes[2], 0
        codes[0][place] = byte | code
