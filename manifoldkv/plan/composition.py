"""Keys and values of a layer as linear maps of stored latents, predictors included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manifoldkv.basis import Site
from manifoldkv.coding.predictor import Input
from manifoldkv.plan.layer import LayerPlan

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


def linear_map(layers: Sequence[LayerPlan], index: int, site: Site) -> LinearMap:
    """Return the linear map of keys before rotation, or of values.

    Parameters
    ----------
    layers : sequence of LayerPlan
        All layers of a plan, with bases of all heads.
    index : int
        Of the layer.
    site : {"key", "value"}
        Site of the layer.
    """
    planned = layers[index].key if site == "key" else layers[index].value
    mean = torch.zeros(planned.features, dtype=torch.float64)
    if planned.mean is not None:
        mean = planned.mean.double()
    own = LinearMap({(0, site): planned.basis.up[0].double()}, mean)
    if planned.predictor is None:
        return own
    predicted = _predicted(layers, index, site)
    if planned.predictor.expansion is not None:
        predicted = predicted.through(planned.predictor.expansion)
    return own + predicted


def key_map(layers: Sequence[LayerPlan], index: int) -> KeyMap:
    """Return the map of a layer's keys, with the prediction in factors. Parameters as above."""
    planned = layers[index].key
    whole = linear_map(layers, index, "key")
    if planned.predictor is None:
        return KeyMap(whole.maps[0, "key"], {}, None, whole.mean)
    predicted = _predicted(layers, index, "key")
    expansion = planned.predictor.expansion
    return KeyMap(
        planned.basis.up[0].double(),
        predicted.maps,
        None if expansion is None else expansion.double().mT,
        whole.mean,
    )


def sources(layers: Sequence[LayerPlan], index: int, site: Site) -> set[Input]:
    """Return the sites whose latents a reconstruction depends on. Parameters as `linear_map`."""
    planned = layers[index].key if site == "key" else layers[index].value
    needed: set[Input] = {(0, site)}
    for below, of_input in () if planned.predictor is None else planned.predictor.inputs:
        deeper = sources(layers, index - below, of_input)
        needed |= {(below + further, other) for further, other in deeper}
    return needed


def _predicted(layers: Sequence[LayerPlan], index: int, site: Site) -> LinearMap:
    """Return the map of a prediction, before its expansion."""
    planned = layers[index].key if site == "key" else layers[index].value
    predictor = planned.predictor
    assert predictor is not None
    parts = [
        linear_map(layers, index - below, of_input).through(weights).below(below)
        for (below, of_input), weights in zip(predictor.inputs, predictor.parts, strict=True)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
