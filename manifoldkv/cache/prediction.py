"""Tokens that are predicted from their reconstructions at other sites."""

from __future__ import annotations

import torch
from torch import Tensor

from manifoldkv.cache.latents import RunningBasis
from manifoldkv.cache.layers import CompressedLayer
from manifoldkv.cache.storage import Store, constant_dtype
from manifoldkv.coding.predictor import PredictorContext
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.site import SitePlan

Reconstruction = tuple[Tensor, Tensor]
"""Reconstructed keys before rotation and values of all tokens of a layer, heads concatenated,
tokens last, (B, D, n)."""

TOKENS_AT_A_TIME = 2048
"""Tokens whose latents are up-projected at a time."""


class PredictedSites:
    """Keys and values of one layer of a plan with predictors.

    Parameters
    ----------
    plan : LayerPlan
        Of the layer.
    key, value : RunningBasis
        Bases of the layer.
    dtype : torch.dtype
        Of the model.
    device : torch.device
        Of the layer.
    """

    def __init__(
        self,
        plan: LayerPlan,
        key: RunningBasis,
        value: RunningBasis,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        held = constant_dtype(dtype)
        self._key = _PredictedSite(plan.key, key, held, device)
        self._value = _PredictedSite(plan.value, value, held, device)

    def store(
        self, layer: CompressedLayer, keys: Tensor, values: Tensor, context: PredictorContext
    ) -> Reconstruction:
        """Store new keys and values, and return the layer's reconstruction of all its tokens.

        Parameters
        ----------
        layer : CompressedLayer
            Of the cache.
        keys, values : Tensor
            New ones, (B, H_kv, m, d); keys before rotation.
        context : PredictorContext
            Reconstructions (B, D, n) of the layers below, the new tokens included. Those of this
            layer are added.
        """
        layer.advance(keys.shape[2])
        rebuilt_keys = self._key.store(layer.key_store, keys, context)
        return rebuilt_keys, self._value.store(layer.value_store, values, context)


class _PredictedSite:
    """Keys or values of one layer."""

    def __init__(
        self, plan: SitePlan, basis: RunningBasis, held: torch.dtype, device: torch.device
    ) -> None:
        self._basis = basis
        weights = () if plan.predictor is None else plan.predictor.weights.split(plan.features)
        self._weights = [weight.to(device, held) for weight in weights]  # (D, D) by input

    def store(self, store: Store, x: Tensor, context: PredictorContext) -> Tensor:
        """Store new keys or values (B, H_kv, m, d), and return the reconstruction of all."""
        basis = self._basis
        of_inputs = [*zip(context.inputs, self._weights, strict=False)]

        def add_prediction(x: Tensor, sign: int) -> Tensor:
            """Add the prediction of the last tokens to them, (B, D, t), or subtract it."""
            # One product after the other: side by side, the inputs would have to be copied.
            for reconstruction, weight in of_inputs:
                inputs = reconstruction[..., reconstruction.shape[2] - x.shape[2] :]
                x.baddbmm_(weight.to(x.dtype).mT.expand(len(x), -1, -1), inputs, alpha=sign)
            return x

        new = basis.grouping.split(x)[:, 0].mT.to(basis.working, copy=True)
        store.append(basis.latents_of_groups(add_prediction(new, -1).mT.unsqueeze(1)))
        rebuilt = new.new_empty(*new.shape[:2], len(store))
        for start, stop, latents in store.tiles(0, TOKENS_AT_A_TIME):
            rebuilt[..., start:stop] = basis.up_project_groups(latents)[:, 0].mT
        context.add(add_prediction(rebuilt, 1))
        return rebuilt
