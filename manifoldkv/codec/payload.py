"""What stands in a block of a stored cache: token ids, exact tokens, and symbols by layer."""

from __future__ import annotations

import struct
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manifoldkv.codec.blob import Block
from manifoldkv.errors import CacheError

LENGTHS = struct.Struct("<II")
"""Two numbers: whether there are token ids, or how many words of symbols and beside them."""


def exact_bytes(x: Tensor) -> bytes:
    """Return the bytes of sink tokens, which are stored uncompressed.

    Raises
    ------
    CacheError
        If an element is not finite.
    """
    if not bool(x.isfinite().all()):
        raise CacheError("the first tokens of the cache hold keys or values that are not finite")
    return x.contiguous().view(torch.uint8).numpy().tobytes() if x.numel() else b""


class PayloadReader:
    """Reads the payload of a block from its beginning on.

    Parameters
    ----------
    block : Block
        With the payload.
    sequences : int
        Of the blob.
    exact : int
        Number of uncompressed tokens in the block.
    least : int
        To how many bytes the payload is padded.

    Raises
    ------
    CacheError
        From here and from all methods, if the payload ends too early.
    """

    def __init__(
        self,
        block: Block,
        sequences: int,
        exact: int,
        least: int,
    ) -> None:
        self.start, self.stop, self.exact = block.start, block.stop, exact
        self._view, self._place = memoryview(block.payload), 0
        self._least = least
        with_ids, _ = LENGTHS.unpack(self._take(LENGTHS.size))
        self.ids: Tensor | None = None
        """(B, m), int64, if there are some."""
        if with_ids:
            shape = (sequences, block.stop - block.start)
            ids = np.frombuffer(self._take(4 * prod(shape)), dtype="<u4").astype(np.int64)
            self.ids = torch.from_numpy(ids.reshape(shape))

    def raw(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return uncompressed elements."""
        content = bytearray(self._take(prod(shape) * dtype.itemsize))
        if not content:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(content, dtype=dtype).view(shape)

    def stream(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Return the words of a site, and how far symbols are past their tables."""
        words, past = LENGTHS.unpack(self._take(LENGTHS.size))
        first, second = (
            np.frombuffer(self._take(4 * count), dtype="<u4").astype(np.uint32)
            for count in (words, past)
        )
        return first, second

    def end(self) -> None:
        """Refuse what follows the last stream, but for zeros up to the least size."""
        rest = bytes(self._view[self._place :])
        if rest.strip(b"\0") or (rest and len(self._view) != self._least):
            raise CacheError(f"the block at token {self.start} of the stored cache is damaged")

    def _take(self, size: int) -> memoryview:
        taken = self._view[self._place : self._place + size]
        if len(taken) != size:
            raise CacheError(f"the block at token {self.start} of the stored cache is damaged")
        self._place += size
        return taken
