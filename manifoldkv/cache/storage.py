"""Where latents lie: tensors that grow by tokens, and the exact store built of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

SLACK = 16
"""A tensor is allocated larger than its n tokens by n / `SLACK`."""
LARGEST_RATIO = 1.2
"""A tensor of more than this times its tokens is made smaller."""

Tile = tuple[int, int, Tensor]
"""First and last token (exclusive), counted from the first one asked for, and their latents."""


def working_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which latents are computed and up-projected that are stored in `dtype`.

    On a CPU small products in two-byte dtypes take several times as long as those in float32.
    """
    return torch.promote_types(dtype, torch.float32) if device.type == "cpu" else dtype


def constant_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the constants of a plan are held for a model in `dtype`.

    Of the 16-bit ones bfloat16, whose range is that of float32: coordinates in nats are scaled by
    many orders of magnitude.
    """
    return torch.bfloat16 if dtype.itemsize == 2 else dtype


class GrowingTensor:
    """A tensor (B, H, n, features) or (B, H, features, n) that grows along n in place.

    It is allocated a sixteenth larger than needed, so that appending copies old tokens rarely, and
    drops tokens at either end without copying any.

    Parameters
    ----------
    smallest_growth : int
        Tokens it is allocated larger by at least.
    dim : int
        Of the tokens, 2 or 3.
    """

    def __init__(self, smallest_growth: int = 64, dim: int = 2) -> None:
        self._smallest_growth = smallest_growth
        self._dim = dim
        self._buffer: Tensor | None = None
        self._start = 0
        self._stop = 0

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def view(self) -> Tensor:
        """Return the tokens held; writing to it writes to the cache."""
        assert self._buffer is not None
        return self._buffer.narrow(self._dim, self._start, len(self))

    def append(self, new: Tensor) -> None:
        """Add tokens, (B, H, m, features) or (B, H, features, m)."""
        count = new.shape[self._dim]
        if self._buffer is None:
            self._buffer = self._allocated(new, 0)
        if self._stop + count > self._buffer.shape[self._dim]:
            self._reallocate(len(self) + count + self._slack(len(self) + count))
        self._buffer.narrow(self._dim, self._stop, count).copy_(new)
        self._stop += count

    def drop_first(self, count: int) -> None:
        """Forget the first tokens, all of them if there are no more."""
        self._start += min(count, len(self))
        self._shrink()

    def drop_last(self, count: int) -> None:
        """Forget the last tokens, all of them if there are no more."""
        self._stop -= min(count, len(self))
        self._shrink()

    def select(self, sequences: Tensor) -> None:
        """Keep some sequences, in this order; one may come several times."""
        if self._buffer is not None:
            with torch.inference_mode(False):
                self._buffer = self._buffer.index_select(0, sequences.to(self._buffer.device))

    def clear(self) -> None:
        """Forget all tokens and free their memory."""
        self._buffer, self._start, self._stop = None, 0, 0

    def compact(self) -> None:
        """Give back what is allocated beyond the tokens held."""
        if self._buffer is not None:
            self._reallocate(len(self))

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tokens held."""
        return 0 if self._buffer is None else self.view.numel() * self._buffer.itemsize

    @property
    def storage_nbytes(self) -> int:
        """Return the bytes allocated."""
        return 0 if self._buffer is None else self._buffer.untyped_storage().nbytes()

    def _shrink(self) -> None:
        capacity = 0 if self._buffer is None else self._buffer.shape[self._dim]
        if capacity > max(LARGEST_RATIO * len(self), len(self) + 2 * self._smallest_growth):
            self._reallocate(len(self) + self._slack(len(self)))

    def _slack(self, tokens: int) -> int:
        return max(self._smallest_growth, tokens // SLACK)

    def _reallocate(self, capacity: int) -> None:
        assert self._buffer is not None
        held = self.view
        self._buffer = self._allocated(held, capacity)
        self._start, self._stop = 0, held.shape[self._dim]
        self.view.copy_(held)

    def _allocated(self, like: Tensor, tokens: int) -> Tensor:
        """Return memory for a number of tokens, otherwise of the shape of `like`.

        What is allocated in inference mode could not be written to outside of it.
        """
        shape = list(like.shape)
        shape[self._dim] = tokens
        with torch.inference_mode(False):
            return like.new_empty(shape)


class Store(ABC):
    """Latents of one site of one layer, (B, G, n, features), in some form."""

    parts: list[GrowingTensor]
    """All that is held; the operations below act on each."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of tokens held."""

    @abstractmethod
    def append(self, latents: Tensor) -> None:
        """Add tokens: (B, G, m, features)."""

    @abstractmethod
    def tiles(self, first: int, size: int) -> Iterator[Tile]:
        """Yield what attention sees from token `first` on, in tiles of at most `size` tokens.

        A store that has its latents ready may give them out in larger ones.
        """

    def pieces(self, count: int) -> list[int]:
        """Cut `count` new tokens so that a query sees what it would see if they came alone."""
        return [count]

    def can_drop_last(self, count: int) -> bool:
        """Return whether the store can be put back to what it was `count` tokens ago."""
        return True

    def drop_first(self, count: int) -> None:
        """Forget the first tokens."""
        for part in self.parts:
            part.drop_first(count)

    def drop_last(self, count: int) -> None:
        """Forget the last tokens."""
        for part in self.parts:
            part.drop_last(count)

    def select(self, sequences: Tensor) -> None:
        """Keep some sequences, in this order; one may come several times."""
        for part in self.parts:
            part.select(sequences)

    def clear(self) -> None:
        """Forget all tokens and free their memory."""
        for part in self.parts:
            part.clear()

    def compact(self) -> None:
        """Give back what is allocated beyond the tokens held."""
        for part in self.parts:
            part.compact()

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tokens held."""
        return sum(part.nbytes for part in self.parts)

    @property
    def storage_nbytes(self) -> int:
        """Return the bytes allocated."""
        return sum(part.storage_nbytes for part in self.parts)


class ExactStore(Store):
    """Latents (or keys or values themselves) in the dtype of the model.

    Parameters
    ----------
    smallest_growth : int
        As of `GrowingTensor`.
    """

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
    """Cut tokens `first` to `stop` into runs of at most `size`."""
    for start in range(first, stop, size):
        yield start, min(start + size, stop)
