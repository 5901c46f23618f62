"""Keys and values of a layer as linear maps of stored latents, predictors included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manifoldkv.core.basis import Site
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.predictor import Input, LinearPredictor

Maps = dict[Input, Tensor]
"""Matrix of the latents of every site, (features, latents), float64; sites are counted from the
layer downwards."""


@dataclass(frozen=True)
class LinearMap:
    """Reconstruction x = mean + Σ map · latents over all sites that it depends on.

    Parameters
    ----------
    maps : dict of Input to Tensor
        Maps by site, (D, latents) each, float64.
    mean : Tensor
        (D,), float64.
    """

    maps: Maps
    mean: Tensor

    def through(self, weights: Tensor) -> LinearMap:
        """Return the map of ``x @ weights``; `weights` are (D, outputs)."""
        weights = weights.double()
        maps = {one: weights.mT @ part for one, part in self.maps.items()}
        return LinearMap(maps, self.mean @ weights)

    def below(self, layers: int) -> LinearMap:
        """Return the map with sites counted from a layer higher up."""
        return LinearMap({(b + layers, site): x for (b, site), x in self.maps.items()}, self.mean)

    def __add__(self, other: LinearMap) -> LinearMap:
        maps = dict(self.maps)
        for one, part in other.maps.items():
            maps[one] = maps[one] + part if one in maps else part
        return LinearMap(maps, self.mean + other.mean)


@dataclass(frozen=True)
class KeyMap:
    """Keys x = mean + up · latents + expansion · Σ map · latents of other sites.

    Parameters
    ----------
    up : Tensor
        Of the layer's own latents, (D, latents), float64.
    predicted : dict of Input to Tensor
        Maps of the latents of other sites, (rank, latents) each, float64; empty without a
        predictor.
    expansion : Tensor or None
        (D, rank), float64; None for the identity, of a predictor of full rank.
    mean : Tensor
        (D,), float64.
    """

    up: Tensor
    predicted: Maps
    expansion: Tensor | None
    mean: Tensor


class Composer:
    """Linear maps of the sites of a plan, from the first layer to the last.

    Each map is composed of those of its inputs, which are held for the layers above.

    Parameters
    ----------
    layers : sequence of LayerPlan
        All layers of a plan, with bases of all heads.
    """

    def __init__(self, layers: Sequence[LayerPlan]) -> None:
        self.layers = layers
        self._maps: dict[Input, LinearMap] = {}
        predictors = [site.predictor for layer in layers for _, site in layer.sites]
        inputs = [one for predictor in predictors if predictor for one in predictor.inputs]
        self._reach = max((below for below, _ in inputs), default=0)

    def linear_map(self, index: int, site: Site) -> LinearMap:
        """Return the linear map of keys before rotation, or of values, of a layer."""
        if (index, site) not in self._maps:
            self._maps[index, site] = self._composed(index, site)
            for one in [one for one in self._maps if one[0] < index - self._reach]:
                del self._maps[one]
        return self._maps[index, site]

    def key_map(self, index: int) -> KeyMap:
        """Return the map of a layer's keys, with the prediction in factors."""
        whole, planned = self.linear_map(index, "key"), self.layers[index].key
        if planned.predictor is None:
            return KeyMap(whole.maps[0, "key"], {}, None, whole.mean)
        expansion = planned.predictor.expansion
        if expansion is None:
            predicted = {one: part for one, part in whole.maps.items() if one != (0, "key")}
        else:
            predicted = self._predicted(index, planned.predictor).maps
            expansion = expansion.double().mT
        return KeyMap(planned.basis.up[0].double(), predicted, expansion, whole.mean)

    def _predicted(self, index: int, predictor: LinearPredictor) -> LinearMap:
        """Return the map of a prediction, before its expansion."""
        parts = [
            self.linear_map(index - below, of_input).through(weights).below(below)
            for (below, of_input), weights in zip(predictor.inputs, predictor.parts, strict=True)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def _composed(self, index: int, site: Site) -> LinearMap:
        planned = self.layers[index].of(site)
        mean = torch.zeros(planned.features, dtype=torch.float64)
        if planned.mean is not None:
            mean = planned.mean.double()
        own = LinearMap({(0, site): planned.basis.up[0].double()}, mean)
        if planned.predictor is None:
            return own
        predicted = self._predicted(index, planned.predictor)
        if planned.predictor.expansion is not None:
            predicted = predicted.through(planned.predictor.expansion)
        return own + predicted


def sources(layers: Sequence[LayerPlan], index: int, site: Site) -> set[Input]:
    """Return the sites whose latents a reconstruction depends on.

    Parameters
    ----------
    layers : sequence of LayerPlan
        As in `Composer`.
    index : int
        Of the layer.
    site : {"key", "value"}
        Site of the layer.
    """
    needed: set[Input] = set()
    pending: list[Input] = [(0, site)]
    while pending:
        below, of_input = pending.pop()
        if (below, of_input) in needed:
            continue
        needed.add((below, of_input))
        predictor = layers[index - below].of(of_input).predictor
        if predictor is not None:
            pending += [(below + further, other) for further, other in predictor.inputs]
    return needed
