"""A decoder layer, called with its attention replaced."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manifoldkv.models.interface import Attend, Rotate, identity_rotation, intercepted, rotation_of
from manifoldkv.models.support import linear_weight, uncompiled


class StopForward(Exception):  # noqa: N818 (not an error)
    """Ends a forward pass whose remaining outputs are not needed."""


@dataclass(frozen=True, eq=False)
class LayerCall:
    """A decoder layer with the arguments that the model calls it with.

    Arguments are equal for all unpadded sequences of a length. Rotation is not among them: the
    layer's own is made the identity, so that whatever replaces attention receives queries and keys
    as they leave their projections and norms, whatever the family.

    Parameters
    ----------
    module : nn.Module
        The decoder layer.
    rotary_dim : int
        Size of the cosines that it takes.
    keywords : dict
        All other keyword arguments but mask and positions.
    """

    module: nn.Module
    rotary_dim: int
    keywords: dict[str, Any]

    @property
    def attention(self) -> Any:
        """Return the attention module of the layer."""
        return self.module.self_attn

    @property
    def rotate(self) -> Rotate:
        """Return the rotation that the layer applies to queries and keys."""
        return rotation_of(self.module)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that the layer computes in."""
        return self.attention.o_proj.weight.dtype

    def output_weight(self) -> Tensor:
        """Return the output projection W_O, (hidden, H_q·d)."""
        return linear_weight(self.attention.o_proj)

    def output(self, inputs: Tensor, attend_instead: Attend) -> Tensor:
        """Return the layer's output for inputs (B, m, hidden), with its attention replaced.

        Parameters
        ----------
        inputs : Tensor
            (B, m, hidden), converted to the dtype of the layer.
        attend_instead : Attend
            Replaces attention; its result is in the dtype of the layer.

        Returns
        -------
        Tensor
            (B, m, hidden)
        """
        inputs, tokens = inputs.to(self.dtype), inputs.shape[1]
        with intercepted(self.attention.config), uncompiled(self.module):
            return self.module(
                inputs,
                attention_mask=None,
                position_ids=torch.arange(tokens, device=inputs.device).unsqueeze(0),
                position_embeddings=identity_rotation(inputs, tokens, self.rotary_dim),
                manifoldkv_attend=attend_instead,
                **self.keywords,
            )

    def projections(self, inputs: Tensor) -> list[Tensor]:
        """Return queries, keys and values before rotation, (B, heads, m, d), of (B, m, hidden).

        They are in the dtype of the layer, whose call ends with them.
        """
        projections: list[Tensor] = []

        def stop(attention: nn.Module, *arguments: Any) -> Tensor:
            projections.extend(arguments[:3])
            raise StopForward

        with suppress(StopForward):
            self.output(inputs, stop)
        return projections
