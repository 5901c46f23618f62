"""Numba kernels of a decode step: scores of packed keys, mixtures and products of packed latents.

Tokens are the vector dimension. A tile of tokens is unpacked to scratch rows of constant length,
which stay in a processor's nearest caches; the loop over its tokens is the innermost.

A view of a tensor (B, rows, n) with tokens last is a flat array and the strides of batch and rows:
compilers vectorise loops over contiguous memory. A tile is an index of the batch, a first token
and a number of tokens. Importing the module compiles the kernels, or loads them from Numba's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import float32, uint8, uint32
from numba.extending import intrinsic

from manifoldkv.plan.formats.scales import INFINITY_CODE, LOWEST_SHORT, NAN_SHORT, SHORT_STEP
from manifoldkv.serve.kernels.views import Array, View

TILE = 512
"""Tokens of a scratch row: long enough that the setup of a loop is a small part of it."""
INFINITY = np.uint8(INFINITY_CODE)
FIRST, STEP, SHORT = np.uint32(LOWEST_SHORT), np.uint32(SHORT_STEP), np.uint8(NAN_SHORT)
EXPONENT_SHIFT = np.float32(2.0**112)
"""Of float32 less that of float16, as a factor."""

Packed = tuple[View, View, Array, Array]
Tile = tuple[int, int, int]
Function = TypeVar("Function", bound=Callable[..., Any])

OPTIONS = {
    # Sums may be reordered; NaN and inf are kept, which rules out nnan and ninf.
    "fastmath": {"contract", "reassoc", "arcp", "nsz"},
    "error_model": "numpy",
    "nogil": True,
    # Counts of references to slices would take half of the time; so kernels allocate nothing.
    "_nrt": False,
}
_inner: Callable[[Function], Function] = numba.njit(**OPTIONS)
_generated: Callable[[Callable[..., Any]], Callable[..., Any]] = intrinsic
_inlined: Callable[[Function], Function] = numba.njit(inline="always", **OPTIONS)


@_inlined
def _row(view: View, tile: Tile, row: int) -> Array:
    """Return a row of a view in a tile, (tokens,)."""
    flat, batch_stride, row_stride = view
    batch, start, tokens = tile
    first = batch * batch_stride + row * row_stride + start
    return flat[first : first + tokens]


@_inner
def _copy(out: Array, row: Array) -> None:
    for t in range(len(row)):
        out[t] = row[t]


@_generated
def _field(context: Any, byte: Any, right: Any, mask: Any, left: Any) -> Any:
    """Return bits of a byte: shifted right, masked and shifted left.

    Numba computes with integers of 64 bits, of which a vector holds an eighth as many.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        byte, right, mask, left = values
        return builder.shl(builder.and_(builder.lshr(byte, right), mask), left)

    return uint8(*[uint8] * 4), generate


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
        right, mask, left = np.uint8(right), np.uint8(mask), np.uint8(left)
        if plane == 0:
            for t in range(tokens):
                integers[t] = _field(row[t], right, mask, left)
        else:
            for t in range(tokens):
                integers[t] |= _field(row[t], right, mask, left)


@_generated
def _codeword(
    context: Any,
    upper: Any,
    middle: Any,
    lower: Any,
    right: Any,
    mask: Any,
    multiplier: Any,
    offset: Any,
) -> Any:
    """Return the sum of halves that is the codeword of a state (`coding.trellis.Code`).

    The state is cut out of three bytes by a right shift and a mask; then come multiplier and
    offset. All are integers of 32 bits, as in `_field`.
    """
    number = ir.IntType(32)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        *parts, right, mask, multiplier, offset = values
        upper, middle, lower = (builder.zext(part, number) for part in parts)
        eight, sixteen = number(8), number(16)
        two = builder.or_(builder.shl(upper, sixteen), builder.shl(middle, eight))
        state = builder.and_(builder.lshr(builder.or_(two, lower), right), mask)
        mixed = builder.add(builder.mul(state, multiplier), offset)
        low = builder.ashr(builder.shl(mixed, sixteen), sixteen)
        return builder.sitofp(builder.add(low, builder.ashr(mixed, sixteen)), ir.FloatType())

    return float32(*[uint8] * 3, *[uint32] * 4), generate


@_inner
def _compute_codewords(packed: Packed, latent: int, tile: Tile, out: Array) -> None:
    """Write a trellis-coded latent, whose states are cut out of three bytes."""
    codes, _, fields, units = packed
    upper, middle, lower, right = fields[latent, 0]
    mask, multiplier, offset, _ = fields[latent, 1]
    first, second, third = (
        _row(codes, tile, upper),
        _row(codes, tile, middle),
        _row(codes, tile, lower),
    )
    right, mask, unit = np.uint32(right & 31), np.uint32(mask), units[latent]
    multiplier, offset = np.uint32(multiplier), np.uint32(offset)
    for t in range(tile[2]):
        sum_of_halves = _codeword(first[t], second[t], third[t], right, mask, multiplier, offset)
        out[t] = unit * sum_of_halves


