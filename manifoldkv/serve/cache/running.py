"""The attention of one layer of a plan, in the dtype and on the device of the layer."""

from __future__ import annotations

import torch

from manifoldkv.plan.composition import Composer
from manifoldkv.plan.formats.mixed import MixedWidths
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.serve.cache.attention import CachedAttention
from manifoldkv.serve.cache.compiled import CompiledSites
from manifoldkv.serve.cache.composed import ComposedSites
from manifoldkv.serve.cache.grouped import GroupedSites
from manifoldkv.serve.cache.latents import RunningBasis
from manifoldkv.serve.cache.sites import Sites
from manifoldkv.serve.cache.storage import can_compile
from manifoldkv.serve.kernels.decode import runs_triton


def running_attention(
    plan: CompressionPlan,
    index: int,
    dtype: torch.dtype,
    device: torch.device,
    composer: Composer,
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
    composer : Composer
        Of the layers of the plan.
    exact_prefill : bool
        As in `CachedAttention`.
    """
    layer = plan.layers[index]
    sites: Sites
    if plan.rotary == "pre" and all(
        isinstance(planned.quantizer, MixedWidths) for _, planned in layer.sites
    ):
        kind = CompiledSites if can_compile(dtype, device) else ComposedSites
        if runs_triton(device):
            from manifoldkv.serve.cache.gpu import GPUSites

            kind = GPUSites
        sites = kind(composer, index, dtype, device)
    else:
        key = RunningBasis(layer.key.basis, dtype, device, layer.key.mean)
        value = RunningBasis(layer.value.basis, dtype, device, layer.value.mean)
        sites = GroupedSites(key, value)
    return CachedAttention(sites, layer.key.grouping.heads, exact_prefill)
