"""Entropy coding of the symbols of a site: an asymmetric numeral system with a table per latent.

The coder is constriction's (Bamler 2022, Understanding entropy coding with asymmetric numeral
systems, arXiv 2201.01741), which takes all symbols of a latent in one call.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manifoldkv.codec.payload import LENGTHS
from manifoldkv.coding.entropy import EntropyCoded
from manifoldkv.coding.predictor import PredictorContext
from manifoldkv.errors import CacheError
from manifoldkv.plan.site import SitePlan

FARTHEST_PAST = 1 << 30
"""Largest distance of a symbol past the end of its table."""


class SymbolCoder:
    """Entropy coder of symbols by the tables of a quantizer.

    Symbols past the end of their table are coded as the end, and their distances to it are stored
    separately, in 32 bits each.

    Raises
    ------
    CacheError
        If constriction is not installed.
    """

    def __init__(self, quantizer: EntropyCoded) -> None:
        if find_spec("constriction") is None:
            raise CacheError(
                "caches are coded by constriction, which is not installed: "
                'pip install -c constraints.txt -e ".[codec]"'
            )
        import constriction

        categorical = constriction.stream.model.Categorical
        self._new_coder = constriction.stream.stack.AnsCoder
        self._reach: NDArray[np.int32] = quantizer.reach.numpy()
        # The frequencies, below 2^24, are exact in float32.
        self._models: list[Any] = [
            categorical(table.float().numpy(), perfect=False) for table in quantizer.split_tables()
        ]

    @property
    def features(self) -> int:
        """Return the number of latents."""
        return len(self._models)

    def encode(self, symbols: NDArray[np.int32]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Return the words of symbols (features, tokens), and distances past their tables.

        Absolute values of symbols are at most `FARTHEST_PAST`.
        """
        reach = self._reach[:, None]
        within = np.clip(symbols, -reach, reach)
        past = np.abs(symbols - within)[np.abs(within) == reach]
        coder = self._new_coder()
        for latent in reversed(range(self.features)):  # decoding is last in, first out
            coder.encode_reverse(within[latent] + self._reach[latent], self._models[latent])
        return coder.get_compressed(), past.astype(np.uint32)

    def decode(
        self, words: NDArray[np.uint32], past: NDArray[np.uint32], tokens: int
    ) -> NDArray[np.int32]:
        """Return the encoded symbols, (features, tokens).

        Raises
        ------
        CacheError
            If words or distances do not fit the number of tokens and the tables.
        """
        symbols = np.empty((self.features, tokens), dtype=np.int32)
        try:
            coder = self._new_coder(words)
            for latent, model in enumerate(self._models):
                symbols[latent] = coder.decode(model, tokens)
            complete = coder.is_empty()
        except ValueError:
            complete = False
        reach = self._reach[:, None]
        symbols -= reach
        ends = np.abs(symbols) == reach
        if not complete or ends.sum() != len(past) or (past > FARTHEST_PAST).any():
            raise CacheError("the symbols of the stored cache do not fit the plan's tables")
        symbols[ends] += np.sign(symbols[ends]) * past.astype(np.int32)
        return symbols


class SiteCodec:
    """Conversion of keys (before rotation) or values of a layer to symbols and bytes, and back.

    Keys and values are (B·m, D) with concatenated heads, float32. The quantizer of the plan is
    `EntropyCoded`.
    """

    def __init__(self, plan: SitePlan) -> None:
        assert isinstance(plan.quantizer, EntropyCoded)  # the codec has checked the plan
        self._plan = plan
        self._down, self._up = plan.basis.down[0].float(), plan.basis.up[0].float()
        self._gain = plan.quantizer.gain
        self._coder = SymbolCoder(plan.quantizer)

    def expected(self, context: PredictorContext) -> Tensor:
        """Return the predicted keys or values, (D,) or (B·m, D)."""
        return self._plan.expected(self._down, context)

    def symbols(self, x: Tensor, expected: Tensor) -> Tensor:
        """Return the symbols of x, (features, B·m), int32.

        Raises
        ------
        CacheError
            If x is not finite, or too large.
        """
        latents = ((x - expected) @ self._down).mT
        if not bool((latents.abs() < FARTHEST_PAST).all()):  # false of NaN too
            raise CacheError("the cache holds keys or values that are not finite, or far too large")
        return latents.round().int().contiguous()

    def reconstruct(self, symbols: Tensor, expected: Tensor) -> Tensor:
        """Return the keys or values reconstructed from symbols."""
        return (symbols.mT * self._gain) @ self._up.mT + expected

    def encode(self, symbols: Tensor) -> bytes:
        """Return encoded symbols, preceded by their lengths."""
        words, past = self._coder.encode(symbols.numpy())
        lengths = LENGTHS.pack(len(words), len(past))
        return lengths + words.astype("<u4").tobytes() + past.astype("<u4").tobytes()

    def decode(self, words: NDArray[np.uint32], past: NDArray[np.uint32], tokens: int) -> Tensor:
        """Return the symbols of B·m tokens."""
        return torch.from_numpy(self._coder.decode(words, past, tokens))