@_inner
def _unpack_unscaled(packed: Packed, latent: int, tile: Tile, integers: Array, out: Array) -> None:
    """Write a latent over the scales of its tokens."""
    if packed[2][latent, 3, 0]:
        _compute_codewords(packed, latent, tile, out)
        return
    _unpack(packed, latent, tile, integers)
    centre = packed[3][latent]
    for t in range(tile[2]):
        out[t] = np.float32(integers[t]) - centre


@_inner
def unpack_scales(packed: Packed, tile: Tile, scales: Array) -> None:
    """Write the scales of a tile, whose codes are the first bits of float16 behind its sign.

    Those of trellis-coded tokens are short, in the lower half of a byte.
    """
    codes, numbers, fields = _row(packed[1], tile, 0), scales.view(np.uint32), packed[2]
    if len(fields) and fields[0, 3, 0]:
        for t in range(tile[2]):
            numbers[t] = (FIRST + STEP * np.uint32(codes[t] & SHORT)) << np.uint32(20)
        for t in range(tile[2]):
            finite = codes[t] & SHORT < SHORT
            scales[t] = scales[t] * EXPONENT_SHIFT if finite else np.float32(np.nan)
        return
    for t in range(tile[2]):
        numbers[t] = np.uint32(codes[t]) << np.uint32(20)
    for t in range(tile[2]):
        finite = codes[t] < INFINITY
        scales[t] = scales[t] * EXPONENT_SHIFT if finite else np.float32(np.nan)


@_inner
def unpack_scaled(
    packed: Packed,
    first: int,
    stop: int,
    tile: Tile,
    scales: Array,
    latents: Array,
    integers: Array,
) -> None:
    """Write latents first to stop to scratch rows."""
    for latent in range(first, stop):
        row = latents[(latent - first) * TILE :]
        _unpack_unscaled(packed, latent, tile, integers, row)
        for t in range(tile[2]):
            row[t] *= scales[t]


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
def add_product(out: View, slots: Array, source: Array, matrix: View, k: int, tokens: int) -> None:
    """Add a matrix times k source rows to rows of `out`.

    Both are a flat array, the index of the first element and the stride of rows.
    """
    target, base, step = out
    weights, start, stride = matrix
    pairs, fours = len(slots) // 2 * 2, k // 4 * 4
    for i in range(0, pairs, 2):
        first, second = base + slots[i] * step, base + slots[i + 1] * step
        a, b = start + i * stride, start + (i + 1) * stride
        for j in range(0, fours, 4):
            x = source[j * TILE : (j + 4) * TILE]
            _add_two_by_four(target, first, second, x, weights, a + j, b + j, tokens)
    for i in range(len(slots)):
        first, a = base + slots[i] * step, start + i * stride
        for j in range(0, 0 if i < pairs else fours, 4):
            _add_four(target, first, source[j * TILE : (j + 4) * TILE], weights, a + j, tokens)
        for j in range(fours, k):
            _add_one(target, first, source[j * TILE : (j + 1) * TILE], weights[a + j], tokens)


@_inner
def _rotate(keys: Array, pairs: Array, cos: View, sin: View, tile: Tile) -> None:
    """Rotate pairs of scratch rows."""
    tokens = tile[2]
    for i in range(len(pairs)):
        first, second, of_first, of_second = pairs[i]
        x = keys[first * TILE : first * TILE + tokens]
        y = keys[second * TILE : second * TILE + tokens]
        x_cos, x_sin = _row(cos, tile, of_first), _row(sin, tile, of_first)
        y_cos, y_sin = _row(cos, tile, of_second), _row(sin, tile, of_second)
        for t in range(tokens):
            before, other = x[t], y[t]
            x[t] = before * x_cos[t] - other * x_sin[t]
            y[t] = other * y_cos[t] + before * y_sin[t]


@_inner
def order_queries(queries: Array, order: Array, out: Array) -> None:
    """Write the features of queries (heads, rows, d) in an order, (heads, d)."""
    heads, rows, head_dim = queries.shape
    for head in range(heads):
        for row in range(rows):
            first = (head * rows + row) * head_dim
            for i in range(head_dim):
                out[first + i] = queries[head, row, order[head, i]]


