"""Tokens that are predicted from what the cache gives back of them in the layers below."""

from __future__ import annotations

import torch
from torch import Tensor

from manifoldkv.cache.latents import RunningBasis
from manifoldkv.cache.layers import CompressedLayer
from manifoldkv.cache.storage import Store

GivenBack = tuple[Tensor, Tensor]
"""Keys before rotation and values of all the tokens that a layer holds, as their latents give them
back, (B, H_kv, n, d)."""

TOKENS_AT_A_TIME = 1024
"""Tokens whose latents are up-projected at a time."""


class PredictedSites:
    """Keys and values of one layer, of which latents are what a prediction leaves.

    Parameters
    ----------
    key, value : RunningBasis
        Bases of the layer.
    key_prediction, value_prediction : Tensor or None
        `Coding.prediction` of both; nothing but the mean is expected if None.
    """

    def __init__(
        self,
        key: RunningBasis,
        value: RunningBasis,
        key_prediction: Tensor | None,
        value_prediction: Tensor | None,
    ) -> None:
        self._key = key
        self._value = value
        self._key_prediction = key_prediction
        self._value_prediction = value_prediction

    def store(
        self, layer: CompressedLayer, keys: Tensor, values: Tensor, below: list[GivenBack]
    ) -> GivenBack:
        """Store new keys and values, and return what the layer gives back of all its tokens.

        Parameters
        ----------
        layer : CompressedLayer
            Of the cache.
        keys, values : Tensor
            New ones, (B, H_kv, m, d); keys before rotation.
        below : list of GivenBack
            Of the layers below, the nearest first, the new tokens included.
        """
        keys, values = layer.admit(keys, values)
        inputs = [x for given in below for x in given]
        given_keys = _stored(layer.key_store, self._key, keys, self._key_prediction, inputs)
        inputs = [given_keys, *inputs]
        return given_keys, _stored(
            layer.value_store, self._value, values, self._value_prediction, inputs
        )


def _stored(
    store: Store, basis: RunningBasis, x: Tensor, prediction: Tensor | None, inputs: list[Tensor]
) -> Tensor:
    """Store new keys or values (B, H_kv, m, d), and return all as they are given back."""

    def expected(start: int, stop: int) -> Tensor | float:
        if prediction is None:
            return 0.0
        given = torch.cat([basis.grouping.split(y[:, :, start:stop]) for y in used], dim=-1)
        return basis.grouping.merge(given.to(prediction) @ prediction)

    features = x.shape[1] * x.shape[3]
    used = [] if prediction is None else inputs[: len(prediction) // features]
    held = len(store)
    store.append(basis.latents(x - expected(held, held + x.shape[2])))
    tiles = [
        basis.up_project(latents) + expected(start, stop)
        for start, stop, latents in store.tiles(0, TOKENS_AT_A_TIME)
    ]
    return torch.cat(tiles, dim=2)
