"""Attention over latents of coded plans by torch, on any device.

A value is linear in latents and is not rotated: attention weights mix latents, and the mixtures are
mapped once per query. No value is reconstructed while decoding. Keys are reconstructed by tile,
before rotation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from manifoldkv.core.basis import SITES
from manifoldkv.models.interface import AttentionSettings
from manifoldkv.models.rotary import Angles
from manifoldkv.plan.composition import Composer
from manifoldkv.plan.predictor import PredictorContext
from manifoldkv.serve.cache.backend import AttentionBackend, Seen, attend_by_scores, tile_tokens
from manifoldkv.serve.cache.latents import scores_of
from manifoldkv.serve.cache.layers import CompressedLayer
from manifoldkv.serve.cache.maps import LayerMaps, Maps, offset_of, store_of
from manifoldkv.serve.cache.storage import Store, Tile, constant_dtype, split_tiles


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

    def attend(
        self,
        layers: Sequence[CompressedLayer],
        queries: Tensor,
        seen: Seen,
        angles: Angles | None,
        settings: AttentionSettings,
    ) -> Tensor:
        scores = partial(self._scores, layers, seen, angles)
        mix = partial(self._mix, layers, seen)
        heads = self._maps.grouping.heads
        return attend_by_scores(queries, heads, seen, settings, scores, mix)

    def reconstruct(
        self, layers: Sequence[CompressedLayer], seen: Seen, angles: Angles | None, size: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        assert angles is not None  # keys are stored before rotation
        of_keys = self._keys(layers, seen, size)
        keys = [angles.tile(x, start, stop) for start, stop, x in of_keys]
        joined = self._maps.values.to(self._maps.working).mT.flatten(0, 1)  # (D, 1 + r)
        maps = {one: joined[:, columns] for one, columns in self._maps.columns.items()}
        values = [
            self._by_head(_sum(maps, layers, seen, *tile) + joined[:, :1])
            for tile in split_tiles(0, seen.latents, size)
        ]
        return keys, values

    def _scores(
        self,
        layers: Sequence[CompressedLayer],
        seen: Seen,
        angles: Angles | None,
        queries: Tensor,
    ) -> Iterator[Tensor]:
        assert angles is not None
        for start, stop, keys in self._keys(layers, seen, tile_tokens(queries)):
            yield scores_of(queries, angles.tile(keys.to(angles.cos.dtype), start, stop))

    def _mix(self, layers: Sequence[CompressedLayer], seen: Seen, weights: Tensor) -> Tensor:
        weights, values = weights[..., : seen.latents].to(self._maps.working), self._maps.values
        mixed = weights.new_zeros(*weights.shape[:3], values.shape[1])
        mixed[..., 0] = weights.sum(dim=-1)
        for one, columns in self._maps.columns.items():
            store, part = store_of(layers, one), mixed[..., columns]
            for start, stop in split_tiles(0, seen.latents, tile_tokens(part)):
                latents = _visible(layers, store, seen, start, stop).to(weights.dtype)
                part += weights[..., start:stop] @ latents[..., : part.shape[3]]
        return mixed @ values.to(mixed.dtype)

    def _keys(self, layers: Sequence[CompressedLayer], seen: Seen, size: int) -> Iterator[Tile]:
        """Yield reconstructed keys before rotation, (B, H_kv, t, d)."""
        maps, working = self._maps, self._maps.working
        own: Maps = {(0, SITES[0]): maps.key_up.to(working).mT}
        predicted = {one: x.to(working) for one, x in maps.predicted.items()}
        for start, stop in split_tiles(0, seen.latents, size):
            x = _sum(own, layers, seen, start, stop)
            if predicted:
                of_others = _sum(predicted, layers, seen, start, stop)
                if maps.key_expansion is not None:
                    of_others = maps.key_expansion.to(working) @ of_others
                x = x + of_others
            yield start, stop, self._by_head(x + maps.key_mean.unsqueeze(1))

    def _by_head(self, x: Tensor) -> Tensor:
        """Separate the heads of (B, D, t): (B, H_kv, t, d)."""
        return self._maps.grouping.merge(x.mT.unsqueeze(1))


def _sum(
    maps: Maps, layers: Sequence[CompressedLayer], seen: Seen, start: int, stop: int
) -> Tensor:
    """Return the sum of maps of latents, (B, features, t).

    Tokens are last in memory, so that operations on a feature run over neighbours.
    """
    total: Tensor | None = None
    for one, part in maps.items():
        latents = _visible(layers, store_of(layers, one), seen, start, stop)[:, 0].mT
        by_row = part.expand(len(latents), -1, -1)
        latents = latents[:, : part.shape[1]]
        total = by_row @ latents if total is None else total.baddbmm_(by_row, latents)
    assert total is not None  # there is a map of the layer's own latents
    return total


def _visible(
    layers: Sequence[CompressedLayer], store: Store, seen: Seen, start: int, stop: int
) -> Tensor:
    """Return visible latents `start` to `stop` of a store, (B, 1, t, latents)."""
    first = offset_of(layers, store, seen)
    return store.read(first + start, first + stop)