@_inner
def score_tile(
    queries: Array,
    shape: tuple[int, int, int],
    packed: Packed,
    tables: tuple[Array, ...],
    predicted: tuple[View, Tile],
    angles: tuple[View, View, Tile],
    numbers: Array,
    scratch: tuple[Array, Array],
    tile: Tile,
    out: View,
) -> None:
    """Add the scores of a tile to rows of `out`: its array, first element and stride of rows.

    Predictions and angles have tiles of their own. The shape is heads, query rows of a head and d.
    Scratch is rows for D keys, for the scales and for the latents or predictions, and a row of
    integers.
    """
    groups, blocks, slots, weights, segments, pairs, mean, predictor, _ = tables
    _, rows, head_dim = shape
    p, tokens = predictor.shape[1], tile[2]
    keys, scales, integers = scratch[0], scratch[0][len(mean) * TILE :], scratch[1]
    latents = scales[TILE:]
    unpack_scales(packed, tile, scales)
    for g in range(len(groups) - 1):
        block, feature, segment, pair = groups[g]
        next_block, next_feature, next_segment, next_pair = groups[g + 1]
        for i in range(next_feature - feature):
            keys[i * TILE : i * TILE + tokens] = mean[feature + i]
        for i in range(block, next_block):
            row, count, latent, k, weight = blocks[i]
            unpack_scaled(packed, latent, latent + k, tile, scales, latents, integers)
            used = slots[row : row + count]
            add_product((keys, 0, TILE), used, latents, (weights, weight, k), k, tokens)
        if p:
            for i in range(p):
                _copy(latents[i * TILE :], _row(predicted[0], predicted[1], i))
            used = numbers[: next_feature - feature]
            matrix = predictor.reshape(-1), feature * p, p
            add_product((keys, 0, TILE), used, latents, matrix, p, tokens)
        _rotate(keys, pairs[pair:next_pair], angles[0], angles[1], angles[2])
        for i in range(segment, next_segment):
            head, feature, slot, count = segments[i]
            row = head * rows
            source = keys[slot * TILE : (slot + count) * TILE]
            matrix = queries, row * head_dim + feature, head_dim
            target = out[0], out[1] + row * out[2], out[2]
            add_product(target, numbers[:rows], source, matrix, count, tokens)


@_inner
def _add_dots_three_by_four(
    out: Array, row: int, column: int, weights: Array, latents: Array, tokens: int
) -> None:
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = c0 = c1 = c2 = c3 = np.float32(0)
    for t in range(tokens):
        a, b, c = weights[t], weights[t + TILE], weights[t + 2 * TILE]
        x0, x1 = latents[t], latents[t + TILE]
        x2, x3 = latents[t + 2 * TILE], latents[t + 3 * TILE]
        a0, a1, a2, a3 = a0 + a * x0, a1 + a * x1, a2 + a * x2, a3 + a * x3
        b0, b1, b2, b3 = b0 + b * x0, b1 + b * x1, b2 + b * x2, b3 + b * x3
        c0, c1, c2, c3 = c0 + c * x0, c1 + c * x1, c2 + c * x2, c3 + c * x3
    for i, total in enumerate((a0, a1, a2, a3)):
        out[row, column + i] += total
    for i, total in enumerate((b0, b1, b2, b3)):
        out[row + 1, column + i] += total
    for i, total in enumerate((c0, c1, c2, c3)):
        out[row + 2, column + i] += total


@_inner
def _add_four_dots(
    out: Array, row: int, column: int, weights: Array, latents: Array, tokens: int
) -> None:
    a0 = a1 = a2 = a3 = np.float32(0)
    for t in range(tokens):
        a = weights[t]
        a0, a1 = a0 + a * latents[t], a1 + a * latents[t + TILE]
        a2, a3 = a2 + a * latents[t + 2 * TILE], a3 + a * latents[t + 3 * TILE]
    for i, total in enumerate((a0, a1, a2, a3)):
        out[row, column + i] += total


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
    if count < 4:
        for row in range(rows):
            one = weights[row * TILE : (row + 1) * TILE]
            for i in range(count):
                _add_dot(out, row, column + i, one, latents[i * TILE : (i + 1) * TILE], tokens)
        return
    threes = rows // 3 * 3
    for row in range(0, threes, 3):
        three = weights[row * TILE : (row + 3) * TILE]
        _add_dots_three_by_four(out, row, column, three, latents, tokens)
    for row in range(threes, rows):
        one = weights[row * TILE : (row + 1) * TILE]
        _add_four_dots(out, row, column, one, latents, tokens)


@_inner
def mix_tile(
    weights: View,
    packed: Packed,
    scratch: tuple[Array, Array],
    tile: Tile,
    of_weights: Tile,
    out: Array,
    first_column: int,
) -> None:
    """Add the mixtures of a tile to columns of `out` (rows, columns).

    Weights are a view of (B, rows, n), of which `of_weights` is the tile. Scratch is rows for the
    weights and 5 more, and a row of integers.
    """
    rows, tokens, r = len(out), tile[2], len(packed[3])
    scaled, scales = scratch[0], scratch[0][rows * TILE :]
    latents, integers = scales[TILE:], scratch[1]
    unpack_scales(packed, tile, scales)
    for row in range(rows):
        weight, target = _row(weights, of_weights, row), scaled[row * TILE :]
        for t in range(tokens):
            target[t] = weight[t] * scales[t]
    for column in range(0, r, 4):
        count = min(4, r - column)
        for i in range(count):
            _unpack_unscaled(packed, column + i, tile, integers, latents[i * TILE :])
        _add_dots(out, first_column + column, count, scaled, rows, latents, tokens)
