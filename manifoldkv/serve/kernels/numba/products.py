"""Numba kernels of a decode step: attention, scores, mixtures and products of packed latents.

Importing the module compiles the kernels, or loads them from Numba's cache. They are compiled again
when this file changes, and so after a change of `tiles`, whose checksum is below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import float32, int64, uint8, void
from numba.types import Tuple, UniTuple

from manifoldkv.serve.kernels.numba.tiles import (
    OPTIONS,
    TILE,
    Function,
    Packed,
    Tile,
    add_product,
    mix_tile,
    order_queries,
    score_tile,
    unpack_scaled,
    unpack_scales,
)
from manifoldkv.serve.kernels.views import Array, View

CHECKSUM_OF_TILES = "dfcd6b0ba8a3ad80"

_FLOATS, _TABLE = float32[::1], int64[:, ::1]
_VIEW = Tuple((float32[::1], int64, int64))
_BYTES = Tuple((uint8[::1], int64, int64))
_PACKED = Tuple((_BYTES, _BYTES, int64[:, :, ::1], _FLOATS))
_KEYS = Tuple(
    (_TABLE, _TABLE, int64[::1], _FLOATS, _TABLE, _TABLE, _FLOATS, float32[:, ::1], _TABLE)
)
_ROWS, _SCRATCH = float32[:, :, :, ::1], Tuple((float32[::1], uint8[::1]))
_COUNT = int64[::1]
SOURCES = 12
"""Most sites whose latents a layer depends on; `attend` takes as many, repeated if need be."""
_SOURCES = UniTuple(Tuple((_BYTES, _BYTES)), SOURCES)
_USES = Tuple((_TABLE, int64[:, :, ::1], _FLOATS, _FLOATS))

LOWEST, LOG2_E = np.float32(-87), np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1)


def _kernel(*signature: Any) -> Callable[[Function], Function]:
    """Return a decorator that compiles a kernel at once, cached on disk."""
    return numba.njit(void(*signature, int64, int64), cache=True, **OPTIONS)


@_kernel(_ROWS, _PACKED, _KEYS, _VIEW, _VIEW, _VIEW, _COUNT, _SCRATCH, _VIEW)
def scores(
    queries: Array,
    packed: Packed,
    tables: tuple[Array, ...],
    predicted: View,
    cos: View,
    sin: View,
    numbers: Array,
    scratch: tuple[Array, Array],
    out: View,
    first: int,
    stop: int,
) -> None:
    """Add the scores of tokens first to stop to a view of (B, heads · rows, n).

    Angles are views of (B, rotary dimension, n), `numbers` counts from 0 to the most rows, and
    scratch is room for queries and the rows of `score_tile`.
    """
    batches, heads, rows, head_dim = queries.shape
    shape, room = (heads, rows, head_dim), heads * rows * head_dim
    ordered, of_tile = scratch[0][:room], (scratch[0][room:], scratch[1])
    for batch in range(batches):
        order_queries(queries[batch], tables[-1], ordered)
        for start in range(first, stop, TILE):
            tile = batch, start, min(TILE, stop - start)
            target = out[0], batch * out[1] + start, out[2]
            given, angles = (predicted, tile), (cos, sin, tile)
            score_tile(
                ordered, shape, packed, tables, given, angles, numbers, of_tile, tile, target
            )


@_kernel(_VIEW, _PACKED, _SCRATCH, float32[:, :, ::1], int64)
def mix(
    weights: View,
    packed: Packed,
    scratch: tuple[Array, Array],
    out: Array,
    first_column: int,
    first: int,
    stop: int,
) -> None:
    """Add the mixtures of tokens first to stop; weights are a view of (B, rows, n).

    Mixtures are columns of `out` from the first one on; scratch is that of `mix_tile`.
    """
    for batch in range(len(out)):
        for start in range(first, stop, TILE):
            tile = batch, start, min(TILE, stop - start)
            mix_tile(weights, packed, scratch, tile, tile, out[batch], first_column)


@numba.njit(**OPTIONS)
def _project_tile(
    packed: Packed,
    matrix: View,
    numbers: Array,
    scratch: tuple[Array, Array],
    tile: Tile,
    out: View,
) -> None:
    """Add the products of a matrix and the latents of a tile to rows of `out`.

    Both are an array, its first element and the stride of rows. Scratch is rows for the latents and
    the scales, and a row of integers.
    """
    r = len(packed[3])
    scales = scratch[0][r * TILE :]
    unpack_scales(packed, tile, scales)
    unpack_scaled(packed, 0, r, tile, scales, scratch[0], scratch[1])
    add_product(out, numbers, scratch[0], matrix, r, tile[2])


@_kernel(_PACKED, float32[:, ::1], _COUNT, _SCRATCH, _VIEW, int64)
def project(
    packed: Packed,
    matrix: Array,
    numbers: Array,
    scratch: tuple[Array, Array],
    out: View,
    batches: int,
    first: int,
    stop: int,
) -> None:
    """Add the products of a matrix and the latents of tokens first to stop to (B, p, n).

    `numbers` counts from 0 to p; scratch is that of `_project_tile`.
    """
    rows = matrix.reshape(-1), 0, matrix.shape[1]
    for batch in range(batches):
        for start in range(first, stop, TILE):
            tile = batch, start, min(TILE, stop - start)
            target = out[0], batch * out[1] + start, out[2]
            _project_tile(packed, rows, numbers, scratch, tile, target)


@_kernel(_PACKED, _FLOATS, _SCRATCH, _VIEW, int64)
def unpack(
    packed: Packed,
    factors: Array,
    scratch: tuple[Array, Array],
    out: View,
    batches: int,
    first: int,
    stop: int,
) -> None:
    """Write the latents of tokens first to stop, times the factors (r,), to a view of (B, r, n).

    Scratch is that of `_project_tile`.
    """
    for batch in range(batches):
        for start in range(first, stop, TILE):
            tile = batch, start, min(TILE, stop - start)
            latents, scales = scratch[0], scratch[0][len(factors) * TILE :]
            unpack_scales(packed, tile, scales)
            unpack_scaled(packed, 0, len(factors), tile, scales, latents, scratch[1])
            for latent in range(len(factors)):
                row = out[0][batch * out[1] + latent * out[2] + start :]
                for t in range(tile[2]):
                    row[t] = factors[latent] * latents[latent * TILE + t]


@numba.njit(**OPTIONS | {"fastmath": {"contract"}})
def _exp(x: Array, largest: float, powers: Array) -> None:
    """Replace x by the exponential of its difference from the largest.

    Cephes' polynomial, since compilers vectorise no call of a function.
    """
    bits = powers.view(np.int32)
    for t in range(len(x)):
        y = x[t] - largest
        y = LOWEST if y < LOWEST else y  # and NaN stays
        exponent = np.floor(y * LOG2_E + np.float32(0.5))
        bits[t] = (np.int32(exponent) + np.int32(127)) << np.int32(23)
        y = y - exponent * LN2_HIGH - exponent * LN2_LOW
        z = np.float32(EXP_TERMS[0])
        for term in EXP_TERMS[1:]:
            z = z * y + np.float32(term)
        x[t] = (z * y + np.float32(0.5)) * y * y + y + np.float32(1)
    for t in range(len(x)):
        x[t] *= powers[t]


@numba.njit(**OPTIONS)
def _softmax_tile(scores: Array, tokens: int, powers: Array, out: Array, largest: Array) -> None:
    """Replace rows of scores by exponentials relative to the largest score so far.

    Sums are added to column 0 of `out`, whose rows are rescaled where a larger score is found.
    """
    for row in range(len(largest)):
        x, top = scores[row * TILE : row * TILE + tokens], largest[row]
        for t in range(tokens):
            top = max(top, x[t])
        if top > largest[row]:
            factor = np.exp(largest[row] - top)
            for column in range(out.shape[1]):
                out[row, column] *= factor
            largest[row] = top
        _exp(x, top, powers)
        total = np.float32(0)
        for t in range(tokens):
            total += x[t]
        out[row, 0] += total


_PARTIAL = float32[:, :, ::1]


@_kernel(
    *(_ROWS, _PACKED, _KEYS, _SOURCES, _USES, _VIEW, _VIEW, _COUNT, _TABLE, _SCRATCH),
    *(_PARTIAL, float32[:, ::1]),
)
def attend(
    queries: Array,
    packed: Packed,
    tables: tuple[Array, ...],
    sources: tuple[tuple[View, View], ...],
    uses: tuple[Array, ...],
    cos: View,
    sin: View,
    numbers: Array,
    tiles: Array,
    scratch: tuple[Array, Array],
    out: Array,
    largest: Array,
    first: int,
    stop: int,
) -> None:
    """Add the sums of weights and the mixtures of tiles first to stop, in one pass over them.

    Columns of `tiles` are the text, the index of the batch of latents, the first token there, the
    number of tokens, and the first token among the angles; tiles of a text are neighbours. Rows of
    `out` (B, heads · rows, 1 + r) are relative to the exponential of `largest`, the largest
    score of tokens before, (B, heads · rows). A row of the first table of `uses` is of a source:
    its first latent and their number, and the first element of its matrix and the first column of
    its mixtures, -1 for none. Scratch is room for queries, rows for scores and for predictions,
    those of `score_tile`, `mix_tile` and `_project_tile`, and a row of integers.
    """
    _, heads, rows, head_dim = queries.shape
    table, fields, centres, matrices = uses
    p, count, shape = tables[7].shape[1], heads * rows, (heads, rows, head_dim)
    ordered, weights = scratch[0][: count * head_dim], scratch[0][count * head_dim :]
    predicted = weights[count * TILE :]
    work = predicted[p * TILE :], scratch[1]
    ordered_text = -1
    for i in range(first, stop):
        text, batch, start, tokens, place = tiles[i]
        if text != ordered_text:
            order_queries(queries[text], tables[-1], ordered)
            ordered_text = text
        tile, here = (batch, start, tokens), (0, 0, tokens)
        weights[: (count + p) * TILE] = 0
        for s in range(len(table)):
            latent, r, matrix, _ = table[s]
            if matrix >= 0:
                of = fields[latent : latent + r], centres[latent : latent + r]
                part = sources[s][0], sources[s][1], of[0], of[1]
                by_row, target = (matrices, matrix, r), (predicted, 0, TILE)
                _project_tile(part, by_row, numbers[:p], work, tile, target)
        given, angles = ((predicted, 0, TILE), here), (cos, sin, (text, place, tokens))
        target = weights, 0, TILE
        score_tile(ordered, shape, packed, tables, given, angles, numbers, work, tile, target)
        _softmax_tile(weights, tokens, work[0], out[text], largest[text])
        for s in range(len(table)):
            latent, r, _, column = table[s]
            if column >= 0:
                of = fields[latent : latent + r], centres[latent : latent + r]
                part = sources[s][0], sources[s][1], of[0], of[1]
                mix_tile((weights, 0, TILE), part, work, tile, here, out[text], column)


@numba.njit(**OPTIONS)
def _dot(x: Array, y: Array) -> Any:
    total = np.float32(0)
    for f in range(len(x)):
        total += x[f] * y[f]
    return total


@numba.njit(**OPTIONS)
def _add(out: Array, weight: float, x: Array) -> None:
    for f in range(len(x)):
        out[f] += weight * x[f]


@numba.njit(
    void(float32[:, :, :, ::1], _PARTIAL, _ROWS, _ROWS, _ROWS, _PARTIAL, _ROWS),
    cache=True,
    **OPTIONS,
)
def finish(
    parts: Array,
    largest: Array,
    queries: Array,
    sink_keys: Array,
    sink_values: Array,
    maps: Array,
    out: Array,
) -> None:
    """Write the attention output, (B, heads, rows, d), from what `attend` left of parts of a text.

    Parts are (parts, B, heads · rows, 1 + r), `maps` those of their columns, (heads, 1 + r, d).
    Sink tokens, (B, heads, s, d), are attended to besides.
    """
    batches, heads, rows, head_dim = queries.shape
    for batch in range(batches):
        for head in range(heads):
            keys, values = sink_keys[batch, head], sink_values[batch, head]
            for row in range(rows):
                i, query, target = (
                    head * rows + row,
                    queries[batch, head, row],
                    out[batch, head, row],
                )
                top = np.float32(-np.inf)
                for part in range(len(parts)):
                    top = max(top, largest[part, batch, i])
                for s in range(len(keys)):
                    top = max(top, _dot(query, keys[s]))
                total = np.float32(0)
                target[:] = 0
                for part in range(len(parts)):
                    factor = np.exp(largest[part, batch, i] - top)
                    total += factor * parts[part, batch, i, 0]
                    for column in range(parts.shape[3]):
                        weight = factor * parts[part, batch, i, column]
                        _add(target, weight, maps[head, column])
                for s in range(len(keys)):
                    weight = np.exp(_dot(query, keys[s]) - top)
                    total += weight
                    _add(target, weight, values[s])
                for f in range(head_dim):
                    target[f] /= total
