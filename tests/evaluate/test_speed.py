from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache

from manifoldkv import compressed
from manifoldkv.core.errors import ArgumentError
from manifoldkv.evaluate import decode_speed, speed
from manifoldkv.evaluate.speed import prefill_speed
from tests.families import tiny_model
from tests.plans import random_plan


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_bytes_are_those_of_the_caches(family: str) -> None:
    model = tiny_model(family)
    plan = random_plan(model, key_rank=4, value_rank=4)
    found = decode_speed(model, plan, tokens=9, new_tokens=3, rounds=2)
    stock = DynamicCache(config=model.config)
    model(input_ids=torch.ones(1, 12, dtype=torch.int64), past_key_values=stock)
    held = [x.nbytes for layer in stock.layers for x in (layer.keys, layer.values)]
    assert found.stock_bytes == sum(held)
    assert found.compressed_bytes == plan.nbytes(12, dtype=model.dtype) == sum(held) / 2
    assert min(found.stock_seconds, found.compressed_seconds) > 0
    of_batch = decode_speed(model, plan, tokens=9, new_tokens=3, rounds=1, batch=2)
    assert of_batch.stock_bytes == 2 * found.stock_bytes
    assert of_batch.compressed_bytes == 2 * found.compressed_bytes


def test_the_ratio_of_times_is_formed_within_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is not the ratio of the medians."""
    turns = [(2.0, 3.0), (4.0, 2.0), (8.0, 8.0)]  # stock, then compressed
    told = iter([seconds for turn in turns for seconds in turn])
    decode = speed._seconds_per_token

    def decode_in_time(*given: object) -> float:
        decode(*given)
        return next(told)

    monkeypatch.setattr(speed, "_seconds_per_token", decode_in_time)
    model = tiny_model("llama")
    found = decode_speed(model, random_plan(model), tokens=9, new_tokens=3, rounds=3)
    assert (found.stock_seconds, found.compressed_seconds, found.time_ratio) == (4, 3, 1)
    assert next(told, None) is None


def test_the_model_is_as_it_was() -> None:
    model = tiny_model("llama")
    plan = random_plan(model)
    before = model(input_ids=torch.ones(1, 5, dtype=torch.int64)).logits
    decode_speed(model, plan, tokens=3, new_tokens=1, rounds=1)
    prefill_speed(model, plan, tokens=3, rounds=1)
    assert torch.equal(model(input_ids=torch.ones(1, 5, dtype=torch.int64)).logits, before)
    with compressed(model, plan):  # no block is left open
        pass


@pytest.mark.parametrize("new_tokens", [1, 16, 60, 63])
def test_the_prompt_is_as_long_as_the_model_takes(new_tokens: int) -> None:
    model = tiny_model("llama")  # takes 64 tokens
    found = decode_speed(model, random_plan(model), new_tokens=new_tokens, rounds=1)
    assert found.tokens == 64 - new_tokens
    wide = tiny_model("llama", max_position_embeddings=4096)
    assert decode_speed(wide, random_plan(wide), new_tokens=1, rounds=1).tokens == 512


@pytest.mark.parametrize(
    "counts",
    [
        {"tokens": 0},
        {"new_tokens": 0},
        {"rounds": 0},
        {"batch": 0},
        {"tokens": 60, "new_tokens": 5},
        {"new_tokens": 64},
    ],
)
def test_impossible_counts_are_refused(counts: dict[str, int]) -> None:
    model = tiny_model("llama")  # takes 64 tokens
    with pytest.raises(ArgumentError, match="and the model takes 64 tokens"):
        decode_speed(model, random_plan(model), **counts)


def test_prompts_are_timed_in_turns_after_a_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    told = iter([9.0, 9.0, 2.0, 3.0, 4.0, 2.0, 8.0, 8.0])  # stock, then compressed
    model = tiny_model("llama")
    model.register_forward_pre_hook(
        lambda module, args, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    )

    def run_in_time(step: Callable[[], object], device: torch.device) -> float:
        step()
        return next(told)

    monkeypatch.setattr(speed, "elapsed", run_in_time)
    found = prefill_speed(model, random_plan(model), tokens=9, rounds=3)
    assert (found.stock_seconds, found.compressed_seconds, found.time_ratio) == (4, 3, 1)
    assert lengths == [1, 1] + 6 * [9]


@pytest.mark.parametrize("counts", [{"tokens": 0}, {"tokens": 65}, {"tokens": 9, "rounds": 0}])
def test_impossible_prompts_are_refused(counts: dict[str, int]) -> None:
    model = tiny_model("llama")
    with pytest.raises(ArgumentError, match="and the model takes 64 tokens"):
        prefill_speed(model, random_plan(model), **counts)
