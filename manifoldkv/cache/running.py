"""The attention of one layer of a plan, in the dtype and on the device of the layer."""

from __future__ import annotations

import torch

from manifoldkv.cache.attention import CachedAttention
from manifoldkv.cache.latents import RunningBasis
from manifoldkv.cache.prediction import PredictedSites
from manifoldkv.plan.plan import CompressionPlan


def running_attention(
    plan: CompressionPlan,
    index: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    exact_prefill: bool = False,
) -> CachedAttention:
    """Return the attention of a layer over its compressed cache.

    Parameters
    ----------
    plan : CompressionPlan
        Of the model.
    index : int
        Of the layer.
    dtype : torch.dtype
        Of queries, keys and values.
    device : torch.device
        Of the layer.
    exact_prefill : bool
        As in `CachedAttention`.
    """
    layer = plan.layers[index]
    key = RunningBasis(layer.key.basis, dtype, device, layer.key.mean)
    value = RunningBasis(layer.value.basis, dtype, device, layer.value.mean)
    predicted = None
    if plan.predictor_depth is not None:
        predicted = PredictedSites(layer, key, value, dtype, device)
    return CachedAttention(key, value, exact_prefill, predicted)
