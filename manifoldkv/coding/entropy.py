"""Entropy-coded latents: reconstruction and frequencies of their symbols."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

import torch
from torch import Tensor

from manifoldkv.basis import equal
from manifoldkv.errors import PlanError

FARTHEST = 1 << 12
"""No symbol of a table is larger."""
FREQUENT = 1 << 24
"""No frequency in a table is larger."""

BLOCK_TOKENS = 256
"""Tokens that are stored together: a reader of some reads all of them."""
TOKEN_ID_BYTES = 4
HEADER_BYTES = 112
BLOCK_BYTES = 16
STREAM_BYTES = 24
"""Lengths of a layer's symbols in a block, and what an entropy coder adds to their entropy."""


def frame_bytes(tokens: int, layers: int) -> int:
    """Return the bytes around the symbols, exact tokens and ids of a blob."""
    return HEADER_BYTES + ceil(tokens / BLOCK_TOKENS) * (BLOCK_BYTES + layers * STREAM_BYTES)


@dataclass(frozen=True, eq=False)
class EntropyCoding:
    """Tables of the symbols that the latents of a site are rounded to.

    The symbol of a latent is the integer next to it: the step of the quantiser, one for all latents
    of a model, is in the scale of the basis. A symbol s is reconstructed as ``gain · s``. A caller
    that stores symbols codes each by the table of its latent; one that is past the ends of its
    table is stored as the nearest end and how far it is past it.

    Parameters
    ----------
    mean : Tensor
        What is taken from keys or values, all heads side by side, before they are projected, and
        added again, (D,), float32.
    gain : Tensor
        By latent, (features,), float32.
    reach : Tensor
        Of the table of every latent, which has the symbols from -reach to reach, (features,),
        int32, 1 at least.
    tables : Tensor
        Frequencies of these symbols, all tables one after the other, (Σ (2 · reach + 1),), int32,
        positive.
    prediction : Tensor or None
        Weights of a linear prediction as in `Coding`, (inputs, D), float32.
    """

    mean: Tensor = field(repr=False)
    gain: Tensor
    reach: Tensor
    tables: Tensor = field(repr=False)
    prediction: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        features = len(self.reach) if self.reach.ndim == 1 else 0
        if not features or self.reach.dtype != torch.int32:
            raise PlanError(f"reaches of tables are (features,) in int32, not {_said(self.reach)}")
        if not 1 <= int(self.reach.min()) <= int(self.reach.max()) <= FARTHEST:
            raise PlanError(f"a table reaches from 1 to {FARTHEST} symbols")
        size = int((2 * self.reach.long() + 1).sum())
        if tuple(self.tables.shape) != (size,) or self.tables.dtype != torch.int32:
            raise PlanError(f"tables are ({size},) in int32, not {_said(self.tables)}")
        if not 1 <= int(self.tables.min()) <= int(self.tables.max()) <= FREQUENT:
            raise PlanError(f"a frequency in a table is not from 1 to {FREQUENT}")
        for name, tensor in (("means", self.mean), ("gains", self.gain)):
            if tensor.ndim != 1 or tensor.dtype != torch.float32:
                raise PlanError(f"{name} are a vector in float32, not {_said(tensor)}")
            if not bool(tensor.isfinite().all()):
                raise PlanError(f"{name} are not all finite")
        if len(self.gain) != features:
            raise PlanError(f"{len(self.gain)} gains do not fit {features} tables")
        if self.prediction is not None:
            self._check_prediction(self.prediction)

    def _check_prediction(self, prediction: Tensor) -> None:
        fits = prediction.ndim == 2 and prediction.shape[1:] == self.mean.shape
        if not fits or prediction.dtype != torch.float32:
            raise PlanError(
                f"predictions are (inputs, {len(self.mean)}) in float32, not {_said(prediction)}"
            )
        if not bool(prediction.isfinite().all()):
            raise PlanError("predictions are not all finite")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EntropyCoding):
            return NotImplemented
        mine, its = self.tensors(), other.tensors()
        return mine.keys() == its.keys() and all(equal(mine[name], its[name]) for name in mine)

    def __hash__(self) -> int:
        return hash(tuple(self.reach.tolist()))

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields by their names, those that are there."""
        named = {
            "mean": self.mean,
            "gain": self.gain,
            "reach": self.reach,
            "tables": self.tables,
            "prediction": self.prediction,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def split_tables(self) -> list[Tensor]:
        """Return the frequencies by latent, (2 · reach + 1,) each."""
        return list(self.tables.split((2 * self.reach + 1).tolist()))

    @property
    def token_bits(self) -> float:
        """Return the bits that a token takes on average if its symbols are as frequent as said."""
        sizes = 2 * self.reach.long() + 1
        latent = torch.arange(len(sizes)).repeat_interleave(sizes)
        counts = self.tables.double()
        totals = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, latent, counts)
        logarithms = counts * counts.log2()
        weighted = torch.zeros_like(totals).index_add_(0, latent, logarithms)
        return float((totals.log2() - weighted / totals).sum())


def _said(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} in {tensor.dtype}"
