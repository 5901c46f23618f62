"""Storage of latents: tensors that grow by tokens, and a store of unquantized latents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import ceil
from typing import Any

import torch
from torch import Tensor

from manifoldkv.errors import CacheError
from manifoldkv.kernels.decode import is_available, runs_triton
from manifoldkv.kernels.views import Array, View

SLACK = 16
"""Tokens of a tensor per token of slack that is allocated with them."""
LARGEST_RATIO = 1.2
"""Largest ratio of a tensor's capacity to its tokens."""

Tile = tuple[int, int, Tensor]
"""First and last token (exclusive), relative to the first requested token, and their latents."""


def working_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of projections of latents that are stored in `dtype`.

    On a CPU, small products in 16-bit dtypes take several times as long as in float32.
    """
    return torch.promote_types(dtype, torch.float32) if device.type == "cpu" else dtype


def can_compile(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether kernels decode for models in a dtype on a device."""
    in_float32 = working_dtype(dtype, device) == torch.float32
    return device.type == "cpu" and in_float32 and is_available()


def constant_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the constants of a plan for a model in `dtype`.

    Of 16-bit dtypes bfloat16, whose range is that of float32: scales of latents in nats differ by
    many orders of magnitude.
    """
    return torch.bfloat16 if dtype.itemsize == 2 else dtype


def check_rows(held: int, given: int) -> None:
    """Refuse tokens of another number of rows than a cache has."""
    if held != given:
        raise CacheError(
            f"the cache has {held} rows and the new tokens {given}: call batch_repeat_interleave "
            "or batch_select_indices on the cache, or make a new one"
        )


class GrowingTensor:
    """Tensor (B, H, n, features) or (B, H, features, n) that grows along n in place.

    It is allocated a sixteenth larger than needed, so that appending rarely copies old tokens.
    Tokens at either end are dropped without a copy.

    Parameters
    ----------
    smallest_growth : int
        Smallest number of tokens to grow by.
    dim : int
        Dimension of the tokens, 2 or 3.
    """

    def __init__(self, smallest_growth: int = 64, dim: int = 2) -> None:
        self._smallest_growth = smallest_growth
        self._dim = dim
        self._buffer: Tensor | None = None
        self._start = 0
        self._stop = 0
        self._array: Array | None = None  # the buffer for kernels, made when they ask for it

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the array, whose memory is not shared with a copy of the buffer."""
        return self.__dict__ | {"_array": None}

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def rows(self) -> int | None:
        """Return the number of rows, B; None before the first tokens."""
        return None if self._buffer is None else self._buffer.shape[0]

    @property
    def view(self) -> Tensor:
        """Return the tokens, a view of the buffer."""
        assert self._buffer is not None
        return self._buffer.narrow(self._dim, self._start, len(self))

    def append(self, new: Tensor) -> None:
        """Add tokens, (B, H, m, features) or (B, H, features, m)."""
        count = new.shape[self._dim]
        self.extend(new, count)
        assert self._buffer is not None
        self._buffer.narrow(self._dim, self._stop - count, count).copy_(new)

    def extend(self, like: Tensor, count: int) -> None:
        """Add tokens that are not initialized, with all other dimensions of `like`.

        Raises
        ------
        CacheError
            If these are not those of the tokens before. Nothing is added then.
        """
        if self._buffer is None:
            self._hold(self._allocated(like, 0))
        self._check(like)
        assert self._buffer is not None
        if self._stop + count > self._buffer.shape[self._dim]:
            self._reallocate(len(self) + count + self._slack(len(self) + count))
        self._stop += count

    def flat(self, first: int, count: int) -> View:
        """Return `count` tokens from the first one on, (B, features, count), as kernels take them.

        Only for tokens along dimension 3, of one head.

        Raises
        ------
        CacheError
            If there are fewer tokens.
        """
        assert self._buffer is not None
        if not 0 <= first <= first + count <= len(self):
            raise CacheError(f"tokens {first} to {first + count} are not among {len(self)}")
        if self._array is None:
            self._array = self._buffer.numpy().reshape(-1)
        batch, _, features, capacity = self._buffer.shape
        start = self._start + first
        stop = start + (batch * features - 1) * capacity + count
        return self._array[start:stop], features * capacity if batch > 1 else 0, capacity

    def drop_first(self, count: int) -> None:
        """Drop the first `count` tokens, or all."""
        self._start += min(count, len(self))
        self._shrink()

    def drop_last(self, count: int) -> None:
        """Drop the last `count` tokens, or all."""
        self._stop -= min(count, len(self))
        self._shrink()

    def select(self, sequences: Tensor) -> None:
        """Select sequences by index, with repetitions."""
        if self._buffer is not None:
            with torch.inference_mode(False):
                self._hold(self._buffer.index_select(0, sequences.to(self._buffer.device)))

    def clear(self) -> None:
        """Drop all tokens and free their memory."""
        self._hold(None)
        self._start = self._stop = 0

    def compact(self) -> None:
        """Free the memory allocated beyond the tokens."""
        if self._buffer is not None:
            self._reallocate(len(self))

    @property
    def nbytes(self) -> int:
        """Return the size of the tokens in bytes."""
        return 0 if self._buffer is None else self.view.numel() * self._buffer.itemsize

    @property
    def storage_nbytes(self) -> int:
        """Return the allocated bytes."""
        return 0 if self._buffer is None else self._buffer.untyped_storage().nbytes()

    def _hold(self, buffer: Tensor | None) -> None:
        """Replace the buffer, without keeping the memory of the one before."""
        self._buffer, self._array = buffer, None

    def _check(self, like: Tensor) -> None:
        """Refuse tokens whose rows, heads or features are not those of the tokens before."""
        assert self._buffer is not None
        held, new, of_features = self._buffer.shape, like.shape, 5 - self._dim
        check_rows(held[0], new[0])
        if held[1] != new[1] or held[of_features] != new[of_features]:
            raise CacheError(
                f"tokens of {new[1]} heads and {new[of_features]} features do not fit those "
                f"stored, of {held[1]} heads and {held[of_features]} features"
            )

    def _shrink(self) -> None:
        capacity = 0 if self._buffer is None else self._buffer.shape[self._dim]
        if capacity > max(LARGEST_RATIO * len(self), len(self) + 2 * self._smallest_growth):
            self._reallocate(len(self) + self._slack(len(self)))

    def _slack(self, tokens: int) -> int:
        return max(self._smallest_growth, tokens // SLACK)

    def _reallocate(self, capacity: int) -> None:
        assert self._buffer is not None
        held = self.view
        self._hold(self._allocated(held, capacity))
        self._start, self._stop = 0, held.shape[self._dim]
        self.view.copy_(held)

    def _allocated(self, like: Tensor, tokens: int) -> Tensor:
        """Return memory for `tokens` tokens, otherwise shaped as `like`.

        A tensor allocated in inference mode could not be written to outside of it.
        """
        shape = list(like.shape)
        if self._dim == 3 and runs_triton(like.device):  # kernels load several tokens at once
            tokens = ceil(tokens / 16) * 16
        shape[self._dim] = tokens
        with torch.inference_mode(False):
            return like.new_empty(shape)


def check_latents(latents: Tensor, groups: int, features: int) -> None:
    """Refuse latents (B, G, m, features) that are not those of a store's site."""
    if latents.shape[1] != groups or latents.shape[3] != features:
        raise CacheError(
            f"latents of {latents.shape[1]} head groups and {latents.shape[3]} features are not "
            f"those of a site with {groups} head groups and {features} features"
        )


class Store(ABC):
    """Latents of one site of one layer, (B, G, n, features), in the format of a quantizer."""

    parts: list[GrowingTensor]
    """Tensors of the store, on each of which the operations below act."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of tokens."""

    @property
    def rows(self) -> int | None:
        """Return the number of rows, B; None before the first tokens."""
        return next((part.rows for part in self.parts if part.rows is not None), None)

    @abstractmethod
    def append(self, latents: Tensor) -> None:
        """Append tokens, (B, G, m, features).

        Raises
        ------
        CacheError
            If B, G or the features are not those of the tokens before. Nothing is appended then.
        """

    @abstractmethod
    def tiles(self, first: int, size: int) -> Iterator[Tile]:
        """Yield reconstructed latents from token `first` on, in tiles of about `size` tokens.

        Tiles may be larger where they need no computation.
        """

    def read(self, start: int, stop: int) -> Tensor:
        """Return the reconstructed latents of some tokens, (B, G, stop - start, features).

        Only for stores that round every token alone.
        """
        _, _, latents = next(self.tiles(start, stop - start))
        return latents[:, :, : stop - start]

    def append_and_read(self, latents: Tensor) -> Tensor:
        """Append tokens (B, G, m, features), and return their reconstructed latents."""
        self.append(latents)
        return self.read(len(self) - latents.shape[2], len(self))

    def pieces(self, count: int) -> list[int]:
        """Split `count` new tokens so that appending the parts equals appending single tokens."""
        return [count]

    def can_drop_last(self, count: int) -> bool:
        """Return whether the last `count` tokens can be dropped."""
        return True

    def drop_first(self, count: int) -> None:
        """Drop the first `count` tokens."""
        for part in self.parts:
            part.drop_first(count)

    def drop_last(self, count: int) -> None:
        """Drop the last `count` tokens."""
        for part in self.parts:
            part.drop_last(count)

    def select(self, sequences: Tensor) -> None:
        """Select sequences by index, with repetitions."""
        for part in self.parts:
            part.select(sequences)

    def clear(self) -> None:
        """Drop all tokens and free their memory."""
        for part in self.parts:
            part.clear()

    def compact(self) -> None:
        """Free the memory allocated beyond the tokens."""
        for part in self.parts:
            part.compact()

    @property
    def nbytes(self) -> int:
        """Return the size of the tokens in bytes."""
        return sum(part.nbytes for part in self.parts)

    @property
    def storage_nbytes(self) -> int:
        """Return the allocated bytes."""
        return sum(part.storage_nbytes for part in self.parts)


class ExactStore(Store):
    """Unquantized latents, keys or values in the dtype of the model, in a `GrowingTensor`."""

    def __init__(self, smallest_growth: int = 64) -> None:
        self._latents = GrowingTensor(smallest_growth)
        self.parts = [self._latents]

    def __len__(self) -> int:
        return len(self._latents)

    def append(self, latents: Tensor) -> None:
        self._latents.append(latents)

    def tiles(self, first: int, size: int) -> Iterator[Tile]:
        yield 0, len(self) - first, self._latents.view[:, :, first:]

    def newest(self, count: int) -> Tensor:
        """Return the newest tokens, (B, H, count, features)."""
        return self._latents.view[:, :, len(self) - count :]


def split_tiles(first: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Split the range of tokens `first` to `stop` into parts of at most `size`."""
    for start in range(first, stop, size):
        yield start, min(start + size, stop)
