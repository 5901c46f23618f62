"""Entropy-coded latents: reconstruction and frequencies of their symbols."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from manifoldkv.basis import Basis
from manifoldkv.coding.quantizer import Quantizer, check_coded, check_numbers, straight_through
from manifoldkv.errors import PlanError

FARTHEST = 1 << 12
"""Largest symbol of a table."""
LEAST_REACH = 2
"""Largest symbol of the table of a latent that is always rounded to 0."""
FREQUENT = 1 << 24
"""Largest frequency of a table."""

BLOCK_TOKENS = 256
"""Tokens of a block of a stored cache: a reader of some of them reads all."""
TOKEN_ID_BYTES = 4
HEADER_BYTES = 112
BLOCK_BYTES = 16
CODED_BYTES = 16
"""Lengths of a block's parts."""
STATE_BYTES = 3
"""State of the entropy coder of a token, 4 bytes, less the symbols in it."""


def frame_bytes(tokens: int, batch: int = 1) -> int:
    """Return the bytes of a stored cache beside its symbols, uncompressed tokens and token ids."""
    blocks = ceil(tokens / BLOCK_TOKENS)
    return HEADER_BYTES + blocks * (BLOCK_BYTES + CODED_BYTES) + batch * tokens * STATE_BYTES


@dataclass(frozen=True, eq=False)
class EntropyCoded(Quantizer):
    """Integers next to the latents, and the tables that an entropy coder stores them by.

    The step of the quantiser, one for all latents of a model, is in the scale of the basis. A
    symbol s is reconstructed as ``gain · s``. A symbol beyond the end of its table is stored as
    that end and its distance to it.

    Parameters
    ----------
    gain : Tensor
        (features,), float32.
    reach : Tensor
        Largest symbol of the table of every latent, whose symbols are -reach to reach,
        (features,), int32, at least 1.
    tables : Tensor
        Frequencies of these symbols, all tables one after the other, (Σ (2 · reach + 1),), int32,
        positive.

    Raises
    ------
    PlanError
        If a tensor has another shape, dtype or range.
    """

    name: ClassVar[str] = "entropy-coded"
    attended: ClassVar[bool] = False
    variable_width: ClassVar[bool] = True

    gain: Tensor
    reach: Tensor
    tables: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        features = len(self.reach) if self.reach.ndim == 1 else 0
        if not features or self.reach.dtype != torch.int32:
            raise PlanError(
                f"reaches of tables must be (features,) in int32, got {tuple(self.reach.shape)} in "
                f"{self.reach.dtype}"
            )
        if not 1 <= int(self.reach.min()) <= int(self.reach.max()) <= FARTHEST:
            raise PlanError(f"reaches of tables must be in [1, {FARTHEST}]")
        size = int((2 * self.reach.long() + 1).sum())
        if tuple(self.tables.shape) != (size,) or self.tables.dtype != torch.int32:
            raise PlanError(
                f"tables must be ({size},) in int32, got {tuple(self.tables.shape)} in "
                f"{self.tables.dtype}"
            )
        if not 1 <= int(self.tables.min()) <= int(self.tables.max()) <= FREQUENT:
            raise PlanError(f"frequencies of tables must be in [1, {FREQUENT}]")
        check_numbers("gain of latents", self.gain, (features,))

    def check(self, name: str, basis: Basis, window: int | None) -> None:
        check_coded(name, basis, len(self.gain))
        if window is not None:
            raise PlanError(
                f"{name}: caches of layers with sliding windows cannot be stored; this one has a "
                f"window of {window} tokens"
            )

    @property
    def format(self) -> str:
        return "entropy-coded integers"

    @property
    def is_empty(self) -> bool:
        return bool((self.reach <= LEAST_REACH).all())

    def reconstruct(self, latents: Tensor) -> Tensor:
        return straight_through(latents, latents.round()) * self.gain.to(latents)

    def nbytes(self, tokens: int, features: int, itemsize: int) -> int:
        return ceil(tokens * self.token_bits(features) / 8)

    def bytes_per_token(self, features: int, itemsize: int) -> float:
        return self.nbytes(1 << 10, features, itemsize) / (1 << 10)

    def token_bits(self, features: int) -> float:
        """Return the entropy of a token's symbols if they are as frequent as in the tables."""
        sizes = 2 * self.reach.long() + 1
        latent = torch.arange(len(sizes)).repeat_interleave(sizes)
        counts = self.tables.double()
        totals = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, latent, counts)
        logarithms = counts * counts.log2()
        weighted = torch.zeros_like(totals).index_add_(0, latent, logarithms)
        return float((totals.log2() - weighted / totals).sum())

    def split_tables(self) -> list[Tensor]:
        """Return the frequencies by latent, (2 · reach + 1,) each."""
        return list(self.tables.split((2 * self.reach + 1).tolist()))
