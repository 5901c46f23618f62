"""Logits from the outputs of the last decoder layer.

Logits are far larger than these outputs. Where they are only compared, they are never held for all
tokens at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manifoldkv.models.projected import divergence, log_probabilities
from manifoldkv.models.support import uncompiled

LOGITS_AT_ONCE = 2**24
"""Number of logits that are held at a time, those of one position at least."""


def log_probabilities_from(model: PreTrainedModel, tokens: Tensor, states: Tensor) -> Tensor:
    """Return the log-probabilities that follow from the outputs of the last decoder layer.

    The model itself is called, with one module in place of all of its decoder layers: last norm,
    head, soft cap and scale are the model's, whatever the family.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model with a list of decoder layers. It is left unchanged.
    tokens : Tensor
        Token ids, (B, m), int64; only their shape matters.
    states : Tensor
        Outputs of the last decoder layer, (B, m, hidden), in the dtype of the model.

    Returns
    -------
    Tensor
        (B, m, vocabulary), float32 at least, differentiable in `states`.
    """
    decoder = model.get_decoder()
    layers = decoder.layers
    decoder.layers = nn.ModuleList([_Constant(states)])
    try:
        with uncompiled(model):
            return log_probabilities(model, tokens)
    finally:
        decoder.layers = layers


class _Constant(nn.Module):
    """Returns a constant, whatever the inputs."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self._states = states

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._states


def last_outputs(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the outputs of the last decoder layer, (B, n, hidden), without logits.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model with a list of decoder layers.
    tokens : Tensor
        Token ids, (B, n), int64.
    """
    decoder = model.get_decoder()
    outputs: list[Tensor] = []
    handle = decoder.layers[-1].register_forward_hook(
        lambda module, arguments, output: outputs.append(output)
    )
    try:
        with uncompiled(model):
            decoder(input_ids=tokens, use_cache=False)
    finally:
        handle.remove()
    return outputs[0]


def tokens_at_once(model: PreTrainedModel) -> int:
    """Return the number of tokens whose logits are held at a time."""
    return max(1, LOGITS_AT_ONCE // model.get_input_embeddings().num_embeddings)


def differentiate_divergence(model: PreTrainedModel, tokens: Tensor, expected: Tensor) -> float:
    """Return how far changed decoder layers move the logits, and accumulate the gradients.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model whose layers are changed, inside `projected`, say.
    tokens : Tensor
        Token ids, (B, n), int64.
    expected : Tensor
        `last_outputs` of the unchanged layers, (B, n, hidden).

    Returns
    -------
    float
        Kullback-Leibler divergence of next-token distributions, nats per token.
    """
    outputs = last_outputs(model, tokens)
    count = tokens.numel()
    ids, states = tokens.reshape(1, count), expected.reshape(1, count, -1)
    leaf = outputs.detach().reshape(1, count, -1).requires_grad_()
    total = 0.0
    for part in torch.arange(count, device=tokens.device).split(tokens_at_once(model)):
        with torch.no_grad():
            target = log_probabilities_from(model, ids[:, part], states[:, part])
        log_p = log_probabilities_from(model, ids[:, part], leaf[:, part])
        loss = divergence(target, log_p) * (len(part) / count)
        loss.backward(inputs=[leaf])
        total += loss.item()
    assert leaf.grad is not None  # there is a token
    outputs.backward(leaf.grad.view_as(outputs))
    return total
