"""Tokens that are predicted from what the cache gives back of them in the layers below."""

from __future__ import annotations

import torch
from torch import Tensor

from manifoldkv.cache.latents import RunningBasis
from manifoldkv.cache.layers import CompressedLayer
from manifoldkv.cache.storage import Store

GivenBack = tuple[Tensor, Tensor]
"""Keys before rotation and values of all the tokens that a layer holds, as their latents give them
back, all heads side by side, (B, 1, n, D)."""

TOKENS_AT_A_TIME = 2048
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
    features = x.shape[1] * x.shape[3]
    weights = () if prediction is None else prediction.split(features)
    of_inputs = [*zip(inputs, weights, strict=False)]  # of more layers below than predict here

    def add_expected(x: Tensor, start: int, stop: int, sign: int) -> Tensor:
        """Add to some tokens, in place, or take from them what is expected beside the mean."""
        # One product after the other: side by side, the inputs would have to be copied.
        for given, weight in of_inputs:
            x[:, 0].baddbmm_(given[:, 0, start:stop], weight.expand(len(x), -1, -1), alpha=sign)
        return x

    held = len(store)
    new = basis.grouping.split(x).to(basis.working, copy=True)
    left = add_expected(new, held, held + x.shape[2], sign=-1)
    store.append(basis.latents_of_groups(left))
    tiles = [
        add_expected(basis.up_project_groups(latents), start, stop, sign=1)
        for start, stop, latents in store.tiles(0, TOKENS_AT_A_TIME)
    ]
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=2)
