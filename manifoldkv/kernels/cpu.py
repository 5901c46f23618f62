"""Numba kernels of a decode step: scores of packed keys, mixtures and products of packed latents.

Tokens are the vector dimension. A tile of tokens is unpacked to scratch rows of constant length,
which stay in a processor's nearest caches; the loop over its tokens is the innermost.

A view of a tensor (B, rows, n) with tokens last is a flat array and the strides of batch and rows:
compilers vectorise what they know to be contiguous. A tile is an index of the batch, a first token
and a number of tokens. Importing the module compiles the kernels, or loads them from Numba's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import float32, int64, uint8, void
from numba.types import Tuple

TILE = 256
"""Tokens of a scratch row: long enough that the setup of a loop is a small part of it."""

Array = np.ndarray[Any, Any]
View = tuple[Array, int, int]
Packed = tuple[View, View, Array, Array]
Tile = tuple[int, int, int]
Function = TypeVar("Function", bound=Callable[..., Any])

# Sums may be reordered; NaN and inf are kept, which rules out nnan and ninf.
_FLAGS = {"contract", "reassoc", "arcp", "nsz"}
_inner: Callable[[Function], Function] = numba.njit(
    fastmath=_FLAGS, nogil=True, error_model="numpy"
)

_FLOATS, _TABLE = float32[::1], int64[:, ::1]
_VIEW = Tuple((float32[::1], int64, int64))
_PACKED = Tuple((Tuple((uint8[::1], int64, int64)), _VIEW, int64[:, :, ::1], _FLOATS))
_KEYS = Tuple((_TABLE, _TABLE, int64[::1], _FLOATS, _TABLE, _TABLE, _FLOATS, float32[:, ::1]))
_ROWS = float32[:, :, :, ::1]


def _kernel(*signature: Any) -> Callable[[Function], Function]:
    """Return a decorator that compiles a kernel at once, cached on disk."""
    return numba.njit(
        void(*signature, int64, int64), cache=True, fastmath=_FLAGS, nogil=True, error_model="numpy"
    )


@_inner
def _row(view: View, tile: Tile, row: int) -> Array:
    """Return a row of a view in a tile, (tokens,)."""
    flat, batch_stride, row_stride = view
    batch, start, tokens = tile
    first = batch * batch_stride + row * row_stride + start
    return flat[first : first + tokens]


@_inner
def _unpack(packed: Packed, latent: int, tile: Tile, integers: Array) -> None:
    """Write the integers of a latent."""
    codes, _, fields, _ = packed
    tokens = tile[2]
    for plane in range(fields.shape[1]):
        index, right, mask, left = fields[latent, plane]
        if mask == 0:
            break
        row = _row(codes, tile, index)
        right, mask, left = right & 7, mask & 255, left & 7  # bounds narrow the shifts to bytes
        if plane == 0:
            for t in range(tokens):
                integers[t] = (row[t] >> right) & mask
        else:
            for t in range(tokens):
                integers[t] |= ((row[t] >> right) & mask) << left


@_inner
def _unpack_scaled(
    packed: Packed, first: int, stop: int, tile: Tile, latents: Array, integers: Array
) -> None:
    """Write latents first to stop to scratch rows."""
    scales, centres = _row(packed[1], tile, 0), packed[3]
    for latent in range(first, stop):
        _unpack(packed, latent, tile, integers)
        row, centre = latents[(latent - first) * TILE :], centres[latent]
        for t in range(tile[2]):
            row[t] = scales[t] * (np.float32(integers[t]) - centre)


@_inner
def _add_two_by_four(
    out: Array, first: int, second: int, source: Array, weights: Array, a: int, b: int, tokens: int
) -> None:
    """Add four source rows to two rows of `out`, whose weights begin at a and b."""
    a0, a1, a2, a3 = weights[a], weights[a + 1], weights[a + 2], weights[a + 3]
    b0, b1, b2, b3 = weights[b], weights[b + 1], weights[b + 2], weights[b + 3]
    upper, lower = out[first : first + tokens], out[second : second + tokens]
    for t in range(tokens):
        x0, x1 = source[t], source[t + TILE]
        x2, x3 = source[t + 2 * TILE], source[t + 3 * TILE]
        upper[t] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
        lower[t] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3


@_inner
def _add_four(out: Array, first: int, source: Array, weights: Array, a: int, tokens: int) -> None:
    a0, a1, a2, a3 = weights[a], weights[a + 1], weights[a + 2], weights[a + 3]
    row = out[first : first + tokens]
    for t in range(tokens):
        x0, x1 = source[t], source[t + TILE]
        x2, x3 = source[t + 2 * TILE], source[t + 3 * TILE]
        row[t] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3


@_inner
def _add_one(out: Array, first: int, source: Array, weight: float, tokens: int) -> None:
    row = out[first : first + tokens]
    for t in range(tokens):
        row[t] += weight * source[t]


@_inner
def _add_product(
    out: Array, offsets: Array, source: Array, matrix: tuple[Array, int, int], k: int, tokens: int
) -> None:
    """Add a matrix times k source rows to the rows of `out` at some offsets.

    The matrix is its flat weights, the first of them, and the stride of rows.
    """
    weights, start, stride = matrix
    pairs, fours = len(offsets) // 2 * 2, k // 4 * 4
    for i in range(0, pairs, 2):
        a, b = start + i * stride, start + (i + 1) * stride
        for j in range(0, fours, 4):
            x = source[j * TILE : (j + 4) * TILE]
            _add_two_by_four(out, offsets[i], offsets[i + 1], x, weights, a + j, b + j, tokens)
    for i in range(len(offsets)):
        a = start + i * stride
        for j in range(0, 0 if i < pairs else fours, 4):
            _add_four(out, offsets[i], source[j * TILE : (j + 4) * TILE], weights, a + j, tokens)
        for j in range(fours, k):
            x = source[j * TILE : (j + 1) * TILE]
            _add_one(out, offsets[i], x, weights[a + j], tokens)


@_inner
def _predict(predicted: View, matrix: Array, tile: Tile, keys: Array, source: Array) -> None:
    """Add the prediction of some features, whose matrix is (features, p), to scratch rows."""
    features, p = matrix.shape
    for i in range(p):
        source[i * TILE : i * TILE + tile[2]] = _row(predicted, tile, i)
    offsets = np.arange(features) * TILE
    _add_product(keys, offsets, source, (matrix.reshape(-1), 0, p), p, tile[2])


@_inner
def _rotate(keys: Array, pairs: Array, cos: View, sin: View, tile: Tile, turned: Array) -> None:
    """Rotate pairs of scratch rows; short loops need few checks that rows do not overlap."""
    tokens = tile[2]
    for i in range(len(pairs)):
        first, second, of_first, of_second = pairs[i]
        x, y = keys[first * TILE : (first + 1) * TILE], keys[second * TILE : (second + 1) * TILE]
        cosine, sine = _row(cos, tile, of_first), _row(sin, tile, of_first)
        for t in range(tokens):
            turned[t] = x[t] * cosine[t] - y[t] * sine[t]
        cosine, sine = _row(cos, tile, of_second), _row(sin, tile, of_second)
        for t in range(tokens):
            y[t] = y[t] * cosine[t] + x[t] * sine[t]
        for t in range(tokens):
            x[t] = turned[t]


@_inner
def _score(queries: Array, segments: Array, tile: Tile, keys: Array, out: Array) -> None:
    """Add products of query rows (B, H_kv, R, d) and scratch rows to `out`, (B, H_kv, R, n)."""
    batch, start, tokens = tile
    _, heads, rows, n = out.shape
    head_dim, flat_queries, flat_out = queries.shape[3], queries.reshape(-1), out.reshape(-1)
    for i in range(len(segments)):
        head, feature, slot, count = segments[i]
        row = (batch * heads + head) * rows
        matrix = flat_queries, row * head_dim + feature, head_dim
        offsets = np.arange(row, row + rows) * n + start
        source = keys[slot * TILE : (slot + count) * TILE]
        _add_product(flat_out, offsets, source, matrix, count, tokens)


@_kernel(_ROWS, _PACKED, _KEYS, _VIEW, _VIEW, _VIEW, _ROWS)
def scores(
    queries: Array,
    packed: Packed,
    tables: tuple[Array, ...],
    predicted: View,
    cos: View,
    sin: View,
    out: Array,
    first: int,
    stop: int,
) -> None:
    """Add the scores of tokens first to stop; angles are views of (B, rotary dimension, n)."""
    groups, blocks, slots, weights, segments, pairs, mean, predictor = tables
    p = predictor.shape[1]
    keys = np.empty(len(mean) * TILE, mean.dtype)
    latents = np.empty(max(p, len(packed[3])) * TILE, mean.dtype)
    turned, integers = np.empty(TILE, mean.dtype), np.empty(TILE, np.uint8)
    for batch in range(len(queries)):
        for start in range(first, stop, TILE):
            tokens = min(TILE, stop - start)
            tile = batch, start, tokens
            for g in range(len(groups) - 1):
                of_blocks, of_features = (
                    slice(groups[g, 0], groups[g + 1, 0]),
                    slice(groups[g, 1], groups[g + 1, 1]),
                )
                for i, offset in enumerate(mean[of_features]):
                    keys[i * TILE : i * TILE + tokens] = offset
                for row, rows, latent, k, weight in blocks[of_blocks]:
                    _unpack_scaled(packed, latent, latent + k, tile, latents, integers)
                    offsets = slots[row : row + rows] * TILE
                    _add_product(keys, offsets, latents, (weights, weight, k), k, tokens)
                if p:
                    _predict(predicted, predictor[of_features], tile, keys, latents)
                _rotate(keys, pairs[groups[g, 3] : groups[g + 1, 3]], cos, sin, tile, turned)
                _score(queries, segments[groups[g, 2] : groups[g + 1, 2]], tile, keys, out)


@_inner
def _add_dots_two_by_four(
    out: Array, row: int, column: int, weights: Array, latents: Array, tokens: int
) -> None:
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
    for t in range(tokens):
        a, b = weights[t], weights[t + TILE]
        x0, x1 = latents[t], latents[t + TILE]
        x2, x3 = latents[t + 2 * TILE], latents[t + 3 * TILE]
        a0, a1, a2, a3 = a0 + a * x0, a1 + a * x1, a2 + a * x2, a3 + a * x3
        b0, b1, b2, b3 = b0 + b * x0, b1 + b * x1, b2 + b * x2, b3 + b * x3
    for i, total in enumerate((a0, a1, a2, a3)):
        out[row, column + i] += total
    for i, total in enumerate((b0, b1, b2, b3)):
        out[row + 1, column + i] += total


@_inner
def _add_dot(out: Array, row: int, column: int, weights: Array, latents: Array, n: int) -> None:
    total = np.float32(0)
    for t in range(n):
        total += weights[t] * latents[t]
    out[row, column] += total


@_inner
def _add_dots(
    out: Array, column: int, count: int, weights: Array, rows: int, latents: Array, tokens: int
) -> None:
    """Add dot products of scratch rows of weights and of up to four latents to `out`, (rows, r)."""
    pairs = rows // 2 * 2 if count == 4 else 0
    for row in range(0, pairs, 2):
        two = weights[row * TILE : (row + 2) * TILE]
        _add_dots_two_by_four(out, row, column, two, latents, tokens)
    for row in range(pairs, rows):
        one = weights[row * TILE : (row + 1) * TILE]
        for i in range(count):
            _add_dot(out, row, column + i, one, latents[i * TILE : (i + 1) * TILE], tokens)


@_kernel(_VIEW, _PACKED, float32[:, :, ::1])
def mix(weights: View, packed: Packed, out: Array, first: int, stop: int) -> None:
    """Add the mixtures of tokens first to stop; weights are a view of (B, rows, n)."""
    batches, rows, r = out.shape
    scaled, latents = np.empty(rows * TILE, out.dtype), np.empty(4 * TILE, out.dtype)
    integers, centres = np.empty(TILE, np.uint8), packed[3]
    for batch in range(batches):
        for start in range(first, stop, TILE):
            tokens = min(TILE, stop - start)
            tile = batch, start, tokens
            scales = _row(packed[1], tile, 0)
            for row in range(rows):
                weight, target = _row(weights, tile, row), scaled[row * TILE :]
                for t in range(tokens):
                    target[t] = weight[t] * scales[t]
            for column in range(0, r, 4):
                count = min(4, r - column)
                for i in range(count):
                    _unpack(packed, column + i, tile, integers)
                    latent, centre = latents[i * TILE :], centres[column + i]
                    for t in range(tokens):
                        latent[t] = np.float32(integers[t]) - centre
                _add_dots(out[batch], column, count, scaled, rows, latents, tokens)


@_kernel(_PACKED, float32[:, ::1], _VIEW, int64)
def project(packed: Packed, matrix: Array, out: View, batches: int, first: int, stop: int) -> None:
    """Add the products of a matrix and the latents of tokens first to stop to (B, p, n)."""
    p, r = matrix.shape
    latents, integers = np.empty(r * TILE, matrix.dtype), np.empty(TILE, np.uint8)
    for batch in range(batches):
        for start in range(first, stop, TILE):
            tile = batch, start, min(TILE, stop - start)
            _unpack_scaled(packed, 0, r, tile, latents, integers)
            offsets = batch * out[1] + np.arange(p) * out[2] + start
            _add_product(out[0], offsets, latents, (matrix.reshape(-1), 0, r), r, tile[2])
