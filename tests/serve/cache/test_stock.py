"""A stock cache taken over is what an exact prefill of the same tokens stores."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from manifoldkv import CompressionPlan, Quantization, compressed
from manifoldkv.core.errors import CacheError
from manifoldkv.models.interface import rotation_of
from manifoldkv.models.rotary import Angles, angles_at
from manifoldkv.models.support import decoder_layers
from manifoldkv.recipes.full_rank import full_rank_plan
from manifoldkv.serve.cache import CompressedCache
from tests.families import FAMILIES, KINDS, MORE_FAMILIES, tiny_model, tiny_tokens
from tests.plans import random_plan
from tests.serve.cache.test_compressed import LONG, ROTARIES, assert_equal, in_pieces, padded_batch

SHORT = 3  # within every window of the families
EVERY = [*FAMILIES, *MORE_FAMILIES]


def stock_cache(model: PreTrainedModel, tokens: Tensor, **inputs: Any) -> DynamicCache:
    """What the stock model keeps of some tokens."""
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=tokens, past_key_values=stock, **inputs)
    return stock


def prefilled(
    model: PreTrainedModel, plan: CompressionPlan, tokens: Tensor, **inputs: Any
) -> CompressedCache:
    """What a block with exact prefill stores of some tokens."""
    with compressed(model, plan, prefill="exact") as new_cache, torch.no_grad():
        cache = new_cache()
        model(input_ids=tokens, past_key_values=cache, **inputs)
    return cache


def assert_same(found: CompressedCache, expected: CompressedCache, tolerance: float = 2e-5) -> None:
    """Both hold the same: integers bit by bit, numbers to rounding."""
    assert found.nbytes() == expected.nbytes()
    assert found.get_seq_length() == expected.get_seq_length()
    for own, other in zip(found.layers, expected.layers, strict=True):
        assert own.tokens_seen == other.tokens_seen
        assert own.tokens_held == other.tokens_held
        for store, like in zip(own.stores, other.stores, strict=True):
            assert len(store) == len(like)
            for part, wanted in zip(store.parts, like.parts, strict=True):
                assert len(part) == len(wanted)
                if not len(part):
                    continue
                assert part.view.dtype == wanted.view.dtype
                if part.view.dtype == torch.uint8:
                    assert torch.equal(part.view, wanted.view)
                else:
                    error = (part.view.double() - wanted.view.double()).abs().max()
                    assert float(error) <= tolerance * float(wanted.view.abs().max())


def rest_of(
    model: PreTrainedModel, cache: CompressedCache, tokens: Tensor, start: int, **inputs: Any
) -> Tensor:
    """Logits of the tokens from `start` on, one by one, after a cache of those before."""
    return in_pieces(model, cache, tokens, [1] * (tokens.shape[1] - start), **inputs)


def check_law(
    model: PreTrainedModel, plan: CompressionPlan, tokens: Tensor, start: int, **inputs: Tensor
) -> None:
    """Taken over after `start` tokens, and after the tokens that follow, it is a prefilled one."""
    first = {name: x[:, :start] for name, x in inputs.items()}
    stock = stock_cache(model, tokens[:, :start], **first)
    exact = prefilled(model, plan, tokens[:, :start], **first)
    with compressed(model, plan) as new_cache:
        cache = new_cache(stock, position_ids=first.get("position_ids"))
        if "attention_mask" not in inputs:  # what a padded query sees is not defined
            assert_same(cache, exact)
        dtype = model.dtype
        assert cache.nbytes() == plan.nbytes(start, batch=len(tokens), dtype=dtype)
        found = rest_of(model, cache, tokens, start, **inputs)
        expected = rest_of(model, exact, tokens, start, **inputs)
    seen = inputs["attention_mask"][:, start:].bool() if "attention_mask" in inputs else ...
    assert_equal(found[seen], expected[seen])
    assert cache.nbytes() == plan.nbytes(tokens.shape[1], batch=len(tokens), dtype=dtype)


@pytest.mark.parametrize(
    ("family", "rotary"),
    [*((family, "pre") for family in EVERY), *((family, "post") for family in KINDS)],
)
def test_it_is_an_exact_prefill(family: str, rotary: str) -> None:
    model, tokens = tiny_model(family), tiny_tokens(2, LONG)
    plan = random_plan(model, rotary=rotary)
    for start in (SHORT, LONG - 2):
        check_law(model, plan, tokens[:, : start + 2], start)


@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("family", KINDS)
def test_padded_texts(family: str, rotary: str) -> None:
    # The stock Gemma 2 makes pads that see nothing NaN in float64.
    dtype = torch.float32 if family == "gemma2" else torch.float64
    model = tiny_model(family, dtype)
    tokens, mask, positions = padded_batch(4)
    plan = random_plan(model, rotary=rotary)
    check_law(model, plan, tokens, LONG - 4, attention_mask=mask, position_ids=positions)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_positions_matter_to_keys_before_rotation_only(family: str) -> None:
    model, tokens = tiny_model(family), tiny_tokens(2, LONG)
    positions = torch.tensor([[0, 1, 2, 5, 6, 7, 9, 10, 11, 12, 20, 21, 22, 23]])
    inputs = {"attention_mask": torch.ones_like(tokens), "position_ids": positions}
    for rotary in ROTARIES:
        plan = random_plan(model, rotary=rotary)
        check_law(model, plan, tokens, LONG - 3, **inputs)
        stock = stock_cache(model, tokens, **inputs)
        with compressed(model, plan) as new_cache:
            left_out = new_cache(stock)
            given = new_cache(stock, position_ids=positions.expand(2, -1).int())
        assert_same(given, prefilled(model, plan, tokens, **inputs))
        if rotary == "post":
            assert_same(left_out, given)
        else:
            with pytest.raises(AssertionError):
                assert_same(left_out, given)


@pytest.mark.parametrize("layout", ["static", "token"])
@pytest.mark.parametrize("rotary", ROTARIES)
def test_rounded_latents(rotary: str, layout: str) -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(2, 20)
    quantization = Quantization(3, layout, group_size=4)
    plan = random_plan(model, rotary=rotary, quantization=quantization, key_grouping=1)
    for start in (2, 3, 7, 8, 17):
        check_law(model, plan, tokens[:, : start + 6], start)


def test_rounded_latents_with_windows() -> None:
    model, tokens = tiny_model("gemma2"), tiny_tokens(2, LONG)
    quantization = Quantization(4, "static", group_size=4)
    check_law(model, random_plan(model, quantization=quantization), tokens, 9)


@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("groupings", [(2, "all"), ("all", 1)])
def test_heads_together_and_oblique_bases(groupings: tuple[Any, Any], rotary: str) -> None:
    model, tokens = tiny_model("qwen3", num_key_value_heads=4), tiny_tokens(2, LONG)
    plan = random_plan(
        model,
        key_grouping=groupings[0],
        value_grouping=groupings[1],
        oblique=True,
        rotary=rotary,
        key_rank=3,
    )
    check_law(model, plan, tokens, 9)


@pytest.mark.parametrize("family", ["llama-yarn", "gemma3", "phi3-partial", "gpt-oss", "cohere"])
class TestShortDtypes:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_it_is_an_exact_prefill_but_for_rounding(self, family: str, dtype: torch.dtype) -> None:
        model, tokens = tiny_model(family, dtype), tiny_tokens(2, LONG)
        plan, stock = random_plan(model), stock_cache(model, tokens)
        with compressed(model, plan) as new_cache:
            found = new_cache(stock)
        tolerance = 0.05 if dtype == torch.bfloat16 else 2e-5
        assert_same(found, prefilled(model, plan, tokens), tolerance)

    def test_keys_are_rotated_back_in_more_than_two_bytes(self, family: str) -> None:
        """Rotated again by the model's own angles, they are off by one rounding of their own."""
        model, tokens = tiny_model(family, torch.bfloat16), tiny_tokens(8, LONG)
        plan = full_rank_plan(model, "pre")  # stores keys themselves
        angles = {}

        def note(module: Any, args: Any, kwargs: Any) -> None:
            angles[module.layer_idx] = kwargs["position_embeddings"]

        layers = decoder_layers(model)
        for layer in layers:
            layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
        stock = stock_cache(model, tokens)
        with compressed(model, plan) as new_cache:
            cache = new_cache(stock)
        for index, (layer, held) in enumerate(zip(cache.layers, stock.layers, strict=True)):
            count, rotated = held.keys.shape[2], held.keys.double()
            keys = layer.key_store.newest(count)
            assert keys.dtype == torch.bfloat16
            assert float((keys - rotated).abs().max()) > 0.1
            cos, sin = (x[:, -count:].double() for x in angles[index])
            error = rotation_of(layers[index])(keys.double(), cos, sin) - rotated
            assert float(error.norm() / rotated.norm()) < torch.finfo(torch.bfloat16).eps / 4


