"""The same laws on trained weights in float32."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv import CompressionPlan, compress, compressed, load_model, open_text, sample_tokens
from tests.plans import projected_by_hooks

FOLDER = "studies/reference_models"


def mean_nll(logits: Tensor, tokens: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]))


def step_by_step(model: PreTrainedModel, plan: CompressionPlan, tokens: Tensor) -> Tensor:
    with compressed(model, plan) as new_cache, torch.no_grad():
        cache = new_cache()
        steps = [model(input_ids=t, past_key_values=cache).logits for t in tokens.split(1, dim=1)]
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("name", ["reference-llama", "reference-qwen3"])
@pytest.mark.parametrize("rotary", ["pre", "post"])
def test_nll_token_by_token_is_that_of_one_pass_with_projected_keys_and_values(
    name: str, rotary: str
) -> None:
    model, tokenizer = load_model(f"{FOLDER}/{name}")
    text = open_text("pydoc-topics")
    calibration = sample_tokens(text, tokenizer, sequences=4, length=128, split="calibration")
    tokens = sample_tokens(text, tokenizer, sequences=1, length=192, split="held-out")
    plan = compress(model, calibration, recipe="eigen-attention", ratio=0.5, rotary=rotary)
    found = mean_nll(step_by_step(model, plan, tokens), tokens)
    with projected_by_hooks(model, plan), torch.no_grad():
        expected = mean_nll(model(input_ids=tokens, use_cache=False).logits, tokens)
    with torch.no_grad():
        uncompressed = mean_nll(model(input_ids=tokens, use_cache=False).logits, tokens)
    assert abs(found - expected) < 1e-4
    assert expected > uncompressed + 0.01
