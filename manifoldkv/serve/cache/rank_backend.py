"""Attention over latents of head groups whose bases have a rank, without predictors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from manifoldkv.models.interface import AttentionSettings
from manifoldkv.plan.composition import Composer
from manifoldkv.plan.predictor import PredictorContext
from manifoldkv.serve.cache.backend import (
    AttentionBackend,
    Seen,
    attend_by_scores,
    split_queries,
    tile_tokens,
)
from manifoldkv.serve.cache.latents import RunningBasis, scores_of
from manifoldkv.serve.cache.layers import CompressedLayer
from manifoldkv.serve.cache.storage import ExactStore, Store, Tile, split_tiles


class RankBackend(AttentionBackend):
    """Keys stored after rotation are scored as latents; before rotation, they are up-projected.

    Parameters
    ----------
    key, value : RunningBasis
        Bases of the layer's keys and values.
    """

    def __init__(self, key: RunningBasis, value: RunningBasis) -> None:
        self._key = key
        self._value = value
        self._heads = key.grouping.heads

    @classmethod
    def of(
        cls, composer: Composer, index: int, dtype: torch.dtype, device: torch.device
    ) -> RankBackend:
        tensors = composer.layers[index].sites
        return cls(*(RunningBasis(x.basis, dtype, device, x.mean) for _, x in tensors))

    def store(
        self, layer: CompressedLayer, keys: Tensor, values: Tensor, context: PredictorContext
    ) -> None:
        layer.advance(keys.shape[2])
        layer.key_store.append(self._key.latents(keys))
        layer.value_store.append(self._value.latents(values))

    def attend(self, queries: Tensor, seen: Seen, settings: AttentionSettings) -> Tensor:
        if self.attends_to_latents(seen, settings):
            return self._attend_to_latents(queries, seen, settings.scaling)
        scores, mix = partial(self._scores, seen), partial(self._mix, seen)
        return attend_by_scores(queries, self._heads, seen, settings, scores, mix)

    def reconstruct(self, seen: Seen, size: int) -> tuple[list[Tensor], list[Tensor]]:
        keys = [seen.rotated(x, start, stop) for start, stop, x in self._keys(seen, size)]
        values = _tiles(seen.layers[0].value_store, seen, size)
        return keys, [self._value.up_project(latents) for _, _, latents in values]

    def _scores(self, seen: Seen, queries: Tensor) -> Iterator[Tensor]:
        if seen.angles is None:
            queries = self._key.queries(queries)
            for _, _, latents in _tiles(seen.layers[0].key_store, seen, tile_tokens(queries)):
                yield self._key.scores(queries, latents)
            return
        for start, stop, keys in self._keys(seen, tile_tokens(queries)):
            yield scores_of(queries, seen.rotated(keys.to(seen.angles.cos.dtype), start, stop))

    def _mix(self, seen: Seen, weights: Tensor) -> Tensor:
        mixed = weights.new_zeros(*weights.shape[:3], self._value.features)
        for start, stop, latents in _tiles(seen.layers[0].value_store, seen, tile_tokens(mixed)):
            mixed = mixed + self._value.mix(weights[..., start:stop], latents)
        return self._value.finish(mixed, weights[..., : seen.latents])

    def _keys(self, seen: Seen, size: int) -> Iterator[Tile]:
        """Yield reconstructed keys (B, H_kv, t, d), before rotation if they are stored so."""
        for start, stop, latents in _tiles(seen.layers[0].key_store, seen, size):
            for first, last in split_tiles(start, stop, size):
                yield first, last, self._key.up_project(latents[:, :, first - start : last - start])

    def attends_to_latents(self, seen: Seen, settings: AttentionSettings) -> bool:
        return (
            seen.angles is None
            and not seen.exact
            and all(isinstance(store, ExactStore) for store in seen.layers[0].stores)
            and self._key.grouping.width == self._value.grouping.width
            and self._key.features == self._value.features
            and settings.is_plain
        )

    def _attend_to_latents(self, queries: Tensor, seen: Seen, scaling: float) -> Tensor:
        """Run torch's kernel on latents, for the queries of all heads of a group."""
        _, _, keys = next(_tiles(seen.layers[0].key_store, seen, seen.latents))
        _, _, values = next(_tiles(seen.layers[0].value_store, seen, seen.latents))
        by_head = split_queries(queries, self._heads) * scaling
        by_group = self._key.queries(by_head)  # (B, G, w·R, w·r)
        mask = seen.mask
        if mask is not None:
            mask = mask.repeat(1, 1, by_group.shape[2] // mask.shape[2], 1)
        mixed = scaled_dot_product_attention(by_group, keys, values, attn_mask=mask, scale=1.0)
        return self._value.finish(self._value.split_groups(mixed)).reshape(*queries.shape[:3], -1)


def _tiles(store: Store, seen: Seen, size: int) -> Iterator[Tile]:
    """Yield the visible latents by tile."""
    if not seen.latents:
        return
    for start, stop, latents in store.tiles(len(store) - seen.newest, size):
        stop = min(stop, seen.latents)
        if start < stop:
            yield start, stop, latents[:, :, : stop - start]
