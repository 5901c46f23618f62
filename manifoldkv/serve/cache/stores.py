"""The store of every quantizer."""

from __future__ import annotations

import torch

from manifoldkv.plan.formats.integers import StaticIntegers, TokenIntegers
from manifoldkv.plan.formats.mixed import MixedWidths
from manifoldkv.plan.formats.quantizer import Quantizer
from manifoldkv.plan.formats.quantizers import Unquantized
from manifoldkv.plan.formats.trellis import TrellisCoded
from manifoldkv.serve.cache.mixed import MixedWidthStore
from manifoldkv.serve.cache.packed import RangeStore, StaticRangeStore
from manifoldkv.serve.cache.storage import ExactStore, Store, working_dtype
from manifoldkv.serve.cache.trellis import TrellisStore
from manifoldkv.serve.kernels.decode import runs_triton


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
    working = working_dtype(dtype, device)
    match quantizer:
        case Unquantized():
            return ExactStore()
        case TrellisCoded() if runs_triton(device):
            from manifoldkv.serve.cache.gpu_trellis import GPUTrellisStore

            return GPUTrellisStore(quantizer, working, device)
        case TrellisCoded():
            return TrellisStore(quantizer, working, device)
        case MixedWidths():
            return MixedWidthStore(quantizer, working, device)
        case StaticIntegers():
            return StaticRangeStore(quantizer, features, working, device)
        case TokenIntegers():
            return RangeStore(quantizer, features, working)
    raise NotImplementedError(f"no store for quantizer {quantizer.name}")
