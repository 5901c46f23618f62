"""Tensors and packed latents as compiled kernels take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from manifoldkv.core.errors import CacheError
from manifoldkv.plan.formats.views import Array, View, check_shape, check_view

__all__ = ["Array", "Packed", "View", "check_shape", "check_view", "flat_view"]


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
    batch, size : int
        Number of sequences, B, and of bytes of a token.
    """

    codes: View
    scales: View
    tokens: int
    batch: int
    size: int

    @classmethod
    def of(cls, codes: Tensor) -> Packed:
        """Return packed latents with codes (B, bytes, n), uint8."""
        return cls.of_view(flat_view(codes), *codes.shape)

    @classmethod
    def of_view(cls, codes: View, batch: int, size: int, tokens: int) -> Packed:
        """Return packed latents (batch, size, tokens), whose last bytes are scales."""
        check_view("packed latents", codes, batch, size, tokens)
        flat, batch_stride, row_stride = codes
        scales = flat[(size - 1) * row_stride :], batch_stride, row_stride
        return cls(codes, scales, tokens, batch, size)

    def check(self, batch: int, size: int) -> None:
        """Raise `CacheError` unless the number of sequences fits, and their bytes suffice."""
        if self.batch != batch or self.size < size:
            raise CacheError(
                f"packed latents have {self.batch} rows of {self.size} bytes a token, where a "
                f"kernel takes {batch} of at least {size}"
            )
