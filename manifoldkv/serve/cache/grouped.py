"""Keys and values of a layer whose head groups have bases, without predictors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from manifoldkv.models.interface import AttentionSettings
from manifoldkv.models.rotary import Angles
from manifoldkv.plan.predictor import PredictorContext
from manifoldkv.serve.cache.latents import RunningBasis, scores_of
from manifoldkv.serve.cache.layers import CompressedLayer
from manifoldkv.serve.cache.sites import Seen, Sites, split_tile, tile_tokens
from manifoldkv.serve.cache.storage import ExactStore, Store, split_tiles


class GroupedSites(Sites):
    """Keys stored after rotation are scored as latents; before rotation, they are up-projected.

    Parameters
    ----------
    key, value : RunningBasis
        Bases of the layer's keys and values.
    """

    def __init__(self, key: RunningBasis, value: RunningBasis) -> None:
        self._key = key
        self._value = value

    def store(
        self, layer: CompressedLayer, keys: Tensor, values: Tensor, context: PredictorContext
    ) -> None:
        layer.advance(keys.shape[2])
        layer.key_store.append(self._key.latents(keys))
        layer.value_store.append(self._value.latents(values))

    def scores(
        self,
        layers: Sequence[CompressedLayer],
        queries: Tensor,
        angles: Angles | None,
        seen: Seen,
    ) -> Iterator[Tensor]:
        if angles is None:
            queries = self._key.queries(queries)
            for _, _, latents in _tiles(layers[0].key_store, seen, tile_tokens(queries)):
                yield self._key.scores(queries, latents)
            return
        for start, stop, keys in self.keys(layers, seen, tile_tokens(queries)):
            yield scores_of(queries, angles.tile(keys.to(angles.cos.dtype), start, stop))

    def mix(self, layers: Sequence[CompressedLayer], weights: Tensor, seen: Seen) -> Tensor:
        mixed = weights.new_zeros(*weights.shape[:3], self._value.features)
        for start, stop, latents in _tiles(layers[0].value_store, seen, tile_tokens(mixed)):
            mixed = mixed + self._value.mix(weights[..., start:stop], latents)
        return self._value.finish(mixed, weights[..., : seen.latents])

    def keys(
        self, layers: Sequence[CompressedLayer], seen: Seen, size: int
    ) -> Iterator[tuple[int, int, Tensor]]:
        for start, stop, latents in _tiles(layers[0].key_store, seen, size):
            for first, last in split_tiles(start, stop, size):
                yield first, last, self._key.up_project(split_tile(latents, start, first, last))

    def values(self, layers: Sequence[CompressedLayer], seen: Seen, size: int) -> Iterator[Tensor]:
        for _, _, latents in _tiles(layers[0].value_store, seen, size):
            yield self._value.up_project(latents)

    def fits_kernel(self, layer: CompressedLayer, settings: AttentionSettings) -> bool:
        return (
            all(isinstance(store, ExactStore) for store in layer.stores)
            and self._key.grouping.width == self._value.grouping.width
            and self._key.features == self._value.features
            and settings.softcap is None
            and settings.sinks is None
        )

    def attend_to_latents(self, layer: CompressedLayer, queries: Tensor, seen: Seen) -> Tensor:
        _, _, keys = next(_tiles(layer.key_store, seen, seen.latents))
        _, _, values = next(_tiles(layer.value_store, seen, seen.latents))
        by_group = self._key.queries(queries)  # (B, G, w·R, w·r)
        mask = seen.mask
        if mask is not None:
            mask = mask.repeat(1, 1, by_group.shape[2] // mask.shape[2], 1)
        mixed = scaled_dot_product_attention(by_group, keys, values, attn_mask=mask, scale=1.0)
        return self._value.finish(self._value.split_groups(mixed))


def _tiles(store: Store, seen: Seen, size: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the visible latents by tile."""
    if not seen.latents:
        return
    for start, stop, latents in store.tiles(seen.offset, size):
        stop = min(stop, seen.latents)
        if start < stop:
            yield start, stop, latents[:, :, : stop - start]
