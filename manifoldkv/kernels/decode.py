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
from functools import cache, partial
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

from manifoldkv.kernels.tables import KeyTables, LatentTables

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
    predicted = queries.new_empty(1, 0, 0) if predicted is None else predicted
    packed = codes.numpy(), scales.float().numpy(), *tables.latents.arrays
    angles = cos.mT.numpy(), sin.mT.numpy()
    arguments = *packed, *tables.arrays, predicted.numpy(), *angles, out.numpy()
    _in_parts(codes.shape[2], partial(_kernels().scores, queries.numpy(), *arguments))
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
    shape = len(weights), weights.shape[1], len(tables.fields)
    arguments = codes.numpy(), scales.float().numpy(), *tables.arrays
    kernel, rows = _kernels().mix, weights.contiguous().numpy()
    parts: list[Tensor] = []

    def mixed(first: int, stop: int) -> None:
        part = weights.new_zeros(shape)
        kernel(rows, *arguments, part.numpy(), first, stop)
        parts.append(part)

    _in_parts(codes.shape[2], mixed)
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
    arguments = codes.numpy(), scales.float().numpy(), *tables.arrays
    product = partial(_kernels().project, *arguments, matrix.contiguous().numpy(), out.numpy())
    _in_parts(codes.shape[2], product)


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
