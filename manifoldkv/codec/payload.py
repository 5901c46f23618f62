"""Payload of a block of a stored cache: token ids, uncompressed tokens, and symbols by layer."""

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
"""Two numbers: a flag for token ids and 0, or the numbers of words and of overflows of symbols."""


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
    """Sequential reader of the payload of a block.

    Parameters
    ----------
    block : Block
        Block of tokens with its payload.
    sequences : int
        Number of sequences of the blob.
    exact : int
        Number of uncompressed tokens in the block.
    least : int
        Size that the payload is padded to, in bytes.

    Raises
    ------
    CacheError
        If the payload ends too early, here and in all methods.
    """

    def __init__(
        self,
        block: Block,
        sequences: int,
        exact: int,
        least: int,
    ) -> None:
        self.start, self.stop, self.exact = block.start, block.stop, exact
        self._view, self._offset = memoryview(block.payload), 0
        self._least = least
        with_ids, _ = LENGTHS.unpack(self._take(LENGTHS.size))
        self.ids: Tensor | None = None
        """Token ids (B, m), int64, if the block has them."""
        if with_ids:
            shape = (sequences, block.stop - block.start)
            ids = np.frombuffer(self._take(4 * prod(shape)), dtype="<u4").astype(np.int64)
            self.ids = torch.from_numpy(ids.reshape(shape))

    def raw(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return uncompressed elements of a shape."""
        content = bytearray(self._take(prod(shape) * dtype.itemsize))
        if not content:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(content, dtype=dtype).view(shape)

    def stream(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Return the words of a site, and distances of symbols past the ends of their tables."""
        words, past = LENGTHS.unpack(self._take(LENGTHS.size))
        return self._numbers(words), self._numbers(past)

    def end(self) -> None:
        """Refuse bytes after the last stream other than padding with zeros."""
        rest = bytes(self._view[self._offset :])
        if rest.strip(b"\0") or (rest and len(self._view) != self._least):
            raise CacheError(f"the block at token {self.start} of the stored cache is damaged")

    def _numbers(self, count: int) -> NDArray[np.uint32]:
        return np.frombuffer(self._take(4 * count), dtype="<u4").astype(np.uint32)

    def _take(self, size: int) -> memoryview:
        content = self._view[self._offset : self._offset + size]
        if len(content) != size:
            raise CacheError(f"the block at token {self.start} of the stored cache is damaged")
        self._offset += size
        return content
