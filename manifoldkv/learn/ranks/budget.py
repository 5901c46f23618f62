"""Budget of a cache over all layers, and candidate ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from manifoldkv.core.errors import ArgumentError
from manifoldkv.core.windows import cached_tokens

CANDIDATES = (0.0625, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
"""Candidate ranks as shares of head_dim, nearly all multiples of 16 for a head_dim of 128."""
PAPER_CANDIDATES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""The paper's five trained ranks and full rank, as shares of head_dim."""
TOLERANCE = 1e-9

Ranks = tuple[int, int]
"""Key rank and value rank of a layer, per KV head."""


@dataclass(frozen=True)
class Budget:
    """Largest number of cached elements of all layers, for a text of `context` tokens.

    Elements are counted per KV head: layers have equal numbers of heads and head_dim, so that the
    sum is proportional to the bytes of the cache. Layers with a sliding window cache fewer tokens
    and count for less.

    Parameters
    ----------
    ratio : float
        Largest share of the elements of the uncompressed cache, in (0, 1].
    head_dim : int
        Number of features of a head, d.
    windows : tuple of (int or None)
        Sliding window of every layer in tokens, None for full attention.
    context : int
        Number of tokens of the text.

    Raises
    ------
    ArgumentError
        If the ratio is not in (0, 1], or the context is not positive.
    """

    ratio: float
    head_dim: int
    windows: tuple[int | None, ...]
    context: int

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ArgumentError(f"ratio {self.ratio:g} is not in (0, 1]")
        if self.context < 1:
            raise ArgumentError(f"context must be >= 1 token, got {self.context}")

    @property
    def layers(self) -> int:
        """Return the number of layers."""
        return len(self.windows)

    @property
    def full(self) -> int:
        """Return the number of elements of the uncompressed cache."""
        return 2 * self.head_dim * sum(self.latent_tokens)

    @cached_property
    def latent_tokens(self) -> tuple[int, ...]:
        """Return the number of cached tokens by layer."""
        return tuple(cached_tokens(self.context, window) for window in self.windows)

    @cached_property
    def latent_elements(self) -> int:
        """Return the largest number of latent elements of all layers."""
        return int(self.ratio * self.full + TOLERANCE)

    def cost(self, ranks: Sequence[Ranks]) -> int:
        """Return the number of latent elements at these ranks of every layer."""
        pairs = zip(self.latent_tokens, ranks, strict=True)
        return sum(tokens * (key + value) for tokens, (key, value) in pairs)

    def check(self, cheapest: Sequence[Ranks]) -> None:
        """Raise `ArgumentError` if the cheapest ranks of every layer exceed the budget."""
        needed = self.cost(cheapest)
        if needed > self.latent_elements:
            smallest = needed / self.full
            raise ArgumentError(
                f"ratio {self.ratio:.3g} is too small for the candidate ranks; the smallest "
                f"feasible ratio is {smallest:.4g}"
            )


def candidate_ranks(
    head_dim: int, ratios: Sequence[float] = CANDIDATES, multiple: int = 1
) -> tuple[int, ...]:
    """Return the ranks nearest to shares of head_dim, ascending and unique.

    Parameters
    ----------
    head_dim : int
        Largest possible rank.
    ratios : sequence of float
        Shares, in (0, 1].
    multiple : int
        Divisor of all ranks but head_dim.

    Raises
    ------
    ArgumentError
        If a ratio is not in (0, 1], or the multiple is not positive.
    """
    for ratio in ratios:
        if not 0 < ratio <= 1:
            raise ArgumentError(f"candidate ratio {ratio:g} is not in (0, 1]")
    if multiple < 1:
        raise ArgumentError(f"multiple must be >= 1, got {multiple}")
    rounded = {round(ratio * head_dim / multiple) * multiple for ratio in ratios if ratio < 1}
    full = {head_dim} if 1 in ratios else set()
    return tuple(sorted({r for r in rounded if 0 < r < head_dim} | full))
