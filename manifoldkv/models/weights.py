"""Check of the weights of a model."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.core.errors import ModelError
from manifoldkv.models.offloading import is_offloaded, named_weights


@torch.no_grad()
def check_finite(model: PreTrainedModel) -> None:
    """Raise `ModelError` if a weight has NaN or infinity; all weights are read once."""
    if not is_offloaded(model) and any(p.is_meta for p in model.parameters()):
        return  # a model without weights is refused elsewhere
    for name, weight in named_weights(model):
        if weight.is_floating_point() and weight.numel() and not _is_finite(weight):
            raise ModelError(
                f"weight {name} holds NaN or infinity: load a checkpoint whose weights are finite, "
                f"in a dtype that they fit ({weight.dtype} here)"
            )


def _is_finite(x: Tensor) -> bool:
    if x.itemsize == 1:  # aminmax does not take float8
        x = x.float()
    # Extrema are NaN if an element is, and take a twentieth of the time of isfinite.
    return bool(torch.stack(x.aminmax()).isfinite().all())
