"""Logits from the outputs of the last decoder layer, a few tokens at a time.

Logits are far larger than these outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manifoldkv.models.support import uncompiled
from manifoldkv.statistics.projected import divergence, log_probabilities

LOGITS_AT_ONCE = 2**24
"""Number of logits held at a time, at least those of one position."""


def log_probabilities_from(model: PreTrainedModel, tokens: Tensor, states: Tensor) -> Tensor:
    """Return log-probabilities (B, m, vocabulary) from outputs of the last decoder layer.

    They are float32 or wider and differentiable in `states`. The model is called with one module in
    place of its decoder layers: last norm, head, soft cap and scale are those of every family.

    Parameters
    ----------
    model : PreTrainedModel
        Causal language model with a list of decoder layers, left unchanged.
    tokens : Tensor
        Token ids, (B, m), int64; only their shape matters.
    states : Tensor
        Outputs of the last decoder layer, (B, m, hidden), in the dtype of the model.
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
    """Module with a constant output."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self._states = states

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._states


def last_outputs(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the outputs of the last decoder layer, (B, n, hidden), of token ids (B, n)."""
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
    """Return the divergence of changed decoder layers, and accumulate its gradients.

    It is the Kullback-Leibler divergence of next-token distributions, nats per token.

    Parameters
    ----------
    model : PreTrainedModel
        Causal language model with changed layers, inside `projected`, say.
    tokens : Tensor
        Token ids, (B, n), int64.
    expected : Tensor
        `last_outputs` of the unchanged layers, (B, n, hidden).
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
    assert leaf.grad is not None  # tokens are not empty
    outputs.backward(leaf.grad.view_as(outputs))
    return total
