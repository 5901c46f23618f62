"""HIGGS: rotated blocks in one codebook for Gaussian pairs (Malinovskii et al., 2411.17525)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import Cache

from manifoldkv.plan.formats.integers import packed_bytes
from manifoldkv.plan.formats.quantizer import SCALE_BYTES
from methods.base import Setting, register_method
from methods.grids import nearest_word, plane_codebook, randomized_hadamard
from methods.rounding import RoundedLayer, RoundingMethod

WIDTHS = (4, 3, 2)


@dataclass(frozen=True)
class Higgs:
    """A format of the features of a token.

    Blocks of features are turned by a randomized Hadamard matrix and divided by a scale, the root
    of their mean square in float16, so that their coordinates are about N(0, 1) whatever the
    features are. Neighbouring pairs are stored as the index of the nearest word of
    `plane_codebook`. The code released with AQUA-KV has no random signs, scales in float32, and
    blocks of 1,024 features, to which it pads a token with zeros.

    Parameters
    ----------
    features : int
        Features of a token, F. A block has as many as the largest power of two that divides F.
    bits : int
        Bits of a feature; a pair has one code of twice as many.
    seed : int
        Seed of the signs.
    """

    features: int
    bits: int
    seed: int

    @property
    def block(self) -> int:
        """Return the number of features that share a scale."""
        return self.features & -self.features

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes (..., F / 2), uint8, and scales (..., F / block), float16, of x (..., F)."""
        blocks = x.float().unflatten(-1, (-1, self.block))
        scales = blocks.square().mean(dim=-1).sqrt().half()
        divisors = torch.where(scales > 0, scales, 1).float().unsqueeze(-1)
        turned = blocks @ self._rotation(x) / divisors
        codes = nearest_word(turned.reshape(-1, 2), plane_codebook(self.bits).to(x.device))
        return codes.to(torch.uint8).view(*x.shape[:-1], -1), scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the features (..., F), float32."""
        words = plane_codebook(self.bits).to(codes.device)[codes.long()].flatten(-2)
        blocks = words.unflatten(-1, (-1, self.block)) @ self._rotation(words).mT
        return (blocks * scales.float().unsqueeze(-1)).flatten(-2)

    def reconstruct(self, x: Tensor) -> Tensor:
        """Return the reconstruction of features (..., F), in their dtype."""
        return self.decode(*self.encode(x)).to(x.dtype)

    @property
    def nbytes(self) -> int:
        """Return the bytes of a token, codes packed and scales."""
        codes = packed_bytes(self.block // 2, 2 * self.bits)
        return self.features // self.block * (codes + SCALE_BYTES)

    def _rotation(self, like: Tensor) -> Tensor:
        return randomized_hadamard(self.block, self.seed).to(like.device)


@register_method("higgs")
class HIGGS(RoundingMethod):
    """HIGGS alone: Hadamard blocks of a token, pairs in a Gaussian codebook of 4, 3 and 2 bits.

    Every token is rounded when it is appended, keys after rotation. Simulated: the cache holds
    reconstructions, and the bytes are those of packed codes.
    """

    def __init__(self, setting: Setting, ratio: float) -> None:
        super().__init__(setting, ratio)
        self.format = Higgs(setting.features, round(16 * ratio), setting.seed)

    @classmethod
    def ratios(cls, requested: Sequence[float]) -> Sequence[float]:
        return [bits / 16 for bits in WIDTHS]

    def nbytes(self, tokens: int) -> int:
        return 2 * self.setting.layers * tokens * self.format.nbytes

    def new_cache(self) -> Cache:
        rounded = partial(of_tokens, self.format)
        return Cache(layers=[RoundedLayer(rounded, rounded) for _ in range(self.setting.layers)])


def of_tokens(format_: Higgs, x: Tensor) -> Tensor:
    """Return the reconstruction of x (B, H_kv, n, d), all heads of a token together."""
    features = x.transpose(1, 2)
    return format_.reconstruct(features.flatten(2)).view_as(features).transpose(1, 2)
