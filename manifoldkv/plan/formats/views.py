"""Tensors as compiled kernels take them: arrays in one run of memory, and their strides."""

from __future__ import annotations

from typing import Any

import numpy as np

from manifoldkv.core.errors import CacheError

Array = np.ndarray[Any, Any]
View = tuple[Array, int, int]
"""Elements of a tensor (1 or B, rows, n), and its strides by batch and row."""


def check_shape(name: str, found: tuple[int, ...], *expected: int) -> None:
    """Raise `CacheError` unless the shape of an operand of a kernel is the expected one."""
    if found != expected:
        raise CacheError(f"{name} of a kernel are {tuple(found)}, must be {expected}")


def check_view(name: str, view: View, batch: int, rows: int, tokens: int) -> None:
    """Raise `CacheError` unless a view has the elements of a tensor (batch, rows, tokens)."""
    flat, batch_stride, row_stride = view
    size = (batch - 1) * batch_stride + (rows - 1) * row_stride + tokens
    if batch and rows and tokens and (size > len(flat) or (batch > 1 and not batch_stride)):
        raise CacheError(
            f"{name} of a kernel have {len(flat)} elements with strides {view[1:]}, too few for "
            f"{(batch, rows, tokens)}"
        )
