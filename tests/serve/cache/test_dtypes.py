"""Every recipe in every dtype that people run in: prompts of any length, then decoding."""

from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv import CompressionPlan, Quantization, compress, compressed, quantize
from manifoldkv.recipes.full_rank import full_rank_plan
from tests.families import tiny_model, tiny_tokens
from tests.plans import random_plan
from tests.serve.cache.test_compressed import LONG, ROTARIES, steps
from tests.short_recipes import short

TOLERANCES = {torch.float32: (2e-3, 0.03), torch.bfloat16: (0.04, 0.4), torch.float16: (0.03, 0.2)}
"""Median and largest relative error of logits against the model in float64. A latent next to the
border of two codes may fall on its other side, which costs most where codes are few."""
LONGEST = 100
PROMPTS = (1, 2, 31, 32, LONGEST)
STEPS = 3
LAYOUTS = ("static", "token")
CASES = [
    *(
        (family, "best", dtype)
        for family in ("llama", "mistral", "gemma3", "gpt-oss")
        for dtype in TOLERANCES
    ),
    *(
        (family, recipe, dtype)
        for family, recipe in (
            ("qwen3", "bits"),
            ("gemma2", "low-rank"),
            ("gpt-oss", "static"),
            ("phi3", "token"),
            ("gemma3", "eigen-attention"),
        )
        for dtype in (torch.float32, torch.bfloat16)
    ),
]
RANDOM = [
    ("gemma2", {}),
    ("llama", {"sinks": 3}),
    ("mistral", {"quantization": Quantization(8, "static", group_size=4)}),
    ("gemma2", {"quantization": Quantization(8, "token", group_size=4)}),
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
        layout = Quantization(8, recipe, group_size=4)
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


@pytest.mark.parametrize(("family", "recipe", "dtype"), CASES, ids=str)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize(("family", "settings"), RANDOM)
def test_short_dtypes_are_the_same_but_for_rounding(
    family: str, settings: dict, rotary: str, dtype: torch.dtype
) -> None:
    tokens, logits = tiny_tokens(2, LONG), {}
    for each in (dtype, torch.float64):
        model = tiny_model(family, dtype=torch.bfloat16).to(each)
        plan = random_plan(model, rotary=rotary, value_rank=3, **settings)
        found = steps(model, plan, tokens, [2, 7] + [1] * (LONG - 9))
        assert found.dtype == each
        logits[each] = found.double()
    error = float((logits[dtype] - logits[torch.float64]).norm() / logits[torch.float64].norm())
    exact = dtype == torch.float32 and "quantization" not in settings
    assert error < (1e-4 if exact else 0.06)
