"""Numba kernel of the Viterbi search of trellis-coded latents, compiled when it is imported.

States are the vector dimension. A state drops its last bits where a latent's own bits enter, so
that the states which lead to the same one are neighbours: their least cost is found by halving.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import float32, int64, uint8, uint16, void
from numpy.typing import NDArray

WORST = np.float32(1e30)
"""Cost of a state that no path reaches."""
_OPTIONS = {
    "fastmath": {"contract", "reassoc", "arcp", "nsz"},
    "error_model": "numpy",
    "nogil": True,
    "_nrt": False,
}
_FLOATS, _BYTES = float32[::1], uint8[::1]
Array = NDArray[Any]


@numba.njit(**_OPTIONS)
def _halve(costs: Array, least: Array, is_second: Array) -> None:
    """Write the lower cost of each pair, and which one it is."""
    for i in range(len(least)):
        first, second = costs[2 * i], costs[2 * i + 1]
        less = second < first
        least[i] = second if less else first
        is_second[i] = less


@numba.njit(**_OPTIONS)
def _add_errors(out: Array, least: Array, codewords: Array, x: float, weight: float) -> None:
    for i in range(len(least)):
        error = x - codewords[i]
        out[i] = least[i] + weight * error * error


@numba.njit(
    void(float32[:, ::1], int64[::1], _FLOATS, float32[:, ::1], uint16[:, ::1], _FLOATS, _FLOATS,
         _FLOATS, uint8[:, ::1]),
    cache=True,
    **_OPTIONS,
)  # fmt: skip
def search(
    latents: Array,
    bits: Array,
    weights: Array,
    codebooks: Array,
    states: Array,
    now: Array,
    then: Array,
    tree: Array,
    branches: Array,
) -> None:
    """Write the states (n, r) whose codewords have the least weighted squared error.

    Latents (n, r) are in units of the codebooks (9, states), one for every width in `bits` (r,).
    The state of a latent is a window of the stream of all bits that begins with its own; bits
    beyond the last latent are 0. Scratch: costs (states,), three times, and branches (r, states).
    """
    tokens, count = latents.shape
    size = codebooks.shape[1]
    for token in range(tokens):
        now[:] = WORST
        now[0] = np.float32(0)
        for i in range(count - 1, -1, -1):
            kept, start, end = size, 0, 0
            for _ in range(bits[i]):
                source = now if end == 0 else tree[start:end]
                kept >>= 1
                start = end
                end += kept
                _halve(source, tree[start:end], branches[i, start:end])
            for own in range(1 << bits[i]):
                first, stop = own * kept, (own + 1) * kept
                _add_errors(
                    then[first:stop], tree[start:end], codebooks[bits[i], first:stop],
                    latents[token, i], weights[i],
                )  # fmt: skip
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
