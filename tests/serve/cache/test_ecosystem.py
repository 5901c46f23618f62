"""What others build on transformers works inside a compressed block."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, TextIteratorStreamer, pipeline

from manifoldkv import CompressionPlan, compress, compressed, load_model
from manifoldkv.serve.cache import CompressedCache
from tests.families import tiny_model, tiny_tokens
from tests.plans import random_plan

MODEL = Path(__file__).parents[3] / "studies" / "reference_models" / "reference-llama"


@pytest.fixture(scope="module")
def written() -> tuple[PreTrainedModel, object, CompressionPlan, str]:
    """A model, its tokenizer, a plan, and what the model writes with it."""
    model, tokenizer = load_model(str(MODEL))
    plan = compress(model, "docstrings", recipe="eigen-attention", sequences=4, length=64)
    inputs = tokenizer("Return the sum of", return_tensors="pt")
    with compressed(model, plan):
        output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    return model, tokenizer, plan, tokenizer.decode(output[0], skip_special_tokens=True)


def test_a_pipeline_runs_on_the_compressed_cache(written) -> None:
    model, tokenizer, plan, expected = written
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    with compressed(model, plan):
        found = generator("Return the sum of", max_new_tokens=8, do_sample=False)
    assert found[0]["generated_text"] == expected
    without = generator("Return the sum of", max_new_tokens=8, do_sample=False)
    assert without[0]["generated_text"].startswith("Return the sum of")


def test_a_streamer_yields_the_same_text_as_it_is_written(written) -> None:
    model, tokenizer, plan, expected = written
    inputs = tokenizer("Return the sum of", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_special_tokens=True)
    with compressed(model, plan):
        options = {**inputs, "max_new_tokens": 8, "do_sample": False, "streamer": streamer}
        thread = threading.Thread(target=model.generate, kwargs=options)
        thread.start()
        pieces = list(streamer)
        thread.join()
    assert "".join(pieces) == expected
    assert len(pieces) > 2


def test_generations_that_take_turns_do_not_mix() -> None:
    """Two caches, their calls interleaved: each goes on as if it were alone."""
    model = tiny_model("llama")
    plan = random_plan(model, key_rank=4, value_rank=5)
    first, second = tiny_tokens(2, 12).split(1)
    with compressed(model, plan) as new_cache:

        def alone(tokens: torch.Tensor) -> list[torch.Tensor]:
            cache = new_cache()
            return [step(cache, token) for token in tokens.split(1, dim=1)]

        def step(cache: CompressedCache, token: torch.Tensor) -> torch.Tensor:
            return model(input_ids=token, past_key_values=cache).logits

        expected = [alone(first), alone(second)]
        caches = [new_cache(), new_cache()]
        found: list[list[torch.Tensor]] = [[], []]
        for pair in zip(first.split(1, dim=1), second.split(1, dim=1), strict=True):
            for which, token in enumerate(pair):
                found[which].append(step(caches[which], token))
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("rotary", ["pre", "post"])
def test_generations_in_threads_do_not_mix(rotary: str) -> None:
    """Prompts of different lengths, all at once: what one thread computes no other one sees."""
    model = tiny_model("llama")
    plan = random_plan(model, key_rank=4, value_rank=5, rotary=rotary)
    prompts = [tiny_tokens(1, length) for length in (3, 5, 7, 9, 11, 13)]

    with compressed(model, plan) as new_cache:

        def write(prompt: torch.Tensor) -> list[int]:
            output = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=20,
                do_sample=False,
                past_key_values=new_cache(),
            )
            return output[0].tolist()

        expected = [write(prompt) for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            for _ in range(3):
                assert list(pool.map(write, prompts)) == expected
