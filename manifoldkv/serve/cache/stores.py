"""The store of every quantizer that attention reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from manifoldkv.plan.formats.integers import StaticIntegers, TokenIntegers
from manifoldkv.plan.formats.mixed import MixedWidths
from manifoldkv.plan.formats.quantizer import Quantizer
from manifoldkv.plan.formats.quantizers import Unquantized
from manifoldkv.plan.formats.trellis import TrellisCoded
from manifoldkv.serve.cache.integers import RangeStore, StaticRangeStore
from manifoldkv.serve.cache.mixed import MixedWidthStore
from manifoldkv.serve.cache.storage import ExactStore, Store, working_dtype
from manifoldkv.serve.cache.trellis import TrellisStore
from manifoldkv.serve.kernels.decode import runs_triton


def _trellis_store(quantizer: TrellisCoded, dtype: torch.dtype, device: torch.device) -> Store:
    if runs_triton(device):
        from manifoldkv.serve.cache.trellis_triton import TritonTrellisStore

        return TritonTrellisStore(quantizer, dtype, device)
    return TrellisStore(quantizer, dtype, device)


STORES: dict[type[Quantizer], Callable[[Any, int, torch.dtype, torch.device], Store]] = {
    Unquantized: lambda _, features, dtype, device: ExactStore(),
    StaticIntegers: StaticRangeStore,
    TokenIntegers: lambda quantizer, features, dtype, _: RangeStore(quantizer, features, dtype),
    MixedWidths: lambda quantizer, _, dtype, device: MixedWidthStore(quantizer, dtype, device),
    TrellisCoded: lambda quantizer, _, dtype, device: _trellis_store(quantizer, dtype, device),
}
"""Stores by quantizer: of a quantizer, the latents of a head group, dtype of reconstructions and
device."""


def store_for(
    quantizer: Quantizer, features: int, dtype: torch.dtype, device: torch.device
) -> Store:
    """Return an empty store of latents in the format of a quantizer.

    Parameters
    ----------
    quantizer : Quantizer
        One that attention reads.
    features : int
        Latents of a head group.
    dtype : torch.dtype
        Of the model.
    device : torch.device
        Of the layer.

    Raises
    ------
    NotImplementedError
        If there is no store for the quantizer.
    """
    if type(quantizer) not in STORES:
        raise NotImplementedError(f"no store for quantizer {quantizer.name}")
    return STORES[type(quantizer)](quantizer, features, working_dtype(dtype, device), device)
