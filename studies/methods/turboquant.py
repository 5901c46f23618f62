"""TurboQuant (Zandieh et al., 2504.19874) as vLLM ships it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from scipy.linalg import hadamard
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from manifoldkv.plan.formats.integers import TokenIntegers, packed_bytes
from manifoldkv.plan.formats.quantizer import SCALE_BYTES
from methods.base import Setting, register_method
from methods.grids import check_hadamard, lloyd_max
from methods.rounding import RoundedLayer, RoundingMethod

SKIPPED = 2
"""First layers, and last ones, that vLLM leaves in 16 bits."""


def reconstructed(keys: Tensor, bits: int) -> Tensor:
    """Return keys (..., d), each from its norm and the codes of its direction, in their dtype.

    A key is divided by its norm, stored in float16, and turned by a Hadamard matrix, after which
    its coordinates are about N(0, 1 / d): each is stored as the nearest word of a Lloyd-Max
    codebook. The words of a key are divided by their own norm before they are turned again ("norm
    correction"). There is no QJL sketch of the residual.
    """
    size = keys.shape[-1]
    turn = torch.from_numpy(hadamard(size)).to(keys.device).float() / size**0.5
    norms = keys.float().norm(dim=-1, keepdim=True)
    coordinates = keys.float() / (norms + 1e-8) @ turn * size**0.5
    words = lloyd_max(bits).to(keys.device)
    chosen = words[torch.bucketize(coordinates, (words[1:] + words[:-1]) / 2)]
    directions = chosen / chosen.norm(dim=-1, keepdim=True)
    return (norms.half().float() * (directions @ turn.mT)).to(keys.dtype)


@register_method("turboquant")
class TurboQuant(RoundingMethod):
    """TurboQuant as in vLLM: turned keys in Lloyd-Max codebooks, integer values, 4 and 3 bits.

    The presets turboquant_4bit_nc and turboquant_3bit_nc: keys after rotation as `reconstructed`
    does, values as integers in a range per token and head, not turned, and the first and last
    `SKIPPED` layers in 16 bits. vLLM reads a prompt uncompressed; here every token attends to
    rounded ones. Simulated: the cache holds reconstructions, and the bytes are those of packed
    codes.

    Raises
    ------
    ModelError
        If the number of features of a head is not a power of two, or a layer has a sliding window.
    """

    widths: ClassVar[tuple[int, ...]] = (4, 3)

    def __init__(self, setting: Setting, ratio: float) -> None:
        super().__init__(setting, ratio)
        self.bits = round(16 * ratio)
        check_hadamard(setting.head_dim)

    @classmethod
    def ratios(cls, requested: Sequence[float]) -> Sequence[float]:
        return [bits / 16 for bits in cls.widths]

    @property
    def rounded_layers(self) -> range:
        """Return the layers that are not in 16 bits."""
        skipped = min(SKIPPED, self.setting.layers // 2)
        return range(skipped, self.setting.layers - skipped)

    def nbytes(self, tokens: int) -> int:
        setting, rounded = self.setting, len(self.rounded_layers)
        codes = packed_bytes(setting.head_dim, self.bits)
        of_head = 2 * codes + SCALE_BYTES + 2 * SCALE_BYTES  # norm of a key; range of a value
        exact = setting.stock_bytes(tokens) // setting.layers * (setting.layers - rounded)
        return exact + rounded * tokens * setting.features // setting.head_dim * of_head

    def new_cache(self) -> Cache:
        of_keys = partial(reconstructed, bits=self.bits)
        of_values = TokenIntegers(self.bits, self.setting.head_dim).reconstruct
        layers = [
            RoundedLayer(of_keys, of_values) if index in self.rounded_layers else DynamicLayer()
            for index in range(self.setting.layers)
        ]
        return Cache(layers=layers)
