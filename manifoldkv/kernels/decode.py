"""Decoding from packed latents: scores of keys, mixtures and products of latents.

The kernels are Numba's, which is imported at the first use. They take CPU tensors and record no
gradients. Arguments that are common to all:

codes : Tensor
    Packed integers, (B, bytes, n), uint8; a view is not copied.
scales : Tensor
    Scales of the tokens, (B, n), float16.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from manifoldkv.kernels.tables import Array, KeyTables, LatentTables

logger = logging.getLogger(__name__)

TOKENS_PER_THREAD = 1024
"""Fewest tokens that a further thread is worth."""


@cache
def is_available() -> bool:
    """Return whether the kernels can run: Numba is installed."""
    if find_spec("numba") is None:
        logger.warning("numba is not installed: decoding uses slower torch operations")
        return False
    return True


@cache
def _kernels() -> ModuleType:
    logger.info("loading the decode kernels, which are compiled once per machine, in about 10 s")
    from manifoldkv.kernels import cpu

    return cpu


def scores(
    queries: Tensor,
    codes: Tensor,
    scales: Tensor,
    tables: KeyTables,
    cos: Tensor,
    sin: Tensor,
    predicted: Tensor | None = None,
) -> Tensor:
    """Return the scores of packed keys, (B, H_kv, R, n), float32.

    Parameters
    ----------
    queries : Tensor
        Scaled and rotated queries, (B, H_kv, R, d), float32.
    tables : KeyTables
        Of the keys.
    cos, sin : Tensor
        Angles of the tokens, (1 or B, n, rotary dimension), float32; fastest with tokens last in
        memory.
    predicted : Tensor or None
        Factor of the predictor's matrix, (B, p, n), float32.
    """
    order = tables.order.unsqueeze(1)  # (H_kv, 1, d)
    queries = queries.gather(3, order.expand(queries.shape))
    out = queries.new_zeros(*queries.shape[:3], codes.shape[2])
    predicted = queries[..., 0] if predicted is None else predicted  # of which no row is read
    views = _view(predicted), _view(cos.mT), _view(sin.mT)
    numbers = np.arange(max(len(tables.mean), queries.shape[2]))
    packed, kernel = _packed(codes, scales, tables.latents), _kernels().scores
    arguments = queries.numpy(), packed, tables.arrays, *views, numbers

    def add(first: int, stop: int) -> None:
        kernel(*arguments, _scratch(tables.scratch_rows), out.numpy(), first, stop)

    _in_parts(codes.shape[2], add)
    return out


def mix(weights: Tensor, codes: Tensor, scales: Tensor, tables: LatentTables) -> Tensor:
    """Return latents mixed by weights, (B, rows, r), float32.

    Parameters
    ----------
    weights : Tensor
        Of every token and row, (B, rows, n), float32.
    tables : LatentTables
        Of the r latents.
    """
    shape = *weights.shape[:2], len(tables.fields)
    arguments = _view(weights), _packed(codes, scales, tables)
    kernel, parts = _kernels().mix, []

    def add(first: int, stop: int) -> None:
        part = weights.new_zeros(shape)
        kernel(*arguments, _scratch(shape[1] + 4), part.numpy(), first, stop)
        parts.append(part)

    _in_parts(codes.shape[2], add)
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(dim=0)


def project(
    codes: Tensor, scales: Tensor, tables: LatentTables, matrix: Tensor, out: Tensor
) -> None:
    """Add the products of a matrix and the latents of every token to `out`.

    Parameters
    ----------
    tables : LatentTables
        Of the r latents.
    matrix : Tensor
        (p, r), float32.
    out : Tensor
        (B, p, n), float32.
    """
    if out.stride(2) != 1:
        raise ValueError(f"out must have tokens last in memory, its strides are {out.stride()}")
    packed, kernel = _packed(codes, scales, tables), _kernels().project
    arguments = packed, matrix.contiguous().numpy(), np.arange(len(matrix))

    def add(first: int, stop: int) -> None:
        kernel(*arguments, _scratch(len(tables.fields)), _view(out), len(out), first, stop)

    _in_parts(codes.shape[2], add)


def _scratch(rows: int) -> tuple[Array, Array]:
    """Return rows of numbers and a row of integers for a tile of tokens."""
    tile = _kernels().TILE
    return np.empty(rows * tile, np.float32), np.empty(tile, np.uint8)


def _view(x: Tensor) -> tuple[Array, int, int]:
    """Return the elements of x (1 or B, rows, n) in one run, and its strides by batch and row."""
    if not x.numel():
        return x.flatten().numpy(), 0, 0
    if x.stride(2) != 1:
        x = x.contiguous()
    batches, rows, tokens = x.shape
    batch_stride, row_stride, _ = x.stride()
    size = (batches - 1) * batch_stride + (rows - 1) * row_stride + tokens
    return x.as_strided((size,), (1,)).numpy(), batch_stride if batches > 1 else 0, row_stride


def _packed(codes: Tensor, scales: Tensor, tables: LatentTables) -> tuple[object, ...]:
    return _view(codes), _view(scales.float().unsqueeze(1)), *tables.arrays


def _in_parts(tokens: int, kernel: Callable[[int, int], None]) -> None:
    """Run a kernel over all tokens, in parts on torch's number of threads."""
    threads = max(1, min(torch.get_num_threads(), tokens // TOKENS_PER_THREAD))
    if threads == 1:
        kernel(0, tokens)
        return
    bounds = [tokens * part // threads for part in range(threads + 1)]
    others = [
        _pool(threads - 1).submit(kernel, first, stop) for first, stop in pairwise(bounds[1:])
    ]
    kernel(0, bounds[1])
    for other in others:
        other.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="manifoldkv")
