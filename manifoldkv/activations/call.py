"""A decoder layer, called with its attention replaced."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from manifoldkv.errors import ModelError
from manifoldkv.models.interface import Attend, identity_rotation, intercepted
from manifoldkv.models.support import attention_of, uncompiled


class StopForward(Exception):  # noqa: N818 (not an error)
    """Ends a forward pass once what it is made for is known."""


def project(
    module: nn.Module, inputs: Tensor, rotary_dim: int, keywords: dict[str, Any]
) -> list[Tensor]:
    """Return queries, keys and values that a decoder layer makes of inputs (B, m, hidden).

    They are those before rotation, (B, heads, m, d), in the dtype of the layer, whose call ends
    with them.
    """
    found: list[Tensor] = []

    def stop(attention: nn.Module, *projections: Any) -> Tensor:
        found.extend(projections[:3])
        raise StopForward

    weight = attention_of(module).o_proj.weight
    with suppress(StopForward):
        call_layer(module, inputs.to(weight.dtype), stop, rotary_dim, keywords)
    return found


def call_layer(
    module: nn.Module,
    inputs: Tensor,
    attend_instead: Attend,
    rotary_dim: int,
    keywords: dict[str, Any],
) -> Tensor:
    """Return a decoder layer's output for inputs (B, m, hidden), with its attention replaced.

    The layer's own rotation is made the identity, so that `attend_instead` receives queries and
    keys as they leave their projections and norms, whatever the family.
    """
    tokens = inputs.shape[1]
    with intercepted(attention_of(module).config), uncompiled(module):
        output = module(
            inputs,
            attention_mask=None,
            position_ids=torch.arange(tokens, device=inputs.device).unsqueeze(0),
            position_embeddings=identity_rotation(inputs, tokens, rotary_dim),
            manifoldkv_attend=attend_instead,
            **keywords,
        )
    if not isinstance(output, Tensor):
        raise ModelError(
            f"{type(module).__name__} is not supported: it returns {type(output).__name__}"
        )
    return output
