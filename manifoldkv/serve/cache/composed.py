"""Keys and values of a layer as linear maps of latents, those of the layers below included.

A value is linear in latents and is not rotated: attention weights mix latents, and the mixtures are
mapped once per query. No value is reconstructed while decoding. Keys are reconstructed by tile,
before rotation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from manifoldkv.core.basis import Site
from manifoldkv.models.rotary import Angles
from manifoldkv.plan.composition import Composer
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.predictor import Input, PredictorContext
from manifoldkv.plan.site import SitePlan
from manifoldkv.serve.cache.latents import RunningBasis, scores_of
from manifoldkv.serve.cache.layers import CompressedLayer
from manifoldkv.serve.cache.sites import Seen, Sites, tile_tokens
from manifoldkv.serve.cache.storage import Store, constant_dtype, split_tiles

Maps = dict[Input, Tensor]
"""Map of the latents of every site, (features, latents); sites are counted downwards."""


class ComposedSites(Sites):
    """Keys before rotation and values of one layer of a plan, with bases of all heads.

    Parameters
    ----------
    composer : Composer
        Of all layers of the plan.
    index : int
        Of the layer.
    dtype : torch.dtype
        Of the model.
    device : torch.device
        Of the layer.
    """

    def __init__(
        self, composer: Composer, index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layers = composer.layers
        plan = layers[index]
        self._grouping = plan.key.grouping
        self._new = [
            self._new_tokens(planned, dtype, device, is_input=_is_input(layers, index, site))
            for site, planned in plan.sites
        ]
        self._working = self._new[0].basis.working
        held = constant_dtype(dtype)

        def to_device(maps: Maps) -> Maps:
            return {one: part.to(device, held) for one, part in maps.items()}

        key, value = composer.key_map(index), composer.linear_map(index, "value")
        self._key_up = key.up.to(device, held)
        self._key_predicted = to_device(key.predicted)
        self._key_expansion = None if key.expansion is None else key.expansion.to(device, held)
        self._key_mean = key.mean.to(device, self._working)
        self._value_maps = to_device(value.maps)
        self._value_mean = value.mean.to(device, self._working)

    def _new_tokens(
        self, planned: SitePlan, dtype: torch.dtype, device: torch.device, *, is_input: bool
    ) -> NewTokens:
        return NewTokens(planned, dtype, device, is_input=is_input)

    def store(
        self, layer: CompressedLayer, keys: Tensor, values: Tensor, context: PredictorContext
    ) -> None:
        layer.advance(keys.shape[2])
        for new, store, x in zip(
            self._new, (layer.key_store, layer.value_store), (keys, values), strict=True
        ):
            context.add(new.store(store, self._grouping.split(x)[:, 0], context))

    def scores(
        self,
        layers: Sequence[CompressedLayer],
        queries: Tensor,
        angles: Angles | None,
        seen: Seen,
    ) -> Iterator[Tensor]:
        assert angles is not None  # keys are stored before rotation
        for start, stop, keys in self.keys(layers, seen, tile_tokens(queries)):
            yield scores_of(queries, angles.tile(keys.to(angles.cos.dtype), start, stop))

    def mix(self, layers: Sequence[CompressedLayer], weights: Tensor, seen: Seen) -> Tensor:
        weights = weights[..., : seen.latents].to(self._working)
        heads = weights.shape[1]
        mean = self._value_mean.view(heads, 1, -1)  # (H_kv, 1, d)
        output = weights.sum(dim=-1, keepdim=True) * mean
        for one, value_map in self._value_maps.items():
            mixed = weights.new_zeros(*weights.shape[:3], value_map.shape[1])
            store = store_of(layers, one)
            for start, stop in split_tiles(0, seen.latents, tile_tokens(mixed)):
                latents = visible(layers, store, seen, start, stop).to(self._working)
                mixed += weights[..., start:stop] @ latents
            by_head = value_map.to(self._working).unflatten(0, (heads, -1))  # (H_kv, d, r)
            output = output + mixed @ by_head.mT
        return output

    def keys(
        self, layers: Sequence[CompressedLayer], seen: Seen, size: int
    ) -> Iterator[tuple[int, int, Tensor]]:
        up = self._key_up.to(self._working)
        for start, stop in split_tiles(0, seen.latents, size):
            # Tokens last, so that operations on a feature run over neighbours.
            x = up @ visible(layers, layers[0].key_store, seen, start, stop)[:, 0].mT
            if self._key_predicted:
                predicted = self._sum(self._key_predicted, layers, seen, start, stop)
                if self._key_expansion is not None:
                    predicted = self._key_expansion.to(self._working) @ predicted
                x = x + predicted
            yield start, stop, self._by_head(x + self._key_mean.unsqueeze(1))

    def values(self, layers: Sequence[CompressedLayer], seen: Seen, size: int) -> Iterator[Tensor]:
        for start, stop in split_tiles(0, seen.latents, size):
            x = self._sum(self._value_maps, layers, seen, start, stop)
            yield self._by_head(x + self._value_mean.unsqueeze(1))

    def _sum(
        self, maps: Maps, layers: Sequence[CompressedLayer], seen: Seen, start: int, stop: int
    ) -> Tensor:
        """Return the sum of maps of latents, (B, features, t)."""
        total: Tensor | None = None
        for one, part in maps.items():
            latents = visible(layers, store_of(layers, one), seen, start, stop)[:, 0].mT
            by_row = part.to(self._working).expand(len(latents), -1, -1)
            total = by_row @ latents if total is None else total.baddbmm_(by_row, latents)
        assert total is not None  # there is a map of the site's own latents
        return total

    def _by_head(self, x: Tensor) -> Tensor:
        """Separate the heads of (B, D, t): (B, H_kv, t, d)."""
        return self._grouping.merge(x.mT.unsqueeze(1))


class NewTokens:
    """Encoding of new tokens of a site, and their reconstruction if predictors need it."""

    def __init__(
        self, planned: SitePlan, dtype: torch.dtype, device: torch.device, *, is_input: bool
    ) -> None:
        self.basis = RunningBasis(planned.basis, dtype, device, planned.mean)
        predictor, held = planned.predictor, constant_dtype(dtype)
        self._inputs = () if predictor is None else predictor.inputs
        factors = [] if predictor is None else [predictor.weights, predictor.expansion]
        self._factors = [x.to(device, held) for x in factors if x is not None]
        self._is_input = is_input

    def store(self, store: Store, x: Tensor, context: PredictorContext) -> Tensor:
        """Store new keys or values (B, m, D), and return their reconstruction.

        It is empty if no predictor has it as an input.
        """
        x = x.to(self.basis.working)
        predicted = self._predicted(context)
        latents = self._latents(x, predicted)
        if not self._is_input:
            store.append(latents)
            return x[:0]
        latents = store.append_and_read(latents)
        reconstruction = self.basis.up_project_groups(latents)[:, 0]
        return reconstruction if predicted is None else reconstruction + predicted

    def _latents(self, x: Tensor, predicted: Tensor | None) -> Tensor:
        """Return the latents of keys or values less their prediction, (B, 1, m, r)."""
        residual = x if predicted is None else x - predicted
        return self.basis.latents_of_groups(residual.unsqueeze(1))

    def _predicted(self, context: PredictorContext) -> Tensor | None:
        if not self._inputs:
            return None
        inputs = context.of(self._inputs)
        predicted = inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=-1)
        for factor in self._factors:
            predicted = predicted @ factor.to(predicted.dtype)
        return predicted


def store_of(layers: Sequence[CompressedLayer], one: Input) -> Store:
    """Return the store of a site of the layer or of one below."""
    below, site = one
    return layers[below].key_store if site == "key" else layers[below].value_store


def visible(
    layers: Sequence[CompressedLayer], store: Store, seen: Seen, start: int, stop: int
) -> Tensor:
    """Return visible latents `start` to `stop` of a store, (B, 1, t, latents)."""
    first = offset_of(layers, store, seen)
    return store.read(first + start, first + stop)


def offset_of(layers: Sequence[CompressedLayer], store: Store, seen: Seen) -> int:
    """Return the first visible token in a store: all stores hold the same newest tokens."""
    return len(store) - (layers[0].tokens_held - seen.offset)


def _is_input(layers: Sequence[LayerPlan], index: int, site: Site) -> bool:
    """Return whether a predictor of this layer or of one above has a site as an input."""
    return any(
        planned.predictor is not None and (above, site) in planned.predictor.inputs
        for above, layer in enumerate(layers[index:])
        for _, planned in layer.sites
    )
