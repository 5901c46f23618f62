"""Tokens in the cache of a layer with a sliding window."""

from __future__ import annotations


def cached_tokens(tokens: int, window: int | None) -> int:
    """Return the number of tokens in the cache of a layer after `tokens` tokens.

    Parameters
    ----------
    tokens : int
        Tokens of the sequence.
    window : int or None
        Sliding window of the layer, in tokens; None for full attention.
    """
    return tokens if window is None else min(tokens, window - 1)
