"""What a model makes of the outputs of its last decoder layer: predictions.

Predictions are far larger than what they are made of. Where they are only compared, they need never
be there for all tokens at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manifoldkv.models.projected import divergence, log_probabilities
from manifoldkv.models.support import decoder_layers, uncompiled

LOGITS_AT_ONCE = 2**24
"""Elements of predictions that are held at a time, those of one position at least."""


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


def last_outputs(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the outputs of the last decoder layer, (B, n, hidden); no predictions are made.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model with a list of decoder layers.
    tokens : Tensor
        Token ids, (B, n), int64.
    """
    found: list[Tensor] = []
    handle = decoder_layers(model)[-1].register_forward_hook(
        lambda module, arguments, output: found.append(output)
    )
    try:
        with uncompiled(model):
            model.get_decoder()(input_ids=tokens, use_cache=False)
    finally:
        handle.remove()
    return found[0]


def tokens_at_once(model: PreTrainedModel) -> int:
    """Return for how many tokens predictions are held at a time."""
    return max(1, LOGITS_AT_ONCE // model.get_input_embeddings().num_embeddings)


def differentiate_divergence(
    original: PreTrainedModel, made: PreTrainedModel, tokens: Tensor, exact: Tensor
) -> float:
    """Return the divergence of a model's predictions, and leave its gradient in what they are of.

    Parameters
    ----------
    original, made : PreTrainedModel
        The Kullback-Leibler divergence is that of the second from the first, nats per token.
    tokens : Tensor
        Token ids, (B, n), int64.
    exact : Tensor
        `last_outputs` of the original, (B, n, hidden).
    """
    outputs = last_outputs(made, tokens)
    count = tokens.numel()
    text, of_original = tokens.reshape(1, count), exact.reshape(1, count, -1)
    of_made = outputs.detach().reshape(1, count, -1).requires_grad_()
    total = 0.0
    for part in torch.arange(count, device=tokens.device).split(tokens_at_once(made)):
        with torch.no_grad():
            expected = predictions_from(original, text[:, part], of_original[:, part])
        found = predictions_from(made, text[:, part], of_made[:, part])
        loss = divergence(expected, found) * (len(part) / count)
        loss.backward(inputs=[of_made])
        total += loss.item()
    assert of_made.grad is not None  # there is a token
    outputs.backward(of_made.grad.view_as(outputs))
    return total


class _Outputs(nn.Module):
    """Puts out what it was made with, whatever it is called with."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self._states = states

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._states
