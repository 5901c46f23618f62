"""Checks of the weights of a model, and weights made in inference mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manifoldkv.errors import ModelError
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


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Let gradients pass through a model that was made in inference mode inside the block.

    Its weights and buffers are replaced by others that share their memory.
    """
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        for part in ("_parameters", "_buffers"):
            held: dict[str, Any] = getattr(module, part)
            of_inference = {n: x for n, x in held.items() if x is not None and x.is_inference()}
            for name, x in of_inference.items():
                replaced.append((held, name, x))
                shared = torch.empty(0, dtype=x.dtype, device=x.device)
                shared.set_(x.untyped_storage(), x.storage_offset(), x.size(), x.stride())
                if isinstance(x, nn.Parameter):
                    shared = nn.Parameter(shared, requires_grad=False)
                held[name] = shared
    try:
        yield
    finally:
        for held, name, x in replaced:
            held[name] = x


def _is_finite(x: Tensor) -> bool:
    if x.itemsize == 1:  # aminmax does not take float8
        x = x.float()
    # Extrema are NaN if an element is, and take a twentieth of the time of isfinite.
    return bool(torch.stack(x.aminmax()).isfinite().all())
