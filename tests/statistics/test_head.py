"""Logits from the outputs of the last decoder layer, and the divergence of changed layers."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel

from manifoldkv.models.decoder import Decoder
from manifoldkv.statistics import head
from manifoldkv.statistics.capture import capture
from manifoldkv.statistics.head import (
    differentiate_divergence,
    last_outputs,
    log_probabilities_from,
)
from manifoldkv.statistics.projected import divergence, log_probabilities
from tests.families import FAMILIES, MORE_FAMILIES, tiny_model, tiny_tokens

ALL = FAMILIES | MORE_FAMILIES


@pytest.mark.parametrize("family", ALL)
def test_log_probabilities_from_the_last_outputs_are_those_of_the_model(family: str) -> None:
    model, tokens = tiny_model(family), tiny_tokens()
    with torch.no_grad():
        outputs = last_outputs(model, tokens)
        expected = log_probabilities(model, tokens)
        found = log_probabilities_from(model, tokens, outputs)
    captured = list(capture(model, tokens))[-1].outputs
    torch.testing.assert_close(outputs, captured, rtol=0, atol=1e-4)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert not Decoder.of(model).layers[-1]._forward_hooks


def moved(model: PreTrainedModel) -> PreTrainedModel:
    """Another model of nearly the same weights, whose query projections get gradients."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for attention in Decoder.of(other).attentions:
        weight = attention.q_proj.weight
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator).to(weight)
        weight.requires_grad_()
    return other


@pytest.mark.parametrize("tokens_at_once", [1, 7, 1000])
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
def test_a_part_of_the_logits_at_a_time_gives_the_gradient_of_all(
    family: str, tokens_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = tiny_model(family).requires_grad_(False), tiny_tokens()
    made = moved(model)
    weights = [attention.q_proj.weight for attention in Decoder.of(made).attentions]
    loss = divergence(log_probabilities(model, tokens), log_probabilities(made, tokens))
    expected = torch.autograd.grad(loss, weights)
    monkeypatch.setattr(
        head, "LOGITS_AT_ONCE", tokens_at_once * model.get_input_embeddings().num_embeddings
    )
    found = differentiate_divergence(made, tokens, last_outputs(model, tokens))
    assert found == pytest.approx(loss.item(), rel=1e-4)
    for weight, gradient in zip(weights, expected, strict=True):
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-3, atol=1e-8)
