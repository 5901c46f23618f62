"""Every recipe in every dtype that people run in: prompts of any length, then decoding."""

from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv import CompressionPlan, Quantization, compress, compressed, quantize
from manifoldkv.recipes.full_rank import full_rank_plan
from tests.families import FAMILIES, tiny_model, tiny_tokens
from tests.short_recipes import short

TOLERANCES = {torch.float32: (2e-3, 0.03), torch.bfloat16: (0.04, 0.4), torch.float16: (0.03, 0.2)}
"""Median and largest relative error of logits against the model in float64. A latent next to the
border of two codes may fall on its other side, which costs most where codes are few."""
LONGEST = 100
PROMPTS = (1, 2, 31, 32, LONGEST)
STEPS = 3
LAYOUTS = ("static", "token", "kivi")
COMMUTES = {"llama", "qwen2", "mistral"}
CASES = [
    *((family, "best") for family in FAMILIES),
    *((family, "bits") for family in ("qwen3", "mistral", "gpt-oss")),
    *((family, "low-rank") for family in ("llama", "gemma3")),
    *((family, layout) for layout in ("static", "token") for family in ("llama", "gpt-oss")),
    ("llama", "kivi"),
    ("llama", "commuting"),
    ("gemma3", "eigen-attention"),
]


@cache
def model_of(family: str) -> PreTrainedModel:
    """A smooth model: which expert a token goes to would depend on its last bits."""
    experts = {"num_local_experts": 1} if family == "gpt-oss" else {}
    return tiny_model(family, max_position_embeddings=2 * LONGEST, **experts)


@cache
def plan_of(family: str, recipe: str) -> CompressionPlan:
    model, tokens = model_of(family), tiny_tokens(8, LONGEST)
    if recipe in LAYOUTS:
        layout = Quantization(8, recipe, group_size=4, residual=8)
        return quantize(full_rank_plan(model), model, tokens, layout)
    return compress(model, tokens, recipe=short(recipe), ratio=0.6)


@torch.no_grad()
def continued(model: PreTrainedModel, plan: CompressionPlan, tokens: Tensor) -> Tensor:
    """Logits of the last tokens of texts that are read up to there, and then token by token."""
    found = []
    with compressed(model, plan) as new_cache:
        for prompt in PROMPTS:
            cache = new_cache()
            pieces = tokens[:, : prompt + STEPS].split([prompt, *[1] * STEPS], dim=1)
            found += [model(piece, past_key_values=cache).logits[:, -1] for piece in pieces]
    return torch.stack(found).double()


@cache
def expected(family: str, recipe: str) -> Tensor:
    """One pass over each text, in float64."""
    model, found = model_of(family), []
    with compressed(model, plan_of(family, recipe)), torch.no_grad():
        for prompt in PROMPTS:
            logits = model(tiny_tokens(2, LONGEST + STEPS)[:, : prompt + STEPS]).logits
            found += logits[:, prompt - 1 :].unbind(dim=1)
    return torch.stack(found)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_prompts_and_decoding(family: str, recipe: str, dtype: torch.dtype) -> None:
    model = model_of(family)
    try:
        found = continued(model.to(dtype), plan_of(family, recipe), tiny_tokens(2, LONGEST + STEPS))
    finally:
        model.double()
    wanted = expected(family, recipe)
    assert bool(found.isfinite().all())
    error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)  # (lengths · steps, B)
    median, largest = TOLERANCES[dtype]
    assert float(error.median()) < median
    assert float(error.max()) < largest
