"""Keys and values of a layer as linear maps of latents, those of the layers below included.

A value is linear in latents and is not rotated: attention weights mix latents, and the mixtures are
mapped once per query. No value is reconstructed while decoding. Keys are reconstructed by tile,
before rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from manifoldkv.basis import SITES, Site
from manifoldkv.cache.latents import scores_of
from manifoldkv.cache.layers import CompressedLayer
from manifoldkv.cache.sites import Seen, Sites, tile_tokens
from manifoldkv.cache.storage import Store, constant_dtype, split_tiles, working_dtype
from manifoldkv.coding.predictor import Input, PredictorContext
from manifoldkv.models.rotary import Angles
from manifoldkv.plan.composition import Composer
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.site import SitePlan

Maps = dict[Input, Tensor]
"""Map of the latents of every site, (features, latents); sites are counted downwards."""
Constant = Callable[[Tensor], Tensor]


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
        layers, plan = composer.layers, composer.layers[index]
        self._grouping = plan.key.grouping
        self._working = working_dtype(dtype, device)
        rounded, held = constant_dtype(dtype), self._held_dtype(dtype, device)

        def constant(x: Tensor) -> Tensor:
            return x.to(device, rounded).to(held).contiguous()

        def stored(one: Input, part: Tensor) -> Tensor:
            below, site = one
            return part[:, : layers[index - below].of(site).latents]

        key, value = composer.key_map(index), composer.linear_map(index, "value")
        self._key_predicted = {
            one: constant(stored(one, part)) for one, part in key.predicted.items()
        }
        self._key_mean = key.mean.to(device, self._working)
        by_source = {one: constant(stored(one, part)) for one, part in value.maps.items()}
        self._columns = _columns({one: part.shape[1] for one, part in by_source.items()})
        mean = value.mean.to(device, held).unsqueeze(1)
        joined = torch.cat([mean, *by_source.values()], dim=1)  # (D, 1 + r)
        self._values = joined.unflatten(0, (self._grouping.heads, -1)).mT.contiguous()
        """Mean and maps of the values by head, (H_kv, 1 + r, d)."""
        self._key_up = constant(stored((0, "key"), key.up).mT)  # (r, D)
        ups = {"key": self._key_up, "value": self._values[:, self._columns[0, "value"]]}
        self._new = [
            self._new_tokens(
                planned, ups[site], constant, self._working, is_input=_is_input(layers, index, site)
            )
            for site, planned in plan.sites
        ]
        expansion = self._new[0].expansion
        self._key_expansion = None if expansion is None else expansion.mT  # (D, rank)

    def _held_dtype(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """Return the dtype in which constants are held."""
        return constant_dtype(dtype)

    def _new_tokens(
        self,
        planned: SitePlan,
        up: Tensor,
        constant: Constant,
        working: torch.dtype,
        *,
        is_input: bool,
    ) -> NewTokens:
        return NewTokens(planned, up, constant, working, is_input=is_input)

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
        mixed = weights.new_zeros(*weights.shape[:3], self._values.shape[1])
        mixed[..., 0] = weights.sum(dim=-1)
        for one, columns in self._columns.items():
            store, part = store_of(layers, one), mixed[..., columns]
            for start, stop in split_tiles(0, seen.latents, tile_tokens(part)):
                latents = visible(layers, store, seen, start, stop).to(self._working)
                part += weights[..., start:stop] @ latents[..., : part.shape[3]]
        return mixed @ self._values.to(self._working)

    def keys(
        self, layers: Sequence[CompressedLayer], seen: Seen, size: int
    ) -> Iterator[tuple[int, int, Tensor]]:
        own: Maps = {(0, SITES[0]): self._key_up.to(self._working).mT}
        predicted = {one: x.to(self._working) for one, x in self._prediction().items()}
        for start, stop in split_tiles(0, seen.latents, size):
            x = self._sum(own, layers, seen, start, stop)
            if predicted:
                of_others = self._sum(predicted, layers, seen, start, stop)
                if self._key_expansion is not None:
                    of_others = self._key_expansion.to(self._working) @ of_others
                x = x + of_others
            yield start, stop, self._by_head(x + self._key_mean.unsqueeze(1))

    def values(self, layers: Sequence[CompressedLayer], seen: Seen, size: int) -> Iterator[Tensor]:
        joined = self._values.to(self._working).mT.flatten(0, 1)  # (D, 1 + r)
        maps = {one: joined[:, columns] for one, columns in self._columns.items()}
        for start, stop in split_tiles(0, seen.latents, size):
            x = self._sum(maps, layers, seen, start, stop)
            yield self._by_head(x + joined[:, :1])

    def _prediction(self) -> Maps:
        """Return the maps of latents of other sites to the prediction of keys, (rank, r) each."""
        return self._key_predicted

    def _sum(
        self, maps: Maps, layers: Sequence[CompressedLayer], seen: Seen, start: int, stop: int
    ) -> Tensor:
        """Return the sum of maps of latents, (B, features, t).

        Tokens are last in memory, so that operations on a feature run over neighbours.
        """
        total: Tensor | None = None
        for one, part in maps.items():
            latents = visible(layers, store_of(layers, one), seen, start, stop)[:, 0].mT
            by_row = part.expand(len(latents), -1, -1)
            latents = latents[:, : part.shape[1]]
            total = by_row @ latents if total is None else total.baddbmm_(by_row, latents)
        assert total is not None  # there is a map of the site's own latents
        return total

    def _by_head(self, x: Tensor) -> Tensor:
        """Separate the heads of (B, D, t): (B, H_kv, t, d)."""
        return self._grouping.merge(x.mT.unsqueeze(1))


class NewTokens:
    """Encoding of new tokens of a site, and their reconstruction if predictors need it.

    Parameters
    ----------
    planned : SitePlan
        Of the site, in mixed widths.
    up : Tensor
        Up-projection of the r stored latents, (r, D), or by head, (H_kv, r, d), which the attention
        of the layer holds.
    constant : callable
        Returns a tensor in the dtype in which it is held.
    working : torch.dtype
        Of products.
    is_input : bool
        Whether a predictor has the site as an input.
    """

    def __init__(
        self,
        planned: SitePlan,
        up: Tensor,
        constant: Constant,
        working: torch.dtype,
        *,
        is_input: bool,
    ) -> None:
        predictor = planned.predictor
        self._down = constant(planned.basis.down[0][:, : planned.latents].mT)  # (r, D)
        self._up = up
        mean = torch.zeros(planned.features) if planned.mean is None else planned.mean
        self._mean = mean.to(self._down.device, working).view(1, 1, -1)
        self._inputs = () if predictor is None else predictor.inputs
        factors = [] if predictor is None else [predictor.weights, predictor.expansion]
        self._factors = [constant(x) for x in factors if x is not None]
        self.expansion = self._factors[1] if len(self._factors) > 1 else None
        """Second factor of a predictor of low rank, (rank, D)."""
        self._is_input = is_input

    def store(self, store: Store, x: Tensor, context: PredictorContext) -> Tensor:
        """Store new keys or values (B, m, D), and return their reconstruction.

        It is empty if no predictor has it as an input.
        """
        x = x.to(self._mean.dtype)
        predicted = self._predicted(context)
        expected = self._mean if predicted is None else predicted + self._mean
        latents = self._append(store, x, expected)
        if not self._is_input:
            return x[:0]
        up = self._up.to(latents.dtype)
        if up.ndim == 2:
            return latents @ up + expected
        return (latents.unsqueeze(1) @ up).transpose(1, 2).flatten(2) + expected

    def _append(self, store: Store, x: Tensor, expected: Tensor) -> Tensor:
        """Store what x (B, m, D) is beyond expected, and return the reconstructed latents.

        They are (B, m, r); those before rounding if they are no inputs.
        """
        latents = (x - expected) @ self._down.to(x.dtype).mT
        if not self._is_input:
            store.append(latents.unsqueeze(1))
            return latents
        return store.append_and_read(latents.unsqueeze(1))[:, 0, :, : latents.shape[2]]

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


def _columns(latents: dict[Input, int]) -> dict[Input, slice]:
    """Return the columns of every source's latents after a first one."""
    stops = list(accumulate(latents.values(), initial=1))
    return {one: slice(*ends) for one, ends in zip(latents, pairwise(stops), strict=True)}


def _is_input(layers: Sequence[LayerPlan], index: int, site: Site) -> bool:
    """Return whether a predictor of this layer or of one above has a site as an input."""
    return any(
        planned.predictor is not None and (above, site) in planned.predictor.inputs
        for above, layer in enumerate(layers[index:])
        for _, planned in layer.sites
    )
