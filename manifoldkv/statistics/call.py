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
    """End of a forward pass whose remaining outputs are not needed."""


@dataclass(frozen=True, eq=False)
class LayerCall:
    """A decoder layer with the arguments that the model calls it with.

    Arguments are equal for all unpadded sequences of a length. Its rotation is replaced by the
    identity, so that `attend_instead` receives queries and keys before rotation, after their norms,
    in every family.

    Parameters
    ----------
    module : nn.Module
        The decoder layer.
    rotary_dim : int
        Number of rotated features, the size of the cosines.
    keywords : dict
        Keyword arguments other than mask, positions and angles.
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
        """Return the layer's output (B, m, hidden) with its attention replaced.

        Parameters
        ----------
        inputs : Tensor
            Hidden states, (B, m, hidden), converted to the dtype of the layer.
        attend_instead : Attend
            Replacement of attention, whose result is in the dtype of the layer.
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
        """Return unrotated queries, keys and values (B, heads, m, d) of inputs (B, m, hidden)."""
        projections: list[Tensor] = []

        def stop(attention: nn.Module, *arguments: Any) -> Tensor:
            projections.extend(arguments[:3])
            raise StopForward

        with suppress(StopForward):
            self.output(inputs, stop)
        return projections
