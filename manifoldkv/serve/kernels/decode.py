"""Decoding from packed latents: scores of keys, mixtures, products and values of latents.

The kernels are Numba's, which is imported at the first use. They take CPU tensors and record no
gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from threading import local
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from manifoldkv.core.errors import CacheError
from manifoldkv.core.threads import run_in_parts
from manifoldkv.serve.kernels.tables import KeyTables, LatentTables
from manifoldkv.serve.kernels.views import Array, Packed, check_shape, flat_view

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


GPUS = ("cuda",)
"""Types of devices for which there are Triton kernels."""


def runs_triton(device: torch.device) -> bool:
    """Return whether Triton kernels run on a device: on a GPU, if Triton is installed."""
    return device.type in GPUS and _has_triton()


@cache
def _has_triton() -> bool:
    if find_spec("triton") is None:
        logger.warning("triton is not installed: decoding uses slower torch operations")
        return False
    return True


@cache
def kernels() -> ModuleType:
    logger.info("loading the decode kernels, which are compiled once per machine, in about 10 s")
    from manifoldkv.serve.kernels.numba import products as cpu

    return cpu


def scores(
    queries: Tensor,
    packed: Packed,
    tables: KeyTables,
    cos: Tensor,
    sin: Tensor,
    predicted: Tensor | None,
    out: Tensor,
) -> None:
    """Write the scores of packed keys to `out`.

    Parameters
    ----------
    queries : Tensor
        Scaled and rotated queries, (B, H_kv, R, d), float32.
    packed : Packed
        Latents of n tokens.
    tables : KeyTables
        Of the keys.
    cos, sin : Tensor
        Angles of the tokens, (1 or B, n, rotary dimension), float32; fastest with tokens last in
        memory.
    predicted : Tensor or None
        Factor of the predictor's matrix, (B, p, n), float32.
    out : Tensor
        (B, H_kv · R, n), float32, with tokens last in memory.
    """
    _check_tokens_last(out)
    check_shape("queries", queries.shape[1::2], *tables.order.shape)
    packed.check(len(queries), tables.latents.nbytes)
    check_angles(cos, sin, tables, packed.batch, packed.tokens)
    rows, size = queries.shape[1:3].numel(), queries.shape[1:].numel()
    inputs = tables.predictor.shape[1]
    if predicted is not None or inputs:
        found = () if predicted is None else predicted.shape
        check_shape("inputs of predictors", found, packed.batch, inputs, packed.tokens)
    check_shape("scores", out.shape, packed.batch, rows, packed.tokens)
    out.zero_()
    absent = np.empty(0, np.float32), 0, 0  # of which no row is read
    views = flat_view(cos.mT), flat_view(sin.mT), flat_view(out)
    numbers = np.arange(max(len(tables.mean), rows))
    arguments = (
        queries.contiguous().numpy(),
        (*packed[:2], *tables.latents.arrays),
        tables.arrays,
        absent if predicted is None else flat_view(predicted),
        *views[:2],
        numbers,
    )
    kernel = kernels().scores

    def add(first: int, stop: int) -> None:
        kernel(*arguments, held_scratch(tables.scratch_rows, size), views[2], first, stop)

    in_parts(packed.tokens, add, packed.tokens)


def mix(
    weights: Tensor,
    packed: Packed,
    tables: LatentTables,
    out: Tensor,
    column: int = 0,
) -> None:
    """Add latents that are mixed by weights to some columns.

    Parameters
    ----------
    weights : Tensor
        Of every token and row, (B, rows, n), float32.
    packed : Packed
        Latents of n tokens.
    tables : LatentTables
        Of the r latents.
    out : Tensor
        (B, rows, columns), float32, contiguous.
    column : int
        First of r columns.
    """
    batch, rows, columns = out.shape
    check_shape("weights", weights.shape, batch, rows, packed.tokens)
    packed.check(batch, tables.nbytes)
    if not 0 <= column <= columns - len(tables.fields):
        raise CacheError(
            f"mixtures have {columns} columns, too few for {len(tables.fields)} from {column} on"
        )
    kernel, scratch = kernels().mix, rows + 5
    arguments = flat_view(weights), (*packed[:2], *tables.arrays)
    parts: list[Tensor] = []

    def add(first: int, stop: int) -> None:
        part = out if first == 0 else torch.zeros_like(out)
        kernel(*arguments, held_scratch(scratch), part.numpy(), column, first, stop)
        if first:
            parts.append(part)

    in_parts(packed.tokens, add, packed.tokens)
    for part in parts:
        out += part


def project(packed: Packed, tables: LatentTables, matrix: Tensor, out: Tensor) -> None:
    """Add the products of a matrix and the latents of every token to `out`.

    Parameters
    ----------
    packed : Packed
        Latents of n tokens.
    tables : LatentTables
        Of the r latents.
    matrix : Tensor
        (p, r), float32.
    out : Tensor
        (B, p, n), float32.
    """
    _check_tokens_last(out)
    packed.check(len(out), tables.nbytes)
    check_shape("matrix", matrix.shape, out.shape[1], len(tables.fields))
    check_shape("products", out.shape, len(out), len(matrix), packed.tokens)
    kernel = kernels().project
    arguments = (*packed[:2], *tables.arrays), matrix.contiguous().numpy(), np.arange(len(matrix))

    def add(first: int, stop: int) -> None:
        kernel(
            *arguments, held_scratch(len(tables.fields) + 1), flat_view(out), len(out), first, stop
        )

    in_parts(packed.tokens, add, packed.tokens)


def unpack(packed: Packed, tables: LatentTables, factors: Tensor, out: Tensor) -> None:
    """Write the latents of every token, times their factors, to `out`.

    Parameters
    ----------
    packed : Packed
        Latents of n tokens.
    tables : LatentTables
        Of the r latents.
    factors : Tensor
        (r,), float32.
    out : Tensor
        (B, r or more, n), float32. Rows after the first r do not change.
    """
    _check_tokens_last(out)
    packed.check(len(out), tables.nbytes)
    check_shape("factors", factors.shape, len(tables.fields))
    check_shape("latents", out.shape, len(out), max(out.shape[1], len(factors)), packed.tokens)
    kernel = kernels().unpack
    arguments = (*packed[:2], *tables.arrays), factors.numpy()

    def write(first: int, stop: int) -> None:
        scratch = held_scratch(len(factors) + 1)
        kernel(*arguments, scratch, flat_view(out), len(out), first, stop)

    in_parts(packed.tokens, write, packed.tokens)


def check_angles(cos: Tensor, sin: Tensor, tables: KeyTables, batch: int, tokens: int) -> None:
    """Raise `CacheError` unless angles (1 or `batch`, at least `tokens`, angles) fit keys."""
    rows, count, angles = cos.shape
    if sin.shape != cos.shape or rows not in (1, batch) or count < tokens or angles < tables.angles:
        raise CacheError(
            f"angles are {tuple(cos.shape)} and {tuple(sin.shape)}, where a kernel takes "
            f"(1 or {batch}, {tokens}, {tables.angles})"
        )


def _check_tokens_last(out: Tensor) -> None:
    if out.stride(2) != 1 and out.shape[2] > 1:
        raise ValueError(f"out must have tokens last in memory, its strides are {out.stride()}")


_HELD = local()


def held_scratch(rows: int, more: int = 0) -> tuple[Array, Array]:
    """Return numbers, as rows of a tile of tokens and some more, and a row of integers.

    There may be more numbers. All calls of a thread return the same memory, since the first use of
    new memory takes as long as a kernel on few tokens.
    """
    tile = kernels().TILE
    size = rows * tile + more
    held: tuple[Array, Array] | None = getattr(_HELD, "scratch", None)
    if held is None or len(held[0]) < size:
        held = _HELD.scratch = np.empty(size, np.float32), np.empty(tile, np.uint8)
    return held


def in_parts(count: int, kernel: Callable[[int, int], None], tokens: int) -> None:
    """Run a kernel over tokens, or tiles of some tokens, in parts on torch's number of threads."""
    run_in_parts(count, kernel, tokens // TOKENS_PER_THREAD)
