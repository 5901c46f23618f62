"""What a model makes of the outputs of its last decoder layer: predictions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from manifoldkv.models.projected import log_probabilities
from manifoldkv.models.support import uncompiled


def predictions_from(model: PreTrainedModel, tokens: Tensor, states: Tensor) -> Tensor:
    """Return the log-probabilities that follow from the outputs of the last decoder layer.

    The model itself is called, one module standing in for all of its decoder layers: last norm,
    head, soft cap and scale are its own, whatever the family.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model with a list of decoder layers. It is left as it was.
    tokens : Tensor
        Token ids, (B, m), int64, which only give the call its shape.
    states : Tensor
        Outputs of the last decoder layer, (B, m, hidden), in the dtype of the model.

    Returns
    -------
    Tensor
        (B, m, vocabulary), float32 at least, differentiable in `states`.
    """
    decoder = model.get_decoder()
    layers = decoder.layers
    decoder.layers = nn.ModuleList([_Outputs(states)])
    try:
        with uncompiled(model):
            return log_probabilities(model, tokens)
    finally:
        decoder.layers = layers


class _Outputs(nn.Module):
    """Puts out what it was made with, whatever it is called with."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self._states = states

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._states
