"""xKV: one subspace for the layers of a group, found for every text (Chang et al.)."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from manifoldkv.core.errors import ArgumentError
from methods.base import register_method
from methods.windows import WindowMethod

GROUP = 4
"""Neighbouring layers of a subspace."""
SHARES = (0.4, 0.6)
"""Shares of keys and of values in the ranks, as 512 and 768 in the paper."""


@register_method("xkv")
class XKV(WindowMethod):
    """xKV: keys, and values, of 4 neighbouring layers side by side in one subspace of each text.

    Chang et al., arXiv:2503.18893. The keys before rotation of all heads of `GROUP` layers are one
    matrix, (tokens, 4 F), which its singular value decomposition cuts to a rank; values likewise.
    Both factors belong to the text and are counted, in 16 bits. The decomposition is that of the
    uncompressed text as a whole, later tokens included, which is in its favour. Tokens after a
    prompt stay uncompressed in the paper; the newest 32, of a prompt too, stand for them. The rank
    of a last group of fewer layers is smaller in proportion; in the released code it is not.
    """

    sinks = 0
    recent = 32
    adapts: ClassVar[bool] = True

    _axes: tuple[list[Tensor], list[Tensor]]
    """Axes of every group of layers, (B, layers · F, rank), of keys and of values."""

    @cached_property
    def ranks(self) -> tuple[list[int], list[int]]:
        """The ranks of keys and of values by group of layers."""
        tokens, left = self.budget()
        features = self.setting.features
        sizes = [len(layers) for layers in torch.arange(self.setting.layers).split(GROUP)]
        by_layer = left / (2 * sum(size * (tokens + size * features) for size in sizes))
        keys, values = ([int(share * by_layer * size) for size in sizes] for share in SHARES)
        if not min(keys):
            raise ArgumentError(
                f"ratio {self.ratio:g} leaves no rank for keys of {tokens} tokens: ask for a "
                "larger ratio or a longer window"
            )
        return keys, values

    def coded_bytes(self, tokens: int) -> int:
        groups = torch.arange(self.setting.layers).split(GROUP)
        return sum(
            2 * rank * (tokens + len(layers) * self.setting.features)
            for ranks in self.ranks
            for rank, layers in zip(ranks, groups, strict=True)
        )

    def adapt(self, keys: Tensor, values: Tensor) -> None:
        of_keys, of_values = self.ranks
        self._axes = axes_of(keys, of_keys), axes_of(values, of_values)

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        of_keys, of_values = self._axes
        return projected(keys, of_keys), projected(values, of_values)


def axes_of(x: Tensor, ranks: list[int]) -> list[Tensor]:
    """Return the right singular vectors of every group of layers of x (layers, B, n, F)."""
    axes = []
    for layers, rank in zip(x.split(GROUP), ranks, strict=True):
        joined = layers.permute(1, 2, 0, 3).flatten(2).double()
        vectors = torch.linalg.eigh(joined.mT @ joined).eigenvectors  # by rising singular value
        axes.append(vectors[..., max(0, vectors.shape[-1] - rank) :].to(x.dtype))
    return axes


def projected(x: Tensor, axes: list[Tensor]) -> Tensor:
    """Return x (layers, B, n, F) in the subspaces of its groups of layers."""
    parts = []
    for layers, basis in zip(x.split(GROUP), axes, strict=True):
        joined = layers.permute(1, 2, 0, 3).flatten(2)
        held = joined @ basis @ basis.mT
        parts.append(held.unflatten(2, (len(layers), -1)).permute(2, 0, 1, 3))
    return torch.cat(parts)
