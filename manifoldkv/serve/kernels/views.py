"""Tensors as compiled kernels take them: arrays in one run of memory, and their strides."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

Array = np.ndarray[Any, Any]
View = tuple[Array, int, int]
"""Elements of a tensor (1 or B, rows, n), and its strides by batch and row."""


def flat_view(x: Tensor) -> View:
    """Return a view of x (1 or B, rows, n), with tokens, the n, last in memory.

    Memory is shared if they are. The stride of a batch of 1 is 0.
    """
    batches, rows, tokens = x.shape
    if not x.numel():
        return x.flatten().numpy(), 0, 0
    batch_stride, row_stride, token_stride = x.stride()
    if token_stride != 1 and tokens > 1:
        return flat_view(x.contiguous())
    size = (batches - 1) * batch_stride + (rows - 1) * row_stride + tokens
    return x.as_strided((size,), (1,)).numpy(), batch_stride if batches > 1 else 0, row_stride


class Packed(NamedTuple):
    """Packed latents of some tokens.

    Parameters
    ----------
    codes : View
        Bits of latents and scales, (B, bytes, n), uint8.
    scales : View
        The last bytes of tokens, which have their scales, (B, 1, n), uint8.
    tokens : int
        Number of tokens, n.
    """

    codes: View
    scales: View
    tokens: int

    @classmethod
    def of(cls, codes: Tensor) -> Packed:
        """Return packed latents with codes (B, bytes, n), uint8."""
        return cls.of_view(flat_view(codes), *codes.shape[1:])

    @classmethod
    def of_view(cls, codes: View, size: int, tokens: int) -> Packed:
        """Return packed latents, of each token `size` bytes."""
        flat, batch_stride, row_stride = codes
        return cls(codes, (flat[(size - 1) * row_stride :], batch_stride, row_stride), tokens)
