"""Tensors as compiled kernels take them."""

from __future__ import annotations

from torch import Tensor

from manifoldkv.kernels.tables import Array


def flat_view(x: Tensor) -> tuple[Array, int, int]:
    """Return the elements of x (1 or B, rows, n) in one run, and its strides by batch and row.

    Memory is shared if tokens, the n, are last in it. The stride of a batch of 1 is 0.
    """
    batches, rows, tokens = x.shape
    if not x.numel():
        return x.flatten().numpy(), 0, 0
    batch_stride, row_stride, token_stride = x.stride()
    if token_stride != 1 and tokens > 1:
        return flat_view(x.contiguous())
    size = (batches - 1) * batch_stride + (rows - 1) * row_stride + tokens
    return x.as_strided((size,), (1,)).numpy(), batch_stride if batches > 1 else 0, row_stride
