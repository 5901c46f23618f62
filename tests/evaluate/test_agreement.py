"""Acceptance along greedy texts: that of decoding token by token."""

from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from manifoldkv import compressed, load_model
from manifoldkv.core.errors import ArgumentError
from manifoldkv.evaluate.agreement import UNCOMPRESSED, agreement
from manifoldkv.evaluate.retrieval import through_plan
from tests.plans import random_plan

NEW = 12


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model("studies/reference_models/reference-llama")[0]


@pytest.fixture(scope="module")
def prompts() -> torch.Tensor:
    return torch.randint(5, 900, (3, 40), generator=torch.Generator().manual_seed(0))


def test_an_exact_cache_accepts_all_tokens(model: PreTrainedModel, prompts: torch.Tensor) -> None:
    whole = random_plan(model, key_rank=64, value_rank=64)
    caches = {"whole": partial(through_plan, plan=whole)}
    found = agreement(model, prompts, caches, new_tokens=NEW, batch_size=2)
    assert list(found["cache"].unique()) == [UNCOMPRESSED, "whole"]
    assert sorted(found["prompt"].unique()) == [0, 1, 2]
    assert (found["accepted"] == 1).all()
    assert (found["same_tokens"] == NEW).all()


@torch.no_grad()
def test_the_first_difference_is_that_of_generating(
    model: PreTrainedModel, prompts: torch.Tensor
) -> None:
    plan = random_plan(model, key_rank=24, value_rank=24)
    found = agreement(model, prompts, {"": partial(through_plan, plan=plan)}, new_tokens=NEW)
    found = found[found["cache"] == ""]
    ends: dict[str, object] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    same = []
    for ids in prompts.split(1):
        expected = model.generate(ids, **ends)[0, ids.shape[1] :]
        stock = model(ids[:, :-1], use_cache=True).past_key_values
        with compressed(model, plan) as new_cache:
            text = model.generate(ids, past_key_values=new_cache(stock), **ends)
        differs = (text[0, ids.shape[1] :] != expected).nonzero().flatten()
        same.append(int(differs[0]) if len(differs) else NEW)
    assert found["same_tokens"].tolist() == same
    assert min(same) < NEW
    assert (found["accepted"] >= found["same_tokens"] / NEW).all()


def test_too_many_or_no_new_tokens(model: PreTrainedModel, prompts: torch.Tensor) -> None:
    with pytest.raises(ArgumentError, match="new_tokens must be >= 1, got 0"):
        agreement(model, prompts, {}, new_tokens=0)
    with pytest.raises(ArgumentError, match="40 tokens of a prompt and 100000 new ones"):
        agreement(model, prompts, {}, new_tokens=100_000)
