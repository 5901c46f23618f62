"""KIVI: integer keys in a range per channel, values per token (Liu et al., arXiv:2402.02750)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from manifoldkv.evaluate import Perplexity
from manifoldkv.plan.formats.integers import TokenIntegers
from manifoldkv.serve.cache.integers import RangeStore
from methods.base import Setting, losses, register_method
from methods.grids import randomized_hadamard
from methods.rounding import RoundingMethod

GROUP, RESIDUAL = 64, 64
"""Elements that share a range, and newest tokens that are uncompressed at any time."""


def left_window(tokens: int) -> int:
    """Return how many of the first of some tokens are quantized: whole groups behind the window."""
    return max(0, tokens - RESIDUAL) // GROUP * GROUP


@register_method("kivi")
class KIVI(RoundingMethod):
    """Integers of 4 and 2 bits in KIVI's layout, the newest 64 tokens uncompressed.

    Keys after RoPE in a range per channel and `GROUP` tokens, values in a range per token and
    `GROUP` channels of a head, both when a whole group of tokens has left the newest `RESIDUAL`.
    Differs from the paper: heads are rotated by a Hadamard matrix, behind which 2 bits lose less
    and 4 bits as much. The cache holds packed codes, and reads all of them in every step. A text is
    read in parts, each as long as no group leaves, so that every token attends to what it would see
    token by token; in an answer of several tokens at once, a group may leave some tokens early.

    Raises
    ------
    ModelError
        If the number of features of a head is not a power of two, or a layer has a sliding window.
    """

    widths: ClassVar[tuple[int, ...]] = (4, 2)

    def __init__(self, setting: Setting, ratio: float) -> None:
        super().__init__(setting, ratio)
        self.quantizer = TokenIntegers(round(16 * ratio), GROUP)
        self.rotation = randomized_hadamard(setting.head_dim, setting.head_dim)

    @classmethod
    def ratios(cls, requested: Sequence[float]) -> Sequence[float]:
        return [bits / 16 for bits in cls.widths]

    def nbytes(self, tokens: int) -> int:
        quantized, size = left_window(tokens), self.setting.head_dim
        keys = self.quantizer.nbytes(quantized // GROUP * size, GROUP, 2)
        values = self.quantizer.nbytes(quantized, size, 2)
        heads = self.setting.layers * self.setting.features // size
        return heads * (keys + values) + self.setting.stock_bytes(tokens - quantized)

    def perplexity(self, tokens: Tensor) -> Perplexity:
        length = tokens.shape[1]
        leaving = range(RESIDUAL + GROUP - 1, length, GROUP)
        parts = [stop - start for start, stop in pairwise((0, *leaving, length))]
        return losses(
            self.setting.model, tokens, lambda: {"past_key_values": self.new_cache()}, parts
        )

    def new_cache(self) -> Cache:
        return Cache(
            layers=[KIVILayer(self.quantizer, self.rotation) for _ in range(self.setting.layers)]
        )


class KIVILayer(DynamicLayer):
    """Packed codes of the first tokens, and `keys` and `values` of the newest.

    Parameters
    ----------
    quantizer : TokenIntegers
        Bits, and `GROUP` elements that share a range.
    rotation : Tensor
        Orthogonal matrix that heads are multiplied by before they are quantized, (d, d).
    """

    def __init__(self, quantizer: TokenIntegers, rotation: Tensor) -> None:
        super().__init__()
        self._rotation = rotation
        # A row of the keys is a channel of a group of tokens: (B, H_kv, n / GROUP · d, GROUP).
        self.codes = (
            RangeStore(quantizer, GROUP, torch.float32),
            RangeStore(quantizer, len(rotation), torch.float32),
        )

    @property
    def nbytes(self) -> int:
        """Return the bytes of codes, ranges and uncompressed tokens."""
        return sum(store.nbytes for store in self.codes) + self.keys.nbytes + self.values.nbytes

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append tokens (B, H_kv, m, d), and return all keys and values, (B, H_kv, n, d)."""
        keys, values = super().update(key_states, value_states)
        leaving = left_window(self.get_seq_length()) - len(self.codes[1])
        if leaving:
            rotation = self._rotation.to(keys)
            groups = (keys[:, :, :leaving] @ rotation).unflatten(2, (-1, GROUP))
            self.codes[0].append(groups.mT.flatten(2, 3))
            self.codes[1].append(values[:, :, :leaving] @ rotation)
            self.keys, self.values = keys[:, :, leaving:].clone(), values[:, :, leaving:].clone()
        if not len(self.codes[1]):
            return self.keys, self.values
        rows, old_values = (store.read(0, len(store)) for store in self.codes)
        old_keys = rows.unflatten(2, (-1, len(self._rotation))).mT.flatten(2, 3)
        back = self._rotation.mT.to(rows)
        return (
            torch.cat([(old_keys @ back).to(keys), self.keys], dim=2),
            torch.cat([(old_values @ back).to(values), self.values], dim=2),
        )

    def get_seq_length(self) -> int:
        return len(self.codes[1]) + super().get_seq_length()
