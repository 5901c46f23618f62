"""Products of a decode step with packed latents, for GPUs, in Triton.

Nothing imports this file before a CUDA device is used: it alone needs Triton. Tensors of tokens
have them last, with stride 1. A program has a tile of tokens or latents and a part of the sum;
the parts are added at the end. Products are of latents before their scales, which multiply the
results. Operands of tensor cores are float32 or bfloat16; sums are float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import numpy as np
import torch
import triton
from scipy.sparse import block_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.nn import functional
from triton import language as tl

from manifoldkv.kernels.tables import LatentTables

TOKENS = tl.constexpr(64)  # of a tile
LATENTS = tl.constexpr(32)  # unpacked at a time
FEATURES = tl.constexpr(32)  # of a tile of keys
ROWS = 32  # of queries, weights or predictions of a program, at most
PROGRAMS = 512  # among which work is split: a few per multiprocessor
PRECISION = tl.constexpr("tf32x3")  # about that of float32, on tensor cores


@dataclass(frozen=True)
class Latents:
    """Tables of the stored latents of a site.

    Parameters
    ----------
    fields : Tensor
        Byte, right shift, mask and left shift of every bit field, (r, fields, 4), int32,
        contiguous. Missing fields have mask 0. Of trellis-coded latents three bytes, the right
        shift and the mask of a state, a multiplier and an offset (`coding.trellis.Code`), (r, 8).
    centres : Tensor
        Codes whose latent is 0, (r,), float32; of trellis-coded latents the units of their codes.
    depth : int
        Number of fields; 0 for trellis-coded latents.
    """

    fields: Tensor
    centres: Tensor
    depth: int


def tabulate_latents(tables: LatentTables, device: torch.device) -> Latents:
    """Return the tables of a site on a GPU."""
    fields, centres = tables.fields, tables.centres.to(device)
    if tables.is_trellis:
        flat = torch.cat([fields[:, 0], functional.pad(fields[:, 1, :3], (0, 1))], dim=1)
        unsigned = flat.numpy().astype(np.uint32)  # as multipliers and offsets are
        return Latents(torch.from_numpy(unsigned.view(np.int32)).to(device), centres, 0)
    depth = int((fields[..., 2] > 0).any(dim=0).sum())  # without fields that no latent has
    return Latents(fields[:, :depth].to(device, torch.int32).contiguous(), centres, depth)


@dataclass(frozen=True)
class Keys:
    """Tables of the keys of a layer, cut into tiles of features.

    Parameters
    ----------
    latents : Latents
        Stored latents.
    partner, sign : Tensor
        Partners of the features of a head, int64, and signs of the sines, (d,).
    cosines, sines : Tensor
        Angles that multiply the features of a head, (d,), int32; -1 if they are not rotated.
    tiles : Tensor
        First entry in `columns`, number of columns and first entry in `up` of every tile,
        (tiles, 3), int32.
    columns, features : Tensor
        Latents of the tiles, and features, (tiles, size), padded with -1, int32.
    up, mean, prediction : Tensor
        Rows of the features, (size, columns) for each tile, (tiles, size) and (tiles, size, p),
        float32.
    """

    latents: Latents
    partner: Tensor
    sign: Tensor
    cosines: Tensor
    sines: Tensor
    tiles: Tensor
    columns: Tensor
    features: Tensor
    up: Tensor
    mean: Tensor
    prediction: Tensor


def tabulate_keys(
    latents: Latents,
    up: Tensor,
    mean: Tensor,
    partner: Tensor,
    sign: Tensor,
    angle: Tensor,
    prediction: Tensor | None = None,
) -> Keys:
    """Return the tables of keys ``up z + mean + prediction p``.

    Parameters
    ----------
    latents : Latents
        The r stored latents.
    up : Tensor
        Up-projection times the factors of the latents, (D, r), float32. Blocks that share no
        latent are multiplied without the zeros between them.
    mean : Tensor
        (D,), float32.
    partner, sign, angle : Tensor
        Feature f of a head is rotated to ``x[f] cos[angle[f]] + sign[f] x[partner[f]]
        sin[angle[f]]``, (d,) each; partners are each other's, and features of sign 0 are not
        rotated.
    prediction : Tensor, optional
        (D, p), float32.
    """
    partner, sign = partner.to(up.device), sign.to(up)
    angle = angle.to(up.device, torch.int32).where(sign != 0, -1)
    parts = list(_tiles(up.ne(0).cpu(), FEATURES.value))
    features = torch.full((len(parts), FEATURES.value), -1, device=up.device)  # the zeros below
    for tile, (rows, _) in zip(features, parts, strict=True):
        tile[: len(rows)] = rows
    padded = functional.pad(up, (0, 0, 0, 1))
    blocks = [padded[row][:, c].flatten() for row, (_, c) in zip(features, parts, strict=True)]
    widths = torch.tensor([len(columns) for _, columns in parts])
    starts = widths.cumsum(0) - widths
    prediction = up[:, :0] if prediction is None else prediction
    return Keys(
        latents,
        partner,
        sign,
        angle,
        angle[partner],
        torch.stack([starts, widths, FEATURES.value * starts], dim=1).to(up.device, torch.int32),
        torch.cat([columns for _, columns in parts]).to(up.device, torch.int32),
        features.to(torch.int32),
        torch.cat(blocks),
        functional.pad(mean, (0, 1))[features],
        functional.pad(prediction, (0, 0, 0, 1))[features],
    )


def _tiles(pattern: Tensor, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows, at most `most`, and columns of blocks of a pattern (D, r); small ones share."""
    entries = pattern.int().numpy()
    graph = block_array([[None, entries], [entries.T, None]])
    labels = torch.from_numpy(connected_components(graph)[1])
    row_labels, column_labels = labels.split(pattern.shape)
    rows, columns = labels[:0].long(), labels[:0].long()
    for label in row_labels.unique():
        block = (column_labels == label).nonzero().flatten()
        for part in (row_labels == label).nonzero().flatten().split(most):
            if len(rows) + len(part) > most:
                yield rows, columns
                rows, columns = rows[:0], columns[:0]
            rows, columns = torch.cat([rows, part]), torch.cat([columns, block])
    yield rows, columns


