"""Attention over latents of coded plans by torch, on any device.

A value is linear in latents and is not rotated: attention weights mix latents, and the mixtures are
mapped once per query. No value is reconstructed while decoding. Keys are reconstructed by tile,
before rotation.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from manifoldkv.core.basis import SITES
from manifoldkv.models.interface import AttentionSettings
from manifoldkv.plan.composition import Composer
from manifoldkv.plan.predictor import PredictorContext
from manifoldkv.serve.cache.backend import AttentionBackend, Seen, attend_by_scores, tile_tokens
from manifoldkv.serve.cache.latents import scores_of
from manifoldkv.serve.cache.layers import CompressedLayer
from manifoldkv.serve.cache.maps import LayerMaps, Maps
from manifoldkv.serve.cache.storage import Tile, constant_dtype, split_tiles


class TorchBackend(AttentionBackend):
    """Attention by torch, over keys reconstructed before rotation and mixtures of latents.

    Parameters
    ----------
    maps : LayerMaps
        Of the layer.
    """

    def __init__(self, maps: LayerMaps) -> None:
        self._maps = maps

    @classmethod
    def of(
        cls, composer: Composer, index: int, dtype: torch.dtype, device: torch.device
    ) -> TorchBackend:
        held = constant_dtype(dtype)
        return cls(LayerMaps(composer, index, dtype, device, held, packed=False))

    def store(
        self, layer: CompressedLayer, keys: Tensor, values: Tensor, context: PredictorContext
    ) -> None:
        self._maps.store(layer, keys, values, context)

    def attend(self, queries: Tensor, seen: Seen, settings: AttentionSettings) -> Tensor:
        scores, mix = partial(self._scores, seen), partial(self._mix, seen)
        return attend_by_scores(queries, self._maps.heads, seen, settings, scores, mix)

    def reconstruct(self, seen: Seen, size: int) -> tuple[list[Tensor], list[Tensor]]:
        keys = [seen.rotated(x, start, stop) for start, stop, x in self._keys(seen, size)]
        joined = self._maps.values.to(self._maps.working).mT.flatten(0, 1)  # (D, 1 + r)
        maps = {one: joined[:, columns] for one, columns in self._maps.columns.items()}
        values = [
            self._by_head(_sum(maps, seen, *tile) + joined[:, :1])
            for tile in split_tiles(0, seen.latents, size)
        ]
        return keys, values

    def _scores(self, seen: Seen, queries: Tensor) -> Iterator[Tensor]:
        assert seen.angles is not None  # keys are stored before rotation
        for start, stop, keys in self._keys(seen, tile_tokens(queries)):
            yield scores_of(queries, seen.rotated(keys.to(seen.angles.cos.dtype), start, stop))

    def _mix(self, seen: Seen, weights: Tensor) -> Tensor:
        weights, values = weights[..., : seen.latents].to(self._maps.working), self._maps.values
        mixed = weights.new_zeros(*weights.shape[:3], values.shape[1])
        mixed[..., 0] = weights.sum(dim=-1)
        for one, columns in self._maps.columns.items():
            (store, first), part = seen.store(one), mixed[..., columns]
            for start, stop in split_tiles(0, seen.latents, tile_tokens(part)):
                latents = store.read(first + start, first + stop).to(weights.dtype)
                part += weights[..., start:stop] @ latents[..., : part.shape[3]]
        return mixed @ values.to(mixed.dtype)

    def _keys(self, seen: Seen, size: int) -> Iterator[Tile]:
        """Yield reconstructed keys before rotation, (B, H_kv, t, d)."""
        maps, working = self._maps, self._maps.working
        own: Maps = {(0, SITES[0]): maps.key_up.to(working).mT}
        predicted = {one: x.to(working) for one, x in maps.predicted.items()}
        for start, stop in split_tiles(0, seen.latents, size):
            x = _sum(own, seen, start, stop)
            if predicted:
                of_others = _sum(predicted, seen, start, stop)
                if maps.key_expansion is not None:
                    of_others = maps.key_expansion.to(working) @ of_others
                x = x + of_others
            yield start, stop, self._by_head(x + maps.key_mean.unsqueeze(1))

    def _by_head(self, x: Tensor) -> Tensor:
        """Separate the heads of (B, D, t): (B, H_kv, t, d)."""
        return self._maps.grouping.merge(x.mT.unsqueeze(1))


def _sum(maps: Maps, seen: Seen, start: int, stop: int) -> Tensor:
    """Return the sum of maps of latents, (B, features, t).

    Tokens are last in memory, so that operations on a feature run over neighbours.
    """
    total: Tensor | None = None
    for one, part in maps.items():
        store, first = seen.store(one)
        latents = store.read(first + start, first + stop)[:, 0].mT
        by_row = part.expand(len(latents), -1, -1)
        latents = latents[:, : part.shape[1]]
        total = by_row @ latents if total is None else total.baddbmm_(by_row, latents)
    assert total is not None  # there is a map of the layer's own latents
    return total
