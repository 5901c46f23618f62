"""The attention of the layers of a plan, in the dtype and on the device of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

from manifoldkv.plan.composition import Composer
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.serve.cache.attention import CachedAttention
from manifoldkv.serve.cache.backend import AttentionBackend
from manifoldkv.serve.cache.numba_backend import NumbaBackend
from manifoldkv.serve.cache.rank_backend import RankBackend
from manifoldkv.serve.cache.storage import can_compile
from manifoldkv.serve.cache.torch_backend import TorchBackend
from manifoldkv.serve.kernels.decode import runs_triton

Place = tuple[torch.dtype, torch.device]
"""Dtype and device of a layer."""

_HELD = WeakIdKeyDictionary()
"""Kinds of the backends of a plan's layers with their places, and the backends: the latest ones of
every plan."""


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
    kinds = [_kind(plan, index, *place) for index, place in enumerate(places)]
    wanted = list(zip(kinds, places, strict=True))
    held = _HELD.get(plan)
    if held is None or held[0] != wanted:
        composer = Composer(plan.layers)
        backends = [kind.of(composer, i, *place) for i, (kind, place) in enumerate(wanted)]
        _HELD[plan] = held = wanted, backends
    return [CachedAttention(backend, exact_prefill) for backend in held[1]]


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
    backend = _kind(plan, index, dtype, device).of(composer, index, dtype, device)
    return CachedAttention(backend, exact_prefill=False)


def _kind(
    plan: CompressionPlan, index: int, dtype: torch.dtype, device: torch.device
) -> type[AttentionBackend]:
    """Return the kind of a layer's backend."""
    packed = all(planned.packed is not None for _, planned in plan.layers[index].sites)
    if plan.rotary == "post" or not packed:
        return RankBackend
    if runs_triton(device):
        from manifoldkv.serve.cache.triton_backend import TritonBackend

        return TritonBackend
    return NumbaBackend if can_compile(dtype, device) else TorchBackend
