"""Payload of a block of a stored cache: token ids, uncompressed tokens, and coded symbols."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from manifoldkv.core.errors import CacheError, CodecError
from manifoldkv.serve.codec.blob import Block
from manifoldkv.serve.kernels.views import Array

LENGTHS = struct.Struct("<II")
"""Two numbers: a flag for token ids and 0, or the numbers of words and of distances of symbols."""


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


def write_payload(ids: Tensor | None, exact: Sequence[bytes], coded: Sequence[Array]) -> bytes:
    """Return the payload of token ids, sink tokens by site, and coded symbols."""
    parts = [LENGTHS.pack(ids is not None, 0)]
    if ids is not None:
        parts.append(ids.cpu().numpy().astype("<u4").tobytes())
    states, words, past = coded
    lengths = LENGTHS.pack(len(words), len(past))
    numbers = states.astype("<u4"), words.astype("<u2"), past.astype("<u4")
    return b"".join([*parts, *exact, lengths, *(part.tobytes() for part in numbers)])


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
    CodecError
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
            ids = self._numbers(prod(shape), "<u4").astype(np.int64)
            self.ids = torch.from_numpy(ids.reshape(shape))

    def raw(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return uncompressed elements of a shape."""
        content = bytearray(self._take(prod(shape) * dtype.itemsize))
        if not content:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(content, dtype=dtype).view(shape)

    def coded(self, tokens: int) -> tuple[Array, Array, Array]:
        """Return states, words and distances of the symbols of a number of tokens."""
        words, past = LENGTHS.unpack(self._take(LENGTHS.size))
        states = self._numbers(tokens, "<u4").astype(np.uint32)
        of_words = self._numbers(words, "<u2").astype(np.uint16)
        return states, of_words, self._numbers(past, "<u4").astype(np.uint32)

    def end(self) -> None:
        """Refuse bytes after the symbols other than padding with zeros."""
        rest = bytes(self._view[self._offset :])
        if rest.strip(b"\0") or (rest and len(self._view) != self._least):
            raise self._damaged()

    def _numbers(self, count: int, dtype: str) -> Array:
        return np.frombuffer(self._take(np.dtype(dtype).itemsize * count), dtype=dtype)

    def _take(self, size: int) -> memoryview:
        content = self._view[self._offset : self._offset + size]
        if len(content) != size:
            raise self._damaged()
        self._offset += size
        return content

    def _damaged(self) -> CodecError:
        return CodecError(f"the block at token {self.start} of the stored cache is damaged")
