"""Tokens that are predicted from their reconstructions in the layers below."""

from __future__ import annotations

from torch import Tensor

from manifoldkv.cache.latents import RunningBasis
from manifoldkv.cache.layers import CompressedLayer
from manifoldkv.cache.storage import Store

GivenBack = tuple[Tensor, Tensor]
"""Reconstructed keys before rotation and values of all tokens of a layer, all heads side by side,
tokens last, (B, D, n)."""

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
        """Store new keys and values, and return the layer's reconstruction of all its tokens.

        Parameters
        ----------
        layer : CompressedLayer
            Of the cache.
        keys, values : Tensor
            New ones, (B, H_kv, m, d); keys before rotation.
        below : list of GivenBack
            Of the layers below, the nearest first, the new tokens included.
        """
        layer.advance(keys.shape[2])
        inputs = [x for given in below for x in given]
        given_keys = _stored(layer.key_store, self._key, keys, self._key_prediction, inputs)
        inputs = [given_keys, *inputs]
        return given_keys, _stored(
            layer.value_store, self._value, values, self._value_prediction, inputs
        )


def _stored(
    store: Store, basis: RunningBasis, x: Tensor, prediction: Tensor | None, inputs: list[Tensor]
) -> Tensor:
    """Store new keys or values (B, H_kv, m, d), and return the reconstruction of all."""
    features = x.shape[1] * x.shape[3]
    weights = () if prediction is None else prediction.split(features)
    of_inputs = [*zip(inputs, weights, strict=False)]  # of more layers below than predict here

    def add_expected(x: Tensor, sign: int) -> Tensor:
        """Add what is expected beside the mean to the last tokens (B, D, t), or take it away."""
        # One product after the other: side by side, the inputs would have to be copied.
        for given, weight in of_inputs:
            inputs = given[..., given.shape[2] - x.shape[2] :]
            x.baddbmm_(weight.to(x.dtype).mT.expand(len(x), -1, -1), inputs, alpha=sign)
        return x

    new = basis.grouping.split(x)[:, 0].mT.to(basis.working, copy=True)
    store.append(basis.latents_of_groups(add_expected(new, -1).mT.unsqueeze(1)))
    found = new.new_empty(*new.shape[:2], len(store))
    for start, stop, latents in store.tiles(0, TOKENS_AT_A_TIME):
        found[..., start:stop] = basis.up_project_groups(latents)[:, 0].mT
    return add_expected(found, 1)