def _row_tiles(rows: int) -> tuple[int, int]:
    """Return the number of tiles of rows and their size."""
    size = min(ROWS, max(16, triton.next_power_of_2(rows)))  # 16 for tensor cores
    return triton.cdiv(rows, size), size


def _splits(programs: int, most: int) -> int:
    """Return the number of parts of a sum, at most `most`, that fill a GPU."""
    return max(1, min(most, PROGRAMS // programs))


def scores(
    queries: Tensor,
    codes: Tensor,
    scales: Tensor,
    keys: Keys,
    cos: Tensor,
    sin: Tensor,
    predicted: Tensor | None = None,
    dtype: tl.dtype = tl.float32,
) -> Tensor:
    """Return the products of queries and rotated keys, (B, H_kv, R, n), float32.

    Parameters
    ----------
    queries : Tensor
        Scaled and rotated queries, (B, H_kv, R, d), float32.
    codes, scales : Tensor
        Packed latents, (B, 1, bytes, n), uint8, and codes of their scales, (B, 1, 1, n), uint8.
    keys : Keys
        Tables of the layer.
    cos, sin : Tensor
        Of the angles of the tokens, (1 or B, n, angles).
    predicted : Tensor, optional
        Inputs p of the predictor, (B, p, n), float32.
    dtype : tl.dtype
        Of the operands of tensor cores: ``tl.float32`` or ``tl.bfloat16``.
    """
    batch, heads, rows_per_head, head_dim = queries.shape
    n, rows = codes.shape[-1], heads * rows_per_head
    queries = queries.contiguous()
    turned = (queries * keys.sign)[..., keys.partner]  # sines multiply queries, not keys
    cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
    inputs = scales[:, 0] if predicted is None else predicted
    row_tiles, row_size = _row_tiles(rows)
    grid = triton.cdiv(n, TOKENS.value), batch * row_tiles
    splits = _splits(grid[0] * grid[1], len(keys.tiles))
    parts = queries.new_empty(splits, batch, heads, rows_per_head, n)
    _scores_kernel[(*grid, splits)](
        *(queries, turned, parts, n, rows, rows_per_head, head_dim),
        *(codes, codes.stride(0), codes.stride(2), scales, scales.stride(0)),
        *(cos, *cos.stride(), sin, *sin.stride(), keys.cosines, keys.sines),
        *(inputs, inputs.stride(0), inputs.stride(1), keys.prediction, keys.prediction.shape[-1]),
        *(keys.tiles, keys.columns, keys.features, keys.up, keys.mean, len(keys.tiles)),
        *(keys.latents.fields, keys.latents.centres),
        *(row_tiles, row_size, keys.latents.depth, dtype),
        num_warps=8,  # with 4, registers spill
    )
    return parts.sum(dim=0)


def mix(
    weights: Tensor,
    codes: Tensor,
    scales: Tensor,
    latents: Latents,
    dtype: tl.dtype = tl.float32,
) -> Tensor:
    """Return the sums of latents over tokens, times weights, (B, rows, r), float32.

    Parameters
    ----------
    weights : Tensor
        (B, rows, n), float32.
    codes, scales, latents
        Packed latents and scales, as in `scores`, and tables of the site.
    dtype
        As in `scores`.
    """
    batch, rows, n = weights.shape
    stored = len(latents.centres)
    row_tiles, row_size = _row_tiles(rows)
    grid = triton.cdiv(stored, LATENTS.value), batch * row_tiles
    tiles = triton.cdiv(n, TOKENS.value)
    per_split = ceil(tiles / _splits(grid[0] * grid[1], tiles))
    splits = ceil(tiles / per_split)
    parts = weights.new_empty(splits, batch, rows, stored)
    _mix_kernel[(*grid, splits)](
        *(weights, weights.stride(0), weights.stride(1)),
        *(codes, codes.stride(0), codes.stride(2), scales, scales.stride(0)),
        *(latents.fields, latents.centres, stored, parts, n, rows, per_split),
        *(row_tiles, row_size, latents.depth, dtype),
    )
    return parts.sum(dim=0)


def project(
    matrix: Tensor,
    codes: Tensor,
    scales: Tensor,
    latents: Latents,
    out: Tensor,
    dtype: tl.dtype = tl.float32,
) -> None:
    """Add projected latents to `out`.

    Parameters
    ----------
    matrix : Tensor
        (p, r), float32.
    codes, scales, latents
        Packed latents and scales, as in `scores`, and tables of the site.
    out : Tensor
        (B, p, n), float32.
    dtype
        As in `scores`.
    """
    batch, rows, n = out.shape
    row_tiles, row_size = _row_tiles(rows)
    _project_kernel[triton.cdiv(n, TOKENS.value), batch * row_tiles](
        matrix.contiguous(),
        *(codes, codes.stride(0), codes.stride(2), scales, scales.stride(0)),
        *(latents.fields, latents.centres, len(latents.centres)),
        *(out, out.stride(0), out.stride(1), n, rows),
        *(row_tiles, row_size, latents.depth, dtype),
    )


@triton.jit
def _codewords(codes, stride, token, valid, fields, units, latent, chosen):
    """Return the codewords of trellis-coded latents, (latents, tokens), as `unpack` does."""
    entry = fields + latent * 8
    there = chosen[:, None] & valid[None, :]
    stream = latent[:, None] * 0 + token[None, :] * 0
    for place in tl.static_range(3):
        byte = tl.load(entry + place, mask=chosen, other=0)
        packed = tl.load(codes + byte[:, None] * stride + token[None, :], mask=there, other=0)
        stream = stream << 8 | packed.to(tl.int32)
    right = tl.load(entry + 3, mask=chosen, other=0)
    mask = tl.load(entry + 4, mask=chosen, other=0)
    multiplier = tl.load(entry + 5, mask=chosen, other=0)
    offset = tl.load(entry + 6, mask=chosen, other=0)
    state = (stream >> right[:, None]) & mask[:, None]
    mixed = state * multiplier[:, None] + offset[:, None]
    halves = ((mixed << 16) >> 16) + (mixed >> 16)
    return halves.to(tl.float32) * tl.load(units + latent, mask=chosen, other=0.0)[:, None]


@triton.jit
def _integers(codes, stride, token, valid, fields, centres, latent, chosen, depth: tl.constexpr):
    """Return codes less centres, (latents, tokens), as `unpack` does."""
    centre = tl.load(centres + latent, mask=chosen, other=0.0)
    code = latent[:, None] * 0 + token[None, :] * 0
    for field in tl.static_range(depth):
        entry = fields + (latent * depth + field) * 4
        byte = tl.load(entry, mask=chosen, other=0)
        right = tl.load(entry + 1, mask=chosen, other=0)
        bits = tl.load(entry + 2, mask=chosen, other=0)
        left = tl.load(entry + 3, mask=chosen, other=0)
        address = codes + byte[:, None] * stride + token[None, :]
        packed = tl.load(address, mask=(bits[:, None] > 0) & valid[None, :], other=0).to(tl.int32)
        code += ((packed >> right[:, None]) & bits[:, None]) << left[:, None]
    return code.to(tl.float32) - centre[:, None]


@triton.jit
def unpack(codes, stride, token, valid, fields, centres, latent, chosen, depth: tl.constexpr):
    """Return latents before their scales, (latents, tokens); 0 for those that are not chosen."""
    if depth == 0:
        z = _codewords(codes, stride, token, valid, fields, centres, latent, chosen)
    else:
        z = _integers(codes, stride, token, valid, fields, centres, latent, chosen, depth)
    return z


@triton.jit
def scales_of(address, valid):
    """Return the scales of tokens, whose codes are the first bits of float16 behind its sign."""
    code = tl.load(address, mask=valid, other=0)
    return (code.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["n"])
def _scores_kernel(
    queries, turned, out, n, rows, rows_per_head, head_dim,
    codes, code_batch, code_stride, scales, scale_batch,
    cos, cos_batch, cos_stride, cos_feature, sin, sin_batch, sin_stride, sin_feature,
    cosines, sines, inputs, input_batch, input_stride, prediction, p,
    tiles, columns, features, up, mean, count, fields, centres,
    row_tiles: tl.constexpr, row_size: tl.constexpr, depth: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Score a tile of tokens with every `splits`-th tile of features."""
    sequence = (tl.program_id(1) // row_tiles).to(tl.int64)
    split, splits = tl.program_id(2), tl.num_programs(2)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) % row_tiles * row_size + tl.arange(0, row_size)
    valid, chunk = token < n, tl.arange(0, LATENTS)
    codes += sequence * code_batch
    inputs += sequence * input_batch
    cos, sin = cos + sequence * cos_batch, sin + sequence * sin_batch
    query = (sequence * rows + row[:, None]) * head_dim
    scale = scales_of(scales + sequence * scale_batch + token, valid)
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
            z = unpack(codes, code_stride, token, valid, fields, centres, latent, inside, depth)
            u = tl.load(matrix + column[None, :], mask=inside[None, :], other=0.0)
            k = tl.dot(u.to(dtype), z.to(dtype), k, input_precision=PRECISION)
        k = k * scale[None, :] + tl.load(mean + member)[:, None]
        for first in range(0, p, LATENTS):
            column = first + chunk
            inside = column < p
            address = inputs + column[:, None] * input_stride + token[None, :]
            z = tl.load(address, mask=inside[:, None] & valid[None, :], other=0.0).to(dtype)
            address = prediction + member[:, None] * p + column[None, :]
            u = tl.load(address, mask=inside[None, :], other=0.0)
            k = tl.dot(u.to(dtype), z, k, input_precision=PRECISION)
        feature = tl.load(features + member)
        at = feature % head_dim
        angle = tl.load(cosines + at, mask=feature >= 0, other=-1)[:, None]
        address = cos + angle * cos_feature + token[None, :] * cos_stride
        c = tl.load(address, mask=(angle >= 0) & valid[None, :], other=1.0).to(tl.float32)
        angle = tl.load(sines + at, mask=feature >= 0, other=-1)[:, None]
        address = sin + angle * sin_feature + token[None, :] * sin_stride
        s = tl.load(address, mask=(angle >= 0) & valid[None, :], other=0.0).to(tl.float32)
        own = (row // rows_per_head)[:, None] == (feature // head_dim)[None, :]
        own &= (row < rows)[:, None] & (feature >= 0)[None, :]
        q = tl.load(queries + query + at[None, :], mask=own, other=0.0)
        total = tl.dot(q.to(dtype), (k * c).to(dtype), total, input_precision=PRECISION)
        q = tl.load(turned + query + at[None, :], mask=own, other=0.0)
        total = tl.dot(q.to(dtype), (k * s).to(dtype), total, input_precision=PRECISION)
    part = split * (tl.num_programs(1) // row_tiles).to(tl.int64) + sequence
    address = out + (part * rows + row[:, None]) * n + token[None, :]
    tl.store(address, total, mask=(row < rows)[:, None] & valid[None, :])


@triton.jit(do_not_specialize=["n"])
def _mix_kernel(
    weights, weight_batch, weight_stride, codes, code_batch, code_stride, scales, scale_batch,
    fields, centres, r, out, n, rows, per_split,
    row_tiles: tl.constexpr, row_size: tl.constexpr, depth: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Sum a tile of latents over the tokens of a part."""
    sequence = (tl.program_id(1) // row_tiles).to(tl.int64)
    row = tl.program_id(1) % row_tiles * row_size + tl.arange(0, row_size)
    latent = tl.program_id(0) * LATENTS + tl.arange(0, LATENTS)
    chosen, held = latent < r, (row < rows)[:, None]
    weights += sequence * weight_batch
    codes += sequence * code_batch
    scales += sequence * scale_batch
    total = tl.full((row_size, LATENTS), 0.0, tl.float32)
    for tile in range(tl.program_id(2) * per_split, (tl.program_id(2) + 1) * per_split):
        token = tile * TOKENS + tl.arange(0, TOKENS)
        valid = token < n
        scale = scales_of(scales + token, valid)
        address = weights + row[:, None] * weight_stride + token[None, :]
        w = tl.load(address, mask=held & valid[None, :], other=0.0) * scale[None, :]
        z = unpack(codes, code_stride, token, valid, fields, centres, latent, chosen, depth)
        total = tl.dot(w.to(dtype), tl.trans(z).to(dtype), total, input_precision=PRECISION)
    part = tl.program_id(2) * (tl.num_programs(1) // row_tiles).to(tl.int64) + sequence
    address = out + (part * rows + row[:, None]) * r + latent[None, :]
    tl.store(address, total, mask=held & chosen[None, :])


@triton.jit(do_not_specialize=["n"])
def _project_kernel(
    matrix, codes, code_batch, code_stride, scales, scale_batch, fields, centres, r,
    out, out_batch, out_stride, n, rows,
    row_tiles: tl.constexpr, row_size: tl.constexpr, depth: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Project a tile of tokens."""
    sequence = (tl.program_id(1) // row_tiles).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) % row_tiles * row_size + tl.arange(0, row_size)
    valid, held = token < n, (row < rows)[:, None]
    codes += sequence * code_batch
    total = tl.full((row_size, TOKENS), 0.0, tl.float32)
    for first in range(0, r, LATENTS):
        latent = first + tl.arange(0, LATENTS)
        chosen = latent < r
        z = unpack(codes, code_stride, token, valid, fields, centres, latent, chosen, depth)
        address = matrix + row[:, None] * r + latent[None, :]
        q = tl.load(address, mask=held & chosen[None, :], other=0.0)
        total = tl.dot(q.to(dtype), z.to(dtype), total, input_precision=PRECISION)
    scale = scales_of(scales + sequence * scale_batch + token, valid)
    address = out + sequence * out_batch + row[:, None] * out_stride + token[None, :]
    mask = held & valid[None, :]
    old = tl.load(address, mask=mask, other=0.0)
    tl.store(address, old + total * scale[None, :], mask=mask)
