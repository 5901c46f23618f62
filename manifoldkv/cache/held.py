"""Bytes of the constants that a running model holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from torch import Tensor

from manifoldkv.cache.layers import CompressedCache

Range = tuple[str, int, int]
"""Device, and first and last (exclusive) address, of a run of memory."""


class NewCache(Protocol):
    """Function of a `compressed` block that makes caches."""

    def __call__(self, stock: object = None, position_ids: Tensor | None = None) -> CompressedCache:
        """Return a cache, empty or filled from a stock cache."""

    def constant_nbytes(self) -> int:
        """Return the bytes that attention holds beside the tokens of caches."""


def held_nbytes(root: object) -> int:
    """Return the bytes of all tensors and arrays that an object holds.

    Memory that several of them share is counted once.

    Parameters
    ----------
    root : object
        Of the tensors and arrays in its attributes, and in lists, tuples and dictionaries there.
    """
    total, last = 0, ("", 0)
    for device, start, stop in sorted(set(_ranges(root))):
        start = max(start, last[1]) if device == last[0] else start
        total += max(0, stop - start)
        last = device, max(start, stop)
    return total


def _ranges(root: object) -> Iterator[Range]:
    pending, seen = [root], set()
    while pending:
        x = pending.pop()
        if id(x) in seen or callable(x):
            continue
        seen.add(id(x))
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            yield str(x.device), storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        elif isinstance(x, np.ndarray):
            yield "cpu", x.ctypes.data, x.ctypes.data + x.nbytes
        elif isinstance(x, dict):
            pending += x.values()
        elif isinstance(x, list | tuple):
            pending += x
        else:
            pending += getattr(x, "__dict__", {}).values()
