"""What a compressed block does to a model, and what it refuses."""

import pytest
import torch
from transformers import DynamicCache

from manifoldkv import compressed
from manifoldkv.core.errors import CacheError, ModelError, PlanError
from tests.families import tiny_model, tiny_tokens
from tests.plans import random_plan
from tests.serve.cache.test_compressed import assert_equal, reference


def test_it_leaves_the_model_as_it_was() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    before = model(input_ids=tokens).logits
    attributes = set(vars(model))

    def hooks() -> int:
        return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())

    count, implementation = hooks(), model.config._attn_implementation
    with compressed(model, random_plan(model)):
        assert float((model(input_ids=tokens).logits - before).abs().max()) > 0.01
    with pytest.raises(KeyError), compressed(model, random_plan(model)):
        raise KeyError
    assert hooks() == count
    assert model.config._attn_implementation == implementation
    assert set(vars(model)) == attributes
    assert torch.equal(model(input_ids=tokens).logits, before)


def test_a_call_without_a_cache_is_compressed() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    plan = random_plan(model)
    expected = reference(model, plan, tokens)
    with compressed(model, plan):
        assert_equal(model(input_ids=tokens).logits, expected)
        assert_equal(model(input_ids=tokens, use_cache=False).logits, expected)
        assert_equal(model(tokens).logits, expected)


def test_nothing_is_left_of_a_block_that_could_not_begin() -> None:
    model = tiny_model("llama")
    del model.model.rotary_emb
    plan = random_plan(model)
    with pytest.raises(ModelError, match="no rotary_emb"), compressed(model, plan):
        pass
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_a_foreign_cache_raises() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    with compressed(model, random_plan(model)):
        with pytest.raises(CacheError, match=r"DynamicCache is not a .* new_cache\(stock\)"):
            model(input_ids=tokens, past_key_values=DynamicCache(config=model.config))
        with pytest.raises(CacheError, match="DynamicCache is not a compressed cache"):
            model.generate(tokens, past_key_values=DynamicCache(), max_new_tokens=2)


def test_a_cache_of_another_plan_raises() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    with compressed(model, random_plan(model)) as new_cache:
        cache = new_cache()
    for other in ({"key_rank": 4}, {"oblique": True}, {"rotary": "post"}, {"sinks": 3}):
        with (
            compressed(model, random_plan(model, **other)),
            pytest.raises(CacheError, match="another plan"),
        ):
            model(input_ids=tokens, past_key_values=cache)


def test_the_cache_outside_its_block_raises() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    with compressed(model, random_plan(model)) as new_cache:
        cache = new_cache()
    with pytest.raises(CacheError, match=r"inside `with manifoldkv\.compressed"):
        model(input_ids=tokens, past_key_values=cache)


def test_blocks_do_not_nest() -> None:
    model = tiny_model("llama")
    plan = random_plan(model)
    with (
        compressed(model, plan),
        pytest.raises(CacheError, match="already inside"),
        compressed(model, plan),
    ):
        pass


def test_another_model_with_the_same_configuration_object_is_not_touched() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    twin = type(model)(model.config).double().eval().requires_grad_(False)
    before = twin(input_ids=tokens).logits
    with compressed(model, random_plan(model)):
        assert_equal(twin(input_ids=tokens).logits, before)


def test_a_plan_for_another_model_is_refused() -> None:
    plan = random_plan(tiny_model("llama"))
    with pytest.raises(PlanError, match="another model"), compressed(tiny_model("qwen3"), plan):
        pass
    deeper = tiny_model("llama", num_hidden_layers=4)
    with pytest.raises(PlanError, match="3 layers, the model 4"), compressed(deeper, plan):
        pass


def test_an_unknown_prefill_is_refused() -> None:
    model = tiny_model("llama")
    with (
        pytest.raises(CacheError, match="unknown prefill"),
        compressed(model, random_plan(model), prefill="none"),
    ):
        pass


def test_unsupported_models_are_refused() -> None:
    model = tiny_model("llama")
    plan = random_plan(model)
    model.config.kv_lora_rank = 4
    with pytest.raises(ModelError, match="MLA"), compressed(model, plan):
        pass


def test_gradients_do_not_keep_old_steps_alive() -> None:
    model, tokens = tiny_model("llama").requires_grad_(True), tiny_tokens()
    with compressed(model, random_plan(model)) as new_cache:
        cache = new_cache()
        for token in tokens.split(1, dim=1):
            model(input_ids=token, past_key_values=cache)
    stored = [part.view for layer in cache.layers for s in layer.stores for part in s.parts]
    assert not any(x.requires_grad for x in stored)
