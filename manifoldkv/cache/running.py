"""The attention of one layer of a plan, in the dtype and on the device of the layer."""

from __future__ import annotations

import torch

from manifoldkv.cache.attention import CachedAttention
from manifoldkv.cache.latents import RunningBasis
from manifoldkv.cache.prediction import PredictedSites
from manifoldkv.cache.storage import constant_dtype
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan


def running_attention(
    plan: CompressionPlan,
    layer: LayerPlan,
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
    layer : LayerPlan
        One of its layers.
    dtype : torch.dtype
        Of queries, keys and values.
    device : torch.device
        Of the layer.
    exact_prefill : bool
        As in `CachedAttention`.
    """
    codings = [layer.codings.get(site) for site, _ in layer.sites]
    key, value = (
        RunningBasis(basis, dtype, device, None if coding is None else coding.mean)
        for (_, basis), coding in zip(layer.sites, codings, strict=True)
    )
    predicted = None
    if plan.predicted:
        predictions = [None if coding is None else coding.prediction for coding in codings]
        place = device, constant_dtype(dtype)
        predicted = PredictedSites(
            key, value, *(None if x is None else x.to(*place) for x in predictions)
        )
    return CachedAttention(key, value, exact_prefill, predicted)
