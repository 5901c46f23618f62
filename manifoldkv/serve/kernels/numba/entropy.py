"""Numba kernels of entropy coding: an asymmetric numeral system with a state per token.

Latents are visited one after the other. All tokens of a latent share its table and have states of
their own, so that the loop over tokens is the innermost and is vectorised; their words of 16 bits
lie one after the other in one stream (Duda 2013, arXiv 1311.2540; Giesen 2014, Interleaved entropy
coders, arXiv 1402.3392). Importing the module compiles the kernels, or loads them from Numba's
cache.

Tables are `EntropyTables.arrays`: cumulated frequencies of the buckets of all latents, the index of
the first of every latent, the bits of a symbol within its bucket, and the largest symbol.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import int32, int64, uint16, uint32, void
from numba.types import Tuple, UniTuple

from manifoldkv.serve.kernels.views import Array

PRECISION = 14
"""Logarithm of the sum of the frequencies of a table."""
WORD = np.uint32(16)
LEAST_STATE = np.uint32(1 << 16)
COMPLETE, TRUNCATED, IMPOSSIBLE = 0, 1, 2

_LOW = np.uint32((1 << PRECISION) - 1)
_OPTIONS = {"error_model": "numpy", "nogil": True, "_nrt": False}
_TABLES = Tuple((uint16[::1], int64[::1], int32[::1], int32[::1]))
_SCRATCH = UniTuple(uint16[::1], 4)
_SYMBOLS, _WORDS, _STATES = int32[:, ::1], uint16[::1], uint32[::1]


@numba.njit(int32(int32, int32), inline="always", **_OPTIONS)
def _clipped(symbol: int, reach: int) -> Any:
    return min(max(symbol, -reach), reach)


@numba.njit(
    void(_SYMBOLS, _TABLES, _STATES, _WORDS, uint32[::1], int64[::1], uint16[::1], uint16[::1]),
    cache=True,
    **_OPTIONS,
)
def encode(
    symbols: Array,
    tables: tuple[Array, ...],
    states: Array,
    words: Array,
    past: Array,
    position: Array,
    starts: Array,
    frequencies: Array,
) -> None:
    """Write words and distances past the tables of symbols (latents, tokens) before a position.

    States begin as `LEAST_STATE`, and words and distances are written from the end: `position`
    holds the indices of the first ones.
    """
    cumulated, offsets, shifts, reaches = tables
    latents, tokens = symbols.shape
    word, distance = position
    for latent in range(latents - 1, -1, -1):
        first, shift, reach = offsets[latent], shifts[latent], reaches[latent]
        if shift:
            low = np.uint32(shift)
            mask = np.uint32((1 << shift) - 1)
            for t in range(tokens - 1, -1, -1):
                index, state = np.uint32(_clipped(symbols[latent, t], reach) + reach), states[t]
                if state >> (np.uint32(32) - low):
                    word -= 1
                    words[word] = np.uint16(state)
                    state >>= WORD
                states[t] = (state << low) | (index & mask)
        for t in range(tokens - 1, -1, -1):
            symbol, state = symbols[latent, t], states[t]
            if abs(symbol) >= reach:
                distance -= 1
                past[distance] = np.uint32(abs(symbol) - reach)
            index = np.uint32(_clipped(symbol, reach) + reach)
            bucket = first + int64(index >> np.uint32(shift))
            start = cumulated[bucket]
            frequency = np.uint16(cumulated[bucket + 1] - start)
            starts[t], frequencies[t] = start, frequency
            # Without a branch, which would be mispredicted: a word that is not full is overwritten.
            full = state >> np.uint32(32 - PRECISION) >= frequency
            words[word - 1] = np.uint16(state)
            word -= int64(full)
            states[t] = state >> (WORD * np.uint32(full))
        for t in range(tokens):
            # Integers below 2^32: the quotient of float64 is never rounded up to the next one.
            state, divisor = states[t], np.uint32(frequencies[t])
            quotient = np.uint32(np.float64(state) / np.float64(divisor))
            rest = state - quotient * divisor
            states[t] = (quotient << np.uint32(PRECISION)) + rest + np.uint32(starts[t])
    position[0], position[1] = word, distance


@numba.njit(Tuple((uint16, uint16))(uint16[::1]), **_OPTIONS)
def _range(slots: Array) -> Any:
    least, most = np.uint16(65535), np.uint16(0)
    for t in range(len(slots)):
        slot = slots[t]
        least = slot if slot < least else least
        most = slot if slot > most else most
    return least, most


@numba.njit(int64(_STATES, _WORDS, int64), inline="always", **_OPTIONS)
def _refill(states: Array, words: Array, word: int) -> Any:
    """Read a word for every state below `LEAST_STATE`; return the index of the next word."""
    for t in range(len(states)):
        # Without a branch, which would be mispredicted: the next word is read for every state.
        state, next_word = states[t], np.uint32(words[word])
        low = state < LEAST_STATE
        states[t] = (state << WORD) | next_word if low else state
        word += int64(low)
    return word


@numba.njit(
    int64(_TABLES, int64, _STATES, _WORDS, uint32[::1], int64[::1], _SCRATCH, _SYMBOLS),
    cache=True,
    **_OPTIONS,
)
def decode(
    tables: tuple[Array, ...],
    first_latent: int,
    states: Array,
    words: Array,
    past: Array,
    position: Array,
    scratch: Array,
    symbols: Array,
) -> Any:
    """Write the symbols (latents, tokens) of some latents, and return whether that was possible.

    As many words as tokens follow those of the stream, so that a refill needs no check of its own.
    `position` holds the indices of the next word and distance; scratch is four
    arrays (tokens,): rows of one array could overlap, and their loops were not vectorised.
    """
    cumulated, offsets, shifts, reaches = tables
    latents, tokens = symbols.shape
    slots, buckets, starts, frequencies = scratch
    last_start = len(words) - tokens  # a refill reads a word for every token at most
    word, distance = position
    for latent in range(latents):
        first, stop = offsets[first_latent + latent], offsets[first_latent + latent + 1] - 1
        for t in range(tokens):
            slots[t] = np.uint16(states[t] & _LOW)
        least, most = _range(slots)
        low = first
        while low + 1 < stop and cumulated[low + 1] <= least:
            low += 1
        start, frequency = cumulated[low], np.uint16(cumulated[low + 1] - cumulated[low])
        bucket = np.uint16(low - first)
        for t in range(tokens):
            buckets[t], starts[t], frequencies[t] = bucket, start, frequency
        # Only buckets between those of the least and the largest slot are compared with.
        low += 1
        while low < stop and cumulated[low] <= most:
            start, frequency = cumulated[low], np.uint16(cumulated[low + 1] - cumulated[low])
            bucket = np.uint16(low - first)
            for t in range(tokens):
                above = slots[t] >= start
                buckets[t] = bucket if above else buckets[t]
                starts[t] = start if above else starts[t]
                frequencies[t] = frequency if above else frequencies[t]
            low += 1
        for t in range(tokens):
            within = np.uint32(np.uint16(slots[t] - starts[t]))
            states[t] = np.uint32(frequencies[t]) * (states[t] >> np.uint32(PRECISION)) + within
        if word > last_start:
            return TRUNCATED
        word = _refill(states, words, word)
        shift, reach = shifts[first_latent + latent], reaches[first_latent + latent]
        largest = int32(0)
        if shift:
            mask = np.uint32((1 << shift) - 1)
            for t in range(tokens):
                index = (int32(buckets[t]) << int32(shift)) | int32(states[t] & mask)
                states[t] >>= np.uint32(shift)
                symbol = index - reach
                symbols[latent, t] = symbol
                largest = max(largest, abs(symbol))
            if word > last_start:
                return TRUNCATED
            word = _refill(states, words, word)
        else:
            for t in range(tokens):
                symbol = int32(buckets[t]) - reach
                symbols[latent, t] = symbol
                largest = max(largest, abs(symbol))
        if largest > reach:
            return IMPOSSIBLE
        if largest == reach:
            for t in range(tokens):
                symbol = symbols[latent, t]
                if abs(symbol) == reach:
                    if distance == len(past):
                        return TRUNCATED
                    further = int32(past[distance])
                    symbols[latent, t] = symbol + further if symbol > 0 else symbol - further
                    distance += 1
    position[0], position[1] = word, distance
    return COMPLETE