@pytest.mark.parametrize("family", EVERY)
def test_a_rotation_there_and_back_changes_nothing(family: str) -> None:
    model = tiny_model(family)
    layer, embedding = decoder_layers(model)[0], model.get_decoder().rotary_emb
    keys = torch.randn(2, 2, LONG, 8, dtype=torch.float64)
    positions = torch.arange(LONG).repeat(2, 1)
    cos, sin = angles_at(embedding, positions, "full_attention", like=keys)
    angles = Angles(cos, sin, rotation_of(layer))
    there = angles.tile(keys, 0, LONG)
    assert float((there - keys).abs().max()) > 0.1
    # Cohere and Ernie rotate in float32, whatever they are given.
    assert torch.allclose(angles.inverse().tile(there, 0, LONG), keys, atol=1e-5)


@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
class TestHowTheStockCacheWasMade:
    def test_in_several_calls(self, family: str, rotary: str) -> None:
        model, tokens = tiny_model(family), tiny_tokens(2, LONG)
        plan = random_plan(model, rotary=rotary)
        stock = stock_cache(model, tokens[:, :6])
        with torch.no_grad():
            for piece in tokens[:, 6:].split([1, 4, 3], 1):
                model(input_ids=piece, past_key_values=stock)
        expected = prefilled(model, plan, tokens)
        with compressed(model, plan) as new_cache:
            assert_same(new_cache(stock), expected)

    def test_without_windows_or_with_more_than_they_show(self, family: str, rotary: str) -> None:
        model, tokens = tiny_model(family), tiny_tokens(2, LONG)
        plan = random_plan(model, rotary=rotary)
        whole, recorded = DynamicCache(), DynamicCache(config=model.config)
        recorded.activate_past_recording()
        expected = prefilled(model, plan, tokens)
        for stock in (whole, recorded):
            with torch.no_grad():
                model(input_ids=tokens, past_key_values=stock)
            assert stock.layers[0].keys.shape[2] == LONG
            with compressed(model, plan) as new_cache:
                assert_same(new_cache(stock), expected)

    def test_with_a_gradient_or_in_inference_mode(self, family: str, rotary: str) -> None:
        model, tokens = tiny_model(family).requires_grad_(True), tiny_tokens(2, LONG)
        plan = random_plan(model, rotary=rotary)
        expected = prefilled(model, plan, tokens)
        with_gradient, inferred = (DynamicCache(config=model.config) for _ in range(2))
        model(input_ids=tokens, past_key_values=with_gradient)
        with torch.inference_mode():
            model(input_ids=tokens, past_key_values=inferred)
        assert with_gradient.layers[0].keys.requires_grad
        for stock in (with_gradient, inferred):
            with compressed(model, plan) as new_cache:
                cache = new_cache(stock)
                assert_same(cache, expected)
                stores = [store for layer in cache.layers for store in layer.stores]
                stored = [part.view for store in stores for part in store.parts]
                assert not any(x.requires_grad for x in stored)
                model(input_ids=tokens[:, :1], past_key_values=cache)


