"""The attention of the layers of a plan, in the dtype and on the device of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

from manifoldkv.cache.attention import CachedAttention
from manifoldkv.cache.compiled import CompiledSites
from manifoldkv.cache.composed import ComposedSites
from manifoldkv.cache.grouped import GroupedSites
from manifoldkv.cache.latents import RunningBasis
from manifoldkv.cache.sites import Sites
from manifoldkv.cache.storage import can_compile
from manifoldkv.coding.mixed import MixedWidths
from manifoldkv.kernels.decode import runs_triton
from manifoldkv.plan.composition import Composer
from manifoldkv.plan.plan import CompressionPlan

Place = tuple[torch.dtype, torch.device]
"""Dtype and device of a layer."""

_HELD = WeakIdKeyDictionary()
"""Places of the layers of a plan, their kinds of sites, and the sites: the latest of every plan."""


def running_attentions(
    plan: CompressionPlan, places: Sequence[Place], *, exact_prefill: bool
) -> list[CachedAttention]:
    """Return the attention of all layers over their compressed caches.

    What depends on plan and places alone is prepared once. It is kept until the plan is deleted or
    runs elsewhere.

    Parameters
    ----------
    plan : CompressionPlan
        Of the model.
    places : sequence of Place
        Dtype of queries, keys and values, and device, of every layer.
    exact_prefill : bool
        As in `CachedAttention`.
    """
    wanted = [(*place, _kind(plan, index, *place)) for index, place in enumerate(places)]
    held = _HELD.get(plan)
    if held is None or held[0] != wanted:
        composer = Composer(plan.layers)
        sites = [_sites(plan, index, *place, composer) for index, place in enumerate(places)]
        _HELD[plan] = held = wanted, sites
    heads = (layer.key.grouping.heads for layer in plan.layers)
    return [
        CachedAttention(*of_layer, exact_prefill) for of_layer in zip(held[1], heads, strict=True)
    ]


def running_attention(
    plan: CompressionPlan,
    index: int,
    dtype: torch.dtype,
    device: torch.device,
    composer: Composer,
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
    """
    sites = _sites(plan, index, dtype, device, composer)
    return CachedAttention(sites, plan.layers[index].key.grouping.heads, exact_prefill=False)


def _kind(
    plan: CompressionPlan, index: int, dtype: torch.dtype, device: torch.device
) -> type[Sites]:
    """Return the class of the sites of a layer."""
    mixed = all(isinstance(x.quantizer, MixedWidths) for _, x in plan.layers[index].sites)
    if plan.rotary == "post" or not mixed:
        return GroupedSites
    if runs_triton(device):
        from manifoldkv.cache.gpu import GPUSites

        return GPUSites
    return CompiledSites if can_compile(dtype, device) else ComposedSites


def _sites(
    plan: CompressionPlan,
    index: int,
    dtype: torch.dtype,
    device: torch.device,
    composer: Composer,
) -> Sites:
    """Return the sites of a layer; parameters as in `running_attention`."""
    layer, kind = plan.layers[index], _kind(plan, index, dtype, device)
    if issubclass(kind, ComposedSites):
        return kind(composer, index, dtype, device)
    key, value = (RunningBasis(x.basis, dtype, device, x.mean) for _, x in layer.sites)
    return GroupedSites(key, value)
