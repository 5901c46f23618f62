"""Products of a decode step with packed latents, for GPUs, in Triton.

This file, `gpu_latents` and `gpu_encode` need Triton, and are imported for CUDA devices alone.
Tensors of tokens have them last, with stride 1. A program has a tile of tokens or latents and a
part of the sum; the parts are added at the end. Products are of latents before their scales, which
multiply the results. Operands of tensor cores are float32 or bfloat16; sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch
import triton
from torch import Tensor
from triton import language as tl

from manifoldkv.kernels import gpu_tables
from manifoldkv.kernels.gpu_latents import (
    LATENTS,
    TOKENS,
    Constant,
    in_words,
    on_device,
    scales_of,
    start_of,
    unpack,
)
from manifoldkv.kernels.gpu_tables import Keys, Latents
from manifoldkv.kernels.views import check_shape

FEATURES = Constant(gpu_tables.FEATURES)
MIXED_TOKENS, MIXED = Constant(32), Constant(128)  # of a tile of mixtures, and its latents
ROWS = 32  # of queries, weights or predictions of a program, at most
SCORES = {"num_warps": 8, "num_stages": 1}  # and tiles: the fastest of those tried on an H200
MIXTURES = {"num_warps": 4, "num_stages": 1}
PROGRAMS = 512  # among which work is split: a few per multiprocessor
PRECISION = Constant("tf32x3")  # about that of float32, on tensor cores


def _row_tiles(rows: int) -> tuple[int, int]:
    """Return the number of tiles of rows and their size."""
    size = 16 if rows <= 16 else ROWS  # 16 at least for tensor cores
    return ceil(rows / size), size


def _splits(programs: int, most: int) -> int:
    """Return the number of parts of a sum, at most `most`, that fill a GPU."""
    return max(1, min(most, PROGRAMS // programs))


def _alignment(before: int, *views: Tensor) -> int:
    """Return the tokens of views (…, rows, n) that are loaded at once, with `before` others."""
    ends = [(x.storage_offset() - before) % 4 or x.stride(-2) % 4 for x in views]
    return 1 if any(ends) or any(x.stride(-1) != 1 for x in views) else 4


@on_device
def scores(
    queries: Tensor,
    codes: Tensor,
    keys: Keys,
    cos: Tensor,
    sin: Tensor,
    predicted: Tensor | None = None,
    *,
    scaling: float = 1.0,
    dtype: tl.dtype = tl.float32,
) -> Tensor:
    """Return the products of queries and rotated keys, (B, H_kv, R, n), float32.

    Parameters
    ----------
    queries : Tensor
        Rotated queries, (B, H_kv, R, d), in a floating dtype.
    codes : Tensor
        Packed latents, (B, 1, bytes, n), uint8.
    keys : Keys
        Tables of the layer.
    cos, sin : Tensor
        Of the angles of the tokens, (1 or B, n, angles).
    predicted : Tensor, optional
        Inputs p of the predictor, (B, p, n), float32.
    scaling : float
        Factor of the products.
    dtype : tl.dtype
        Of the operands of tensor cores: ``tl.float32`` or ``tl.bfloat16``.
    """
    batch, heads, rows_per_head, head_dim = queries.shape
    n, rows = codes.shape[-1], heads * rows_per_head
    check_shape("queries", (heads * head_dim, head_dim), keys.width, len(keys.partner))
    keys.latents.check(codes, batch, n)
    for x in (cos, sin):
        angles = max(x.shape[2], keys.angles)
        check_shape("angles", x.shape, 1 if len(x) == 1 else batch, n, angles)
    if predicted is not None or keys.prediction.shape[-1]:
        found = () if predicted is None else predicted.shape
        check_shape("inputs of predictors", found, batch, keys.prediction.shape[-1], n)
    queries = queries.contiguous()
    cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
    inputs = codes[:, 0] if predicted is None else predicted
    words = in_words(codes)
    align = _alignment(words.before, cos.mT, sin.mT, inputs)
    row_tiles, row_size = _row_tiles(rows)
    grid = ceil((n + words.before) / TOKENS.value), batch * row_tiles
    splits = _splits(grid[0] * grid[1], len(keys.tiles))
    shape = splits, batch, heads, rows_per_head, n
    parts = torch.empty(shape, dtype=torch.float32, device=queries.device)
    views = [
        (start_of(x), (x.storage_offset() - words.before * x.stride(-1)) // align)
        for x in (cos.mT, sin.mT, inputs)
    ]
    _scores_kernel[(*grid, splits)](
        *(queries, keys.partner, keys.sign, parts, scaling, n, rows, rows_per_head, head_dim),
        *words,
        *(*views[0], *cos.stride(), *views[1], *sin.stride(), keys.cosines, keys.sines),
        *(*views[2], inputs.stride(0), inputs.stride(1)),
        *(keys.prediction, keys.prediction.shape[-1]),
        *(keys.tiles, keys.columns, keys.features, keys.up, keys.mean, len(keys.tiles)),
        *(keys.latents.fields, keys.latents.centres, keys.latents.last),
        *(row_tiles, row_size, keys.latents.depth, align, dtype),
        **SCORES,
    )
    return parts[0] if splits == 1 else parts.sum(dim=0)


@on_device
def mix(
    weights: Tensor,
    n: int,
    sources: Sequence[tuple[Tensor, Latents]],
    dtype: tl.dtype = tl.float32,
) -> Tensor:
    """Return the sums of weights, and of latents times weights, over tokens.

    Parameters
    ----------
    weights : Tensor
        (B, rows, n or more), float32.
    n : int
        Number of tokens.
    sources : sequence of tuple
        Packed latents of the tokens, as in `scores`, and tables of the site.
    dtype
        As in `scores`.

    Returns
    -------
    Tensor
        (B, rows, 1 + all latents), float32.
    """
    batch, rows, given = weights.shape
    check_shape("weights", weights.shape, batch, rows, max(n, given))
    for codes, latents in sources:
        latents.check(codes, batch, n)
    counts = [len(latents.centres) for _, latents in sources]
    row_tiles, row_size = _row_tiles(rows)
    tiles = ceil((n + 3) / MIXED_TOKENS.value)
    programs = ceil(max(1, min(counts)) / MIXED.value) * batch * row_tiles
    per_split = ceil(tiles / _splits(programs, tiles))
    splits = ceil(tiles / per_split)
    parts = weights.new_empty(splits, batch, rows, 1 + sum(counts))
    column = 1
    for (codes, latents), count in zip(sources, counts, strict=True):
        # One program at least, which adds up the weights.
        grid = ceil(max(1, count) / MIXED.value), batch * row_tiles, splits
        _mix_kernel[grid](
            *(weights, weights.stride(0), weights.stride(1), *in_words(codes)),
            *(latents.fields, latents.centres, latents.last, count, column),
            *(parts, parts.shape[-1], n, rows, per_split),
            *(row_tiles, row_size, latents.depth, dtype),
            **MIXTURES,
        )
        column += count
    return parts[0] if splits == 1 else parts.sum(dim=0)


@on_device
def project(
    matrix: Tensor,
    codes: Tensor,
    latents: Latents,
    out: Tensor,
    dtype: tl.dtype = tl.float32,
) -> None:
    """Add projected latents to `out`.

    Parameters
    ----------
    matrix : Tensor
        (p, r), float32.
    codes, latents
        Packed latents, as in `scores`, and tables of the site.
    out : Tensor
        (B, p, n), float32.
    dtype
        As in `scores`.
    """
    batch, rows, n = out.shape
    latents.check(codes, batch, n)
    check_shape("matrix", matrix.shape, rows, len(latents.centres))
    if not len(latents.centres):
        return
    row_tiles, row_size = _row_tiles(rows)
    words = in_words(codes)
    _project_kernel[ceil((n + words.before) / TOKENS.value), batch * row_tiles](
        *(matrix.contiguous(), *words),
        *(latents.fields, latents.centres, latents.last, len(latents.centres)),
        *(out, out.stride(0), out.stride(1), n, rows),
        *(row_tiles, row_size, latents.depth, dtype),
        num_warps=8,
    )


@triton.jit(do_not_specialize=["n", "before"])
def _scores_kernel(
    queries, partner, sign, out, scaling, n, rows, rows_per_head, head_dim,
    codes, code_first, code_batch, code_row, scales, scale_first, scale_batch, before,
    cos, cos_first, cos_batch, cos_stride, cos_feature,
    sin, sin_first, sin_batch, sin_stride, sin_feature, cosines, sines,
    inputs, input_first, input_batch, input_stride, prediction, p,
    tiles, columns, features, up, mean, count, fields, centres, last,
    row_tiles: tl.constexpr, row_size: tl.constexpr, depth: tl.constexpr, align: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Score a tile of tokens with every `splits`-th tile of features."""
    sequence = (tl.program_id(1) // row_tiles).to(tl.int64)
    split, splits = tl.program_id(2), tl.num_programs(2)
    slot = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    word = tl.program_id(0) * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
    row = tl.program_id(1) % row_tiles * row_size + tl.arange(0, row_size)
    words, chunk = (n + before + 3) // 4, tl.arange(0, LATENTS)
    token, valid = slot - before, (slot >= before) & (slot < n + before)
    near = slot < 4 * words if align == 4 else valid
    codes += sequence * code_batch + code_first
    scales += sequence * scale_batch + scale_first
    inputs += sequence * input_batch + input_first * align
    cos += sequence * cos_batch + cos_first * align
    sin += sequence * sin_batch + sin_first * align
    query = (sequence * rows + row[:, None]) * head_dim
    scale = scales_of(scales + slot, valid, depth)
    total = tl.full((row_size, TOKENS), 0.0, tl.float32)
    for tile in range(split, count, splits):
        member = tile * FEATURES + tl.arange(0, FEATURES)
        start, width = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
        matrix = up + tl.load(tiles + 3 * tile + 2) + tl.arange(0, FEATURES)[:, None] * width
        k = tl.full((FEATURES, TOKENS), 0.0, tl.float32)
        for first in range(0, width, LATENTS):
            column = first + chunk
            inside = column < width
            latent = tl.load(columns + start + column, mask=inside, other=0)
            z = unpack(
                codes, code_row, word, word < words, fields, centres, last, latent, inside,
                depth, dtype,
            )  # fmt: skip
            u = tl.load(matrix + column[None, :], mask=inside[None, :], other=0.0)
            k = tl.dot(u.to(dtype), z, k, input_precision=PRECISION)
        if width > 0:  # scales of sites without latents are not numbers
            k *= scale[None, :]
        k += tl.load(mean + member)[:, None]
        for first in range(0, p, LATENTS):
            column = first + chunk
            inside = column < p
            address = inputs + column[:, None] * input_stride + slot[None, :]
            z = tl.load(address, mask=inside[:, None] & near[None, :], other=0.0).to(dtype)
            address = prediction + member[:, None] * p + column[None, :]
            u = tl.load(address, mask=inside[None, :], other=0.0)
            k = tl.dot(u.to(dtype), z, k, input_precision=PRECISION)
        feature = tl.load(features + member)
        at = feature % head_dim
        angle = tl.load(cosines + at, mask=feature >= 0, other=-1)[:, None]
        address = cos + angle * cos_feature + slot[None, :] * cos_stride
        c = tl.load(address, mask=(angle >= 0) & near[None, :], other=1.0).to(tl.float32)
        angle = tl.load(sines + at, mask=feature >= 0, other=-1)[:, None]
        address = sin + angle * sin_feature + slot[None, :] * sin_stride
        s = tl.load(address, mask=(angle >= 0) & near[None, :], other=0.0).to(tl.float32)
        own = (row // rows_per_head)[:, None] == (feature // head_dim)[None, :]
        own &= (row < rows)[:, None] & (feature >= 0)[None, :]
        q = tl.load(queries + query + at[None, :], mask=own, other=0.0)
        total = tl.dot(q.to(dtype), (k * c).to(dtype), total, input_precision=PRECISION)
        # Sines multiply the partners' queries, not keys.
        other = tl.load(partner + at)
        q = tl.load(queries + query + other[None, :], mask=own, other=0.0).to(tl.float32)
        q *= tl.load(sign + at)[None, :]
        total = tl.dot(q.to(dtype), (k * s).to(dtype), total, input_precision=PRECISION)
    part = split * (tl.num_programs(1) // row_tiles).to(tl.int64) + sequence
    address = out + (part * rows + row[:, None]) * n + token[None, :]
    tl.store(address, total * scaling, mask=(row < rows)[:, None] & valid[None, :])


@triton.jit(do_not_specialize=["n", "before"])
def _mix_kernel(
    weights, weight_batch, weight_stride,
    codes, code_first, code_batch, code_row, scales, scale_first, scale_batch, before,
    fields, centres, last, r, first_column, out, columns, n, rows, per_split,
    row_tiles: tl.constexpr, row_size: tl.constexpr, depth: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Sum a tile of latents over the tokens of a part."""
    sequence = (tl.program_id(1) // row_tiles).to(tl.int64)
    row = tl.program_id(1) % row_tiles * row_size + tl.arange(0, row_size)
    latent = tl.program_id(0) * MIXED + tl.arange(0, MIXED)
    chosen, held = latent < r, (row < rows)[:, None]
    weights += sequence * weight_batch
    codes += sequence * code_batch + code_first
    scales += sequence * scale_batch + scale_first
    total = tl.full((row_size, MIXED), 0.0, tl.float32)
    of_weights = tl.full((row_size,), 0.0, tl.float32)
    for tile in range(tl.program_id(2) * per_split, (tl.program_id(2) + 1) * per_split):
        slot = tile * MIXED_TOKENS + tl.arange(0, MIXED_TOKENS)
        word = tile * (MIXED_TOKENS // 4) + tl.arange(0, MIXED_TOKENS // 4)
        token, near = slot - before, word < (n + before + 3) // 4
        valid = (token >= 0) & (token < n)
        scale = scales_of(scales + slot, valid, depth)
        address = weights + row[:, None] * weight_stride + token[None, :]
        w = tl.load(address, mask=held & valid[None, :], other=0.0)
        of_weights += tl.sum(w, axis=1)
        w *= scale[None, :]
        z = unpack(codes, code_row, word, near, fields, centres, last, latent, chosen, depth, dtype)
        total = tl.dot(w.to(dtype), tl.trans(z), total, input_precision=PRECISION)
    part = tl.program_id(2) * (tl.num_programs(1) // row_tiles).to(tl.int64) + sequence
    address = out + (part * rows + row) * columns
    where = address[:, None] + first_column + latent[None, :]
    tl.store(where, total, mask=held & chosen[None, :])
    if (first_column == 1) & (tl.program_id(0) == 0):
        tl.store(address, of_weights, mask=row < rows)


@triton.jit(do_not_specialize=["n", "before"])
def _project_kernel(
    matrix, codes, code_first, code_batch, code_row, scales, scale_first, scale_batch, before,
    fields, centres, last, r, out, out_batch, out_stride, n, rows,
    row_tiles: tl.constexpr, row_size: tl.constexpr, depth: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Project a tile of tokens."""
    sequence = (tl.program_id(1) // row_tiles).to(tl.int64)
    slot = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    word = tl.program_id(0) * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
    row = tl.program_id(1) % row_tiles * row_size + tl.arange(0, row_size)
    token, near, held = slot - before, word < (n + before + 3) // 4, (row < rows)[:, None]
    valid = (token >= 0) & (token < n)
    codes += sequence * code_batch + code_first
    scales += sequence * scale_batch + scale_first
    total = tl.full((row_size, TOKENS), 0.0, tl.float32)
    for first in range(0, r, LATENTS):
        latent = first + tl.arange(0, LATENTS)
        chosen = latent < r
        z = unpack(codes, code_row, word, near, fields, centres, last, latent, chosen, depth, dtype)
        address = matrix + row[:, None] * r + latent[None, :]
        q = tl.load(address, mask=held & chosen[None, :], other=0.0)
        total = tl.dot(q.to(dtype), z, total, input_precision=PRECISION)
    scale = scales_of(scales + slot, valid, depth)
    address = out + sequence * out_batch + row[:, None] * out_stride + token[None, :]
    mask = held & valid[None, :]
    old = tl.load(address, mask=mask, other=0.0)
    tl.store(address, old + total * scale[None, :], mask=mask)
