"""Entropy coding of symbols by compiled kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from manifoldkv.coding.entropy import EntropyCoded
from manifoldkv.errors import CodecError
from manifoldkv.kernels.views import Array, check_shape

FARTHEST_PAST = 1 << 30
"""Largest distance of a symbol past the end of its table."""
WIDEST = 256
"""Largest deviation of a symbol in buckets, and so of the table that a decoder looks it up in."""


@dataclass(frozen=True, eq=False)
class EntropyTables:
    """Tables of the latents of all sites, in the order in which they are coded.

    A symbol is coded as a bucket of 2^shift neighbours and, with equal frequencies, its place in
    the bucket. A symbol beyond the end of its table is coded as the end and its distance to it.

    Parameters
    ----------
    arrays : tuple of ndarray
        Cumulated frequencies of the buckets, 0 to 2^`PRECISION` for each latent, uint16; index of
        the first of each latent, (latents + 1,), int64; shifts and largest symbols, (latents,),
        int32.
    """

    arrays: tuple[Array, Array, Array, Array]

    @classmethod
    def of(cls, quantizers: Iterable[EntropyCoded]) -> EntropyTables:
        """Return the tables of quantizers. Integers only: machines agree on every frequency."""
        cumulated, shifts, reaches = [], [], []
        for quantizer in quantizers:
            for table, reach in zip(
                quantizer.split_tables(), quantizer.reach.tolist(), strict=True
            ):
                counts = table.numpy().astype(np.int64)
                shift = _shift(counts, reach)
                sums = np.add.reduceat(counts, np.arange(0, len(counts), 1 << shift))
                cumulated.append(_cumulated(sums))
                shifts.append(shift)
                reaches.append(reach)
        offsets = np.cumsum([0, *map(len, cumulated)], dtype=np.int64)
        numbers = np.concatenate(cumulated).astype(np.uint16)
        return cls(
            (numbers, offsets, np.array(shifts, np.int32), np.array(reaches, dtype=np.int32))
        )

    @property
    def latents(self) -> int:
        """Return the number of latents of all sites."""
        return len(self.arrays[2])


def _shift(counts: Array, reach: int) -> int:
    """Return the bits of a symbol that are coded with equal frequencies."""
    symbols = np.arange(-reach, reach + 1)
    mean_square = int((counts * symbols**2).sum()) // int(counts.sum())
    shift = 0
    while mean_square >= (WIDEST << shift) ** 2:
        shift += 1
    return shift


def _cumulated(counts: Array) -> Array:
    """Return cumulated frequencies, at least 1 each, that end with 2^`PRECISION`."""
    total = 1 << _kernels().PRECISION
    frequencies = 1 + counts * (total - len(counts)) // int(counts.sum())
    frequencies[counts.argmax()] += total - frequencies.sum()
    return np.concatenate([[0], frequencies.cumsum()])


@cache
def _kernels() -> ModuleType:
    from manifoldkv.kernels import cpu_entropy

    return cpu_entropy


def encode(symbols: Tensor, tables: EntropyTables) -> tuple[Array, Array, Array]:
    """Return states, words and distances past the tables of the symbols of all latents.

    Parameters
    ----------
    symbols : Tensor
        (latents, tokens), int32, contiguous; absolute values below `FARTHEST_PAST`.
    tables : EntropyTables
        Of the latents.

    Returns
    -------
    tuple of ndarray
        (tokens,) in uint32, uint16 and uint32.
    """
    kernels, (latents, tokens) = _kernels(), symbols.shape
    check_shape("symbols", (latents,), tables.latents)
    states = np.full(tokens, kernels.LEAST_STATE, dtype=np.uint32)
    words = np.empty(2 * latents * tokens, dtype=np.uint16)
    past = np.empty(latents * tokens, dtype=np.uint32)
    position = np.array([len(words), len(past)])
    scratch = np.empty((2, tokens), dtype=np.uint16)
    kernels.encode(symbols.numpy(), tables.arrays, states, words, past, position, *scratch)
    return states, words[position[0] :], past[position[1] :]


class SymbolReader:
    """Reader of symbols in the order of their latents.

    Parameters
    ----------
    tables : EntropyTables
        Of all latents.
    states, words, past : ndarray
        From `encode`, or a stranger's.
    """

    def __init__(self, tables: EntropyTables, states: Array, words: Array, past: Array) -> None:
        self._tables, self._states, self._past = tables, states.copy(), past
        self._words = np.concatenate([words, np.zeros(len(states), dtype=np.uint16)])
        self._stop = len(words)
        self._scratch = tuple(np.empty((4, len(states)), dtype=np.uint16))
        self._position = np.zeros(2, dtype=np.int64)
        self._latent = 0
        if (states < _kernels().LEAST_STATE).any() or (past > FARTHEST_PAST).any():
            raise self._damaged()

    def read(self, latents: int) -> Tensor:
        """Return the symbols of the next latents, (latents, tokens), int32.

        Raises
        ------
        CodecError
            If they are not those of an encoder with these tables.
        """
        left = self._tables.latents - self._latent
        if latents > left:
            raise CodecError(f"{latents} latents are asked for, of which {left} are left")
        symbols = torch.empty(latents, len(self._states), dtype=torch.int32)
        kernels, position = _kernels(), self._position
        numbers = self._latent, self._states, self._words, self._past, position, self._scratch
        found = kernels.decode(self._tables.arrays, *numbers, symbols.numpy())
        if found != kernels.COMPLETE or position[0] > self._stop:
            raise self._damaged()
        self._latent += latents
        return symbols

    def end(self) -> None:
        """Raise `CodecError` unless all has been read, and the states are those of the encoder."""
        read = self._position.tolist() == [self._stop, len(self._past)]
        if not read or (self._states != _kernels().LEAST_STATE).any():
            raise self._damaged()

    @staticmethod
    def _damaged() -> CodecError:
        return CodecError("the symbols of the stored cache do not fit the plan's tables")
