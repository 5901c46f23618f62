"""Numba kernels of a decode step: scores of packed keys, mixtures and products of packed latents.

Tokens are the vector dimension. A tile of tokens is unpacked to scratch rows of constant length,
which stay in a processor's nearest caches; the loop over its tokens is the innermost.

Importing the module compiles the kernels, or loads them from Numba's cache on disk. Tables are
those of `manifoldkv.kernels.tables`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import float32, int64, uint8, void

TILE = 256
"""Tokens of a scratch row: long enough that the setup of a loop is a small part of it."""

Array = np.ndarray[Any, Any]
Kernel = TypeVar("Kernel", bound=Callable[..., None])

# Sums may be reordered; NaN and inf are kept, which rules out nnan and ninf.
_OPTIONS = {
    "fastmath": {"contract", "reassoc", "arcp", "nsz"},
    "nogil": True,
    "error_model": "numpy",
}
_FLOATS, _VIEW, _BYTES = float32[::1], float32[:, :, :], uint8[:, :, :]
_FIELDS, _TABLE = int64[:, :, ::1], int64[:, ::1]


def _inner(function: Kernel) -> Kernel:
    """Compile a part of kernels."""
    return numba.njit(**_OPTIONS)(function)


def _kernel(*signature: Any) -> Callable[[Kernel], Kernel]:
    """Return a decorator that compiles a kernel at once, cached on disk."""
    return numba.njit(void(*signature), cache=True, **_OPTIONS)


@_inner
def _unpack(codes: Array, fields: Array, start: int, tokens: int, integers: Array) -> None:
    """Write the integers of a latent for some tokens; codes are (bytes, n)."""
    for plane in range(len(fields)):
        mask = fields[plane, 2]
        if mask:
            row = codes[fields[plane, 0], start : start + tokens]
            right, left = fields[plane, 1] & 7, fields[plane, 3] & 7  # bounds narrow the shifts
            if plane == 0:
                for t in range(tokens):
                    integers[t] = (row[t] >> right) & mask
            else:
                for t in range(tokens):
                    integers[t] |= ((row[t] >> right) & mask) << left


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
    out: Array,
    offsets: Array,
    source: Array,
    weights: Array,
    start: int,
    stride: int,
    k: int,
    tokens: int,
) -> None:
    """Add a matrix times k source rows to the rows of `out` at some offsets.

    The matrix begins at `start` of flat weights, its rows are `stride` apart.
    """
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
def _unpack_scaled(
    codes: Array,
    scales: Array,
    fields: Array,
    centres: Array,
    start: int,
    latents: Array,
    integers: Array,
) -> None:
    """Write latents of the tokens from `start` on to scratch rows; scales are (tokens,)."""
    tokens = len(scales)
    for i in range(len(fields)):
        _unpack(codes, fields[i], start, tokens, integers)
        row, centre = latents[i * TILE : (i + 1) * TILE], centres[i]
        for t in range(tokens):
            row[t] = scales[t] * (np.float32(integers[t]) - centre)


@_inner
def _rotate(keys: Array, pairs: Array, cos: Array, sin: Array, start: int, tokens: int) -> None:
    """Rotate pairs of scratch rows in place; angles are (rotary dimension, n)."""
    for i in range(len(pairs)):
        first, second = pairs[i, 0] * TILE, pairs[i, 1] * TILE
        x, y = keys[first : first + tokens], keys[second : second + tokens]
        cos_x, sin_x = cos[pairs[i, 2], start:], sin[pairs[i, 2], start:]
        cos_y, sin_y = cos[pairs[i, 3], start:], sin[pairs[i, 3], start:]
        for t in range(tokens):
            old_x, old_y = x[t], y[t]
            x[t] = old_x * cos_x[t] - old_y * sin_x[t]
            y[t] = old_y * cos_y[t] + old_x * sin_y[t]


@_inner
def _rebuild(
    codes: Array,
    scales: Array,
    fields: Array,
    centres: Array,
    blocks: Array,
    slots: Array,
    weights: Array,
    start: int,
    keys: Array,
    latents: Array,
    integers: Array,
) -> None:
    """Add products of blocks and latents to the scratch rows of a group."""
    tokens = len(scales)
    for i in range(len(blocks)):
        first, count, latent, k, weight = blocks[i]
        used = slice(latent, latent + k)
        _unpack_scaled(codes, scales, fields[used], centres[used], start, latents, integers)
        offsets = slots[first : first + count] * TILE
        _add_product(keys, offsets, latents, weights, weight, k, k, tokens)


@_inner
def _predict(
    predicted: Array, matrix: Array, start: int, keys: Array, source: Array, tokens: int
) -> None:
    """Add the prediction of some features, whose matrix is (features, p), to scratch rows."""
    features, p = matrix.shape
    for j in range(p):
        row = predicted[j, start : start + tokens]
        for t in range(tokens):
            source[j * TILE + t] = row[t]
    offsets = np.arange(features) * TILE
    _add_product(keys, offsets, source, matrix.reshape(-1), 0, p, p, tokens)


@_inner
def _score(
    queries: Array, segments: Array, start: int, keys: Array, out: Array, tokens: int
) -> None:
    """Add products of query rows (H_kv, R, d) and scratch rows to `out`, (H_kv, R, n)."""
    rows, n = out.shape[1:]
    head_dim, flat_queries, flat_out = queries.shape[2], queries.reshape(-1), out.reshape(-1)
    for i in range(len(segments)):
        head, feature, slot, count = segments[i]
        offsets = np.arange(head * rows, (head + 1) * rows) * n + start
        first = head * rows * head_dim + feature
        source = keys[slot * TILE : (slot + count) * TILE]
        _add_product(flat_out, offsets, source, flat_queries, first, head_dim, count, tokens)


@_kernel(
    float32[:, :, :, ::1],
    _BYTES,
    float32[:, ::1],
    _FIELDS,
    _FLOATS,
    _TABLE,
    _TABLE,
    int64[::1],
    _FLOATS,
    _TABLE,
    _TABLE,
    _FLOATS,
    float32[:, ::1],
    _VIEW,
    _VIEW,
    _VIEW,
    float32[:, :, :, ::1],
    int64,
    int64,
)
def scores(
    queries: Array,
    codes: Array,
    scales: Array,
    fields: Array,
    centres: Array,
    groups: Array,
    blocks: Array,
    slots: Array,
    weights: Array,
    segments: Array,
    pairs: Array,
    mean: Array,
    predictor: Array,
    predicted: Array,
    cos: Array,
    sin: Array,
    out: Array,
    first: int,
    stop: int,
) -> None:
    """Add the scores of tokens first to stop; angles are (1 or B, rotary dimension, n)."""
    p = predictor.shape[1]
    keys = np.empty(len(mean) * TILE, mean.dtype)
    latents = np.empty(max(p, len(centres)) * TILE, mean.dtype)
    integers = np.empty(TILE, np.uint8)
    for b in range(len(codes)):
        of_angles = min(b, len(cos) - 1)
        for start in range(first, stop, TILE):
            tokens = min(TILE, stop - start)
            of_tile = scales[b, start : start + tokens]
            for g in range(len(groups) - 1):
                block, feature, segment, pair = groups[g]
                next_block, next_feature, next_segment, next_pair = groups[g + 1]
                for i in range(next_feature - feature):
                    keys[i * TILE : i * TILE + tokens] = mean[feature + i]
                _rebuild(
                    codes[b],
                    of_tile,
                    fields,
                    centres,
                    blocks[block:next_block],
                    slots,
                    weights,
                    start,
                    keys,
                    latents,
                    integers,
                )
                if p:
                    of_group = predictor[feature:next_feature]
                    _predict(predicted[b], of_group, start, keys, latents, tokens)
                rotated = pairs[pair:next_pair]
                _rotate(keys, rotated, cos[of_angles], sin[of_angles], start, tokens)
                _score(queries[b], segments[segment:next_segment], start, keys, out[b], tokens)


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
    out[row, column] += a0
    out[row, column + 1] += a1
    out[row, column + 2] += a2
    out[row, column + 3] += a3
    out[row + 1, column] += b0
    out[row + 1, column + 1] += b1
    out[row + 1, column + 2] += b2
    out[row + 1, column + 3] += b3


@_inner
def _add_dot(
    out: Array, row: int, column: int, weights: Array, latents: Array, tokens: int
) -> None:
    total = np.float32(0)
    for t in range(tokens):
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


@_kernel(float32[:, :, ::1], _BYTES, float32[:, ::1], _FIELDS, _FLOATS, _VIEW, int64, int64)
def mix(
    weights: Array,
    codes: Array,
    scales: Array,
    fields: Array,
    centres: Array,
    out: Array,
    first: int,
    stop: int,
) -> None:
    """Add the mixtures of tokens first to stop."""
    rows = weights.shape[1]
    scaled = np.empty(rows * TILE, weights.dtype)
    latents = np.empty(4 * TILE, weights.dtype)
    integers = np.empty(TILE, np.uint8)
    for b in range(len(codes)):
        for start in range(first, stop, TILE):
            tokens = min(TILE, stop - start)
            for row in range(rows):
                for t in range(tokens):
                    weight = weights[b, row, start + t]
                    scaled[row * TILE + t] = weight * scales[b, start + t]
            for column in range(0, len(fields), 4):
                count = min(4, len(fields) - column)
                for i in range(count):
                    _unpack(codes[b], fields[column + i], start, tokens, integers)
                    for t in range(tokens):
                        latents[i * TILE + t] = np.float32(integers[t]) - centres[column + i]
                _add_dots(out[b], column, count, scaled, rows, latents, tokens)


@_kernel(_BYTES, float32[:, ::1], _FIELDS, _FLOATS, float32[:, ::1], _VIEW, int64, int64)
def project(
    codes: Array,
    scales: Array,
    fields: Array,
    centres: Array,
    matrix: Array,
    out: Array,
    first: int,
    stop: int,
) -> None:
    """Add the products of a matrix and the latents of tokens first to stop."""
    p, r = matrix.shape
    latents = np.empty(r * TILE, matrix.dtype)
    products = np.empty(p * TILE, matrix.dtype)
    integers = np.empty(TILE, np.uint8)
    for b in range(len(codes)):
        for start in range(first, stop, TILE):
            tokens = min(TILE, stop - start)
            of_tile = scales[b, start : start + tokens]
            _unpack_scaled(codes[b], of_tile, fields, centres, start, latents, integers)
            products[:] = 0
            offsets = np.arange(p) * TILE
            _add_product(products, offsets, latents, matrix.reshape(-1), 0, r, r, tokens)
            for row in range(p):
                for t in range(tokens):
                    out[b, row, start + t] += products[row * TILE + t]