@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
class TestWhatComesAfterwards:
    def test_one_prefill_serves_many_plans_and_stays(self, family: str, rotary: str) -> None:
        model, tokens = tiny_model(family), tiny_tokens(2, LONG)
        stock = stock_cache(model, tokens[:, :-2])
        before = copy.deepcopy(stock)
        for rank in (2, 8):  # at full rank nothing need be multiplied
            plan = random_plan(model, rotary=rotary, key_rank=rank)
            with compressed(model, plan) as new_cache:
                cache = new_cache(stock)
                rest_of(model, cache, tokens, LONG - 2)
                cache.reset()
                assert cache.get_seq_length() == 0
        for layer, like in zip(stock.layers, before.layers, strict=True):
            assert layer.get_seq_length() == like.get_seq_length()
            assert torch.equal(layer.keys, like.keys)
            assert torch.equal(layer.values, like.values)
        rest = rest_of(model, stock, tokens, LONG - 2)
        assert_equal(rest, model(input_ids=tokens).logits[:, -2:])

    def test_generate_goes_on(self, family: str, rotary: str) -> None:
        model = tiny_model(family)
        tokens, mask, positions = padded_batch(4)
        arguments = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        plan = random_plan(model, rotary=rotary)
        for more in ({}, {"attention_mask": mask}):
            inputs = {name: x[:, :-1] for name, x in more.items()}
            if more:
                inputs["position_ids"] = positions[:, :-1]
            stock = stock_cache(model, tokens[:, :-1], **inputs)
            exact = prefilled(model, plan, tokens[:, :-1], **inputs)
            with compressed(model, plan) as new_cache:
                found = new_cache(stock, position_ids=inputs.get("position_ids"))
                assert torch.equal(
                    model.generate(tokens, past_key_values=found, **more, **arguments),
                    model.generate(tokens, past_key_values=exact, **more, **arguments),
                )

    def test_sequences_can_be_selected_and_repeated(self, family: str, rotary: str) -> None:
        model, tokens = tiny_model(family), tiny_tokens(3, LONG)
        plan = random_plan(model, rotary=rotary)
        chosen = tokens[[2, 0]].repeat_interleave(2, dim=0)
        stock, expected = stock_cache(model, tokens), prefilled(model, plan, chosen)
        for positions in (None, torch.arange(LONG).repeat(3, 1)):
            with compressed(model, plan) as new_cache:
                cache = new_cache(stock, position_ids=positions)
            cache.batch_select_indices(torch.tensor([2, 0]))
            cache.batch_repeat_interleave(2)
            assert_same(cache, expected)

    def test_crops_are_those_of_a_prefilled_one(self, family: str, rotary: str) -> None:
        model, tokens = tiny_model(family), tiny_tokens(2, LONG)
        plan = random_plan(model, rotary=rotary)
        stock, exact = stock_cache(model, tokens), prefilled(model, plan, tokens)
        with compressed(model, plan) as new_cache:
            cache = new_cache(stock)
            if family != "llama":
                with pytest.raises(CacheError, match="has dropped what would be seen again"):
                    cache.crop(-2)
                return
            cache.crop(-2)
            exact.crop(-2)
            assert_same(cache, exact)
            again = rest_of(model, cache, tokens, LONG - 2)
            assert_equal(again, rest_of(model, exact, tokens, LONG - 2))


def test_no_tokens_make_an_empty_cache() -> None:
    model, tokens = tiny_model("mistral"), tiny_tokens(2, LONG)
    plan = random_plan(model)
    used = stock_cache(model, tokens)
    used.reset()
    with compressed(model, plan) as new_cache:
        for stock in (DynamicCache(), DynamicCache(config=model.config), used, None):
            cache = new_cache(stock)
            assert cache.get_seq_length() == cache.nbytes() == 0
            found = model(input_ids=tokens, past_key_values=cache).logits
            assert_equal(found, model(input_ids=tokens, use_cache=False).logits)


def test_a_model_that_is_converted_inside_the_block() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(2, LONG)
    plan = random_plan(model)
    stock = stock_cache(tiny_model("llama").float(), tokens)
    with compressed(model, plan) as new_cache:
        model.float()
        found = new_cache(stock)
        rest_of(model, found, torch.cat([tokens, tokens[:, :1]], dim=1), LONG)
    assert found.nbytes() == plan.nbytes(LONG + 1, batch=2, dtype=torch.float32)
