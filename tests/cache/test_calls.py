"""What a model may be called with inside a compressed block, and what is refused."""

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from manifoldkv import CompressionPlan, Quantization, compress, compressed
from manifoldkv.errors import CacheError
from tests.cache.test_compressed import LONG, ROTARIES, assert_equal, reference, steps
from tests.families import tiny_model, tiny_tokens
from tests.plans import random_plan


def left_padded(pads: int = 4) -> tuple[Tensor, Tensor]:
    """Two sequences and their mask, the first with pads."""
    tokens = tiny_tokens(2, LONG)
    tokens[0, :pads] = 0
    return tokens, (tokens != 0).long()


def kivi_plan(model: PreTrainedModel) -> CompressionPlan:
    return random_plan(model, quantization=Quantization(4, "kivi", group_size=4, residual=3))


def additive(mask: Tensor, dtype: torch.dtype, hidden: float) -> Tensor:
    """The causal mask (B, 1, n, n) of a mask of tokens, as numbers to be added to scores."""
    causal = torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril()
    seen = causal & mask.bool()[:, None, None, :]
    # Stock attention would have nothing to look at for a pad; a token always sees itself.
    seen = seen | torch.eye(mask.shape[1], dtype=torch.bool)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, hidden)


class TestPaddingInKIVIsLayout:
    """Its runs of tokens begin at the first slot, be it a pad or not."""

    def test_it_is_refused(self) -> None:
        model = tiny_model("llama")
        tokens, mask = left_padded()
        four = additive(mask, torch.float64, float("-inf"))
        with compressed(model, kivi_plan(model)) as new_cache:
            cache = new_cache()
            for refused in (mask, mask.bool(), four, four == 0, mask.flip(1)):
                with pytest.raises(CacheError, match="mask has zeros"):
                    model(input_ids=tokens, attention_mask=refused, past_key_values=cache)
            with pytest.raises(CacheError, match="use the static or the token layout"):
                model.generate(tokens, attention_mask=mask, max_new_tokens=2)
            assert cache.get_seq_length() == 0

    def test_a_mask_without_zeros_changes_nothing(self) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens(2, LONG)
        expected = steps(model, kivi_plan(model), tokens, [LONG])
        mask = torch.ones_like(tokens)
        with compressed(model, kivi_plan(model)), torch.no_grad():
            for given in (mask, additive(mask, torch.float64, float("-inf"))):
                assert_equal(model(input_ids=tokens, attention_mask=given).logits, expected)

    @pytest.mark.parametrize("layout", ["static", "token"])
    def test_the_other_layouts_take_it(self, layout: str) -> None:
        model = tiny_model("llama")
        tokens, mask = left_padded()
        quantization = Quantization(4, layout, group_size=4)
        plan = random_plan(model, quantization=quantization)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        alone = steps(model, plan, tokens[:1, 4:], [LONG - 4])
        with compressed(model, plan), torch.no_grad():
            found = model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
        assert_equal(found[:1, 4:], alone)


@pytest.mark.parametrize("rotary", ROTARIES)
class TestMasksOfFourDimensions:
    def test_numbers_are_understood(self, rotary: str) -> None:
        model = tiny_model("llama")
        tokens, mask = left_padded()
        plan = random_plan(model, rotary=rotary)
        with compressed(model, plan), torch.no_grad():
            seen = additive(mask, torch.float64, 1.0) == 0
            expected = model(input_ids=tokens, attention_mask=seen).logits
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
                for hidden in (float("-inf"), torch.finfo(dtype).min):
                    given = additive(mask, dtype, hidden)
                    found = model(input_ids=tokens, attention_mask=given).logits
                    assert torch.equal(found, expected)

    def test_they_are_what_the_reference_makes_of_them(self, rotary: str) -> None:
        model = tiny_model("llama")
        tokens, mask = left_padded()
        plan = random_plan(model, rotary=rotary)
        given = additive(mask, torch.float64, torch.finfo(torch.float64).min)
        expected = reference(model, plan, tokens, attention_mask=given)
        with compressed(model, plan) as new_cache, torch.no_grad():
            cache, found = new_cache(), []
            for start, stop in ((0, 6), (6, 7), (7, LONG)):
                rows = given[:, :, start:stop, :stop]
                inputs = tokens[:, start:stop]
                call = model(input_ids=inputs, attention_mask=rows, past_key_values=cache)
                found.append(call.logits)
        assert_equal(torch.cat(found, dim=1), expected)

    def test_what_they_cannot_say_is_refused(self, rotary: str) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens(2, LONG)
        good = additive(torch.ones_like(tokens), torch.float64, float("-inf"))
        bias = good.clone()
        bias[0, 0, 3, 1] = -1.5
        for mask, said in (
            (bias, "may hold 0 and -inf only"),
            (good.long(), "int64 may hold 0 and -inf only"),
            (good.expand(-1, 4, -1, -1), r"not \(2, 4, 14, 14\)"),
            (good[:, 0], r"not \(2, 14, 14\)"),
            (good[:, :, 1:], "13 × 14 does not fit"),
            (good[:, :, :, 1:], "14 × 13 does not fit"),
        ):
            with compressed(model, random_plan(model, rotary=rotary)) as new_cache:
                cache = new_cache()
                with pytest.raises(CacheError, match=said):
                    model(input_ids=tokens, attention_mask=mask, past_key_values=cache)
                assert cache.get_seq_length() == 0

    def test_a_window_that_has_closed_is_not_taken_for_the_whole_text(self, rotary: str) -> None:
        model, tokens = tiny_model("mistral"), tiny_tokens(2, LONG)
        mask = torch.ones(2, 1, 1, LONG, dtype=torch.bool)
        with compressed(model, random_plan(model, rotary=rotary)) as new_cache, torch.no_grad():
            cache = new_cache()
            model(input_ids=tokens[:, :-1], past_key_values=cache)
            with pytest.raises(CacheError, match="1 × 14 does not fit a layer in which 1 new"):
                model(input_ids=tokens[:, -1:], attention_mask=mask, past_key_values=cache)

    def test_a_mask_for_every_kind_of_layer(self, rotary: str) -> None:
        model, tokens = tiny_model("gemma2"), tiny_tokens(2, LONG)
        plan = random_plan(model, rotary=rotary)
        full = additive(torch.ones_like(tokens), torch.float64, float("-inf"))
        near = full.masked_fill(torch.ones(LONG, LONG).tril(-5).bool(), float("-inf"))
        masks = {"full_attention": full, "sliding_attention": near}
        with compressed(model, plan), torch.no_grad():
            found = model(input_ids=tokens, attention_mask=masks).logits
        assert_equal(found, steps(model, plan, tokens, [LONG]))


HEADS = {
    "AutoModel": "last_hidden_state",
    "AutoModelForSequenceClassification": "logits",
    "AutoModelForTokenClassification": "logits",
}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("head", HEADS)
def test_models_that_do_not_generate(head: str, family: str) -> None:
    """The model they share with one that does is called in the same way."""
    causal, tokens = tiny_model(family), tiny_tokens(2, LONG)
    model = getattr(transformers, head).from_config(causal.config).to(causal.dtype).eval()
    model.get_decoder().load_state_dict(causal.get_decoder().state_dict())
    before = set(vars(model))
    plan = random_plan(model)
    with compressed(model, plan) as new_cache, torch.no_grad():
        cache, found = new_cache(), []
        for piece in tokens.split([9, 1, LONG - 10], dim=1):
            found.append(model(input_ids=piece, past_key_values=cache)[HEADS[head]])
        at_once = model(input_ids=tokens)[HEADS[head]]
    whole = found[-1] if head.endswith("SequenceClassification") else torch.cat(found, dim=1)
    assert_equal(whole, at_once)
    if head == "AutoModel":
        with compressed(causal, random_plan(causal)), torch.no_grad():
            hidden = causal(input_ids=tokens, output_hidden_states=True).hidden_states
        assert_equal(whole, hidden[-1])
    assert cache.get_seq_length() == LONG
    assert set(vars(model)) == before
    planned = compress(model, tokens, recipe="eigen-attention", ratio=0.5)
    with compressed(model, planned):
        model(input_ids=tokens)


class TestSeveralTextsInOneRow:
    positions = torch.cat([torch.arange(5), torch.arange(LONG - 5)]).unsqueeze(0)

    @pytest.mark.parametrize("rotary", ROTARIES)
    def test_they_are_refused_where_the_stock_model_tells_them_apart(self, rotary: str) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens(1, LONG)
        with compressed(model, random_plan(model, rotary=rotary)):
            with pytest.raises(CacheError, match="a row of its own"):
                model(input_ids=tokens, position_ids=self.positions, use_cache=False)
            model.config.use_cache = False
            with pytest.raises(CacheError, match="a row of its own"):
                model(input_ids=tokens, position_ids=self.positions)

    def test_one_text_with_such_positions_is_taken(self) -> None:
        """The mask says that it is one."""
        model, tokens = tiny_model("llama"), tiny_tokens(1, LONG)
        inputs = {"position_ids": self.positions, "attention_mask": torch.ones_like(tokens)}
        plan = random_plan(model)
        expected = reference(model, plan, tokens, **inputs)
        with compressed(model, plan), torch.no_grad():
            assert_equal(model(input_ids=tokens, use_cache=False, **inputs).logits, expected)


def test_attention_weights_are_not_promised() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    with compressed(model, random_plan(model)):
        with pytest.raises(CacheError, match="leave output_attentions out"):
            model(input_ids=tokens, output_attentions=True)
        with pytest.raises(CacheError, match="leave output_attentions out"):
            model.generate(
                tokens, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True
            )
        model(input_ids=tokens, output_attentions=False)


class TestKindsOfCaches:
    @pytest.mark.parametrize("asked", ["static", "dynamic", "offloaded", "quantized"])
    def test_one_that_is_asked_for_is_refused(self, asked: str) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens()
        with compressed(model, random_plan(model)) as new_cache:
            for more in ({}, {"past_key_values": new_cache()}):
                with pytest.raises(CacheError, match=f"cache_implementation='{asked}'"):
                    model.generate(tokens, max_new_tokens=2, cache_implementation=asked, **more)
            config = GenerationConfig(max_new_tokens=2, cache_implementation=asked)
            with pytest.raises(CacheError, match=f"cache_implementation='{asked}'"):
                model.generate(tokens, generation_config=config)

    def test_continuous_batching_is_refused(self) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens()
        with compressed(model, random_plan(model)):
            with pytest.raises(CacheError, match="continuous batching"):
                model.generate(tokens, max_new_tokens=2, cache_implementation="paged")
            with pytest.raises(CacheError, match="continuous batching"):
                model.generate_batch(tokens.tolist(), max_new_tokens=2)

    @pytest.mark.parametrize("default", ["hybrid", "static"])
    def test_a_models_own_default_gives_way(self, default: str) -> None:
        model, tokens = tiny_model("gemma2"), tiny_tokens()
        arguments = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        with compressed(model, random_plan(model)):
            expected = model.generate(tokens, **arguments)
            model.generation_config.cache_implementation = default
            assert torch.equal(model.generate(tokens, **arguments), expected)


def test_attention_that_is_changed_inside_is_noticed() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    before = model(input_ids=tokens).logits
    with compressed(model, random_plan(model)):
        model.set_attn_implementation("eager")
        with pytest.raises(CacheError, match="set to 'eager' inside a compressed block"):
            model(input_ids=tokens)
    assert torch.equal(model(input_ids=tokens).logits, before)


def test_early_exit_is_refused() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(1, 6)
    with (
        compressed(model, random_plan(model)),
        pytest.raises(CacheError, match="2 of 3 layers ran"),
    ):
        model.generate(tokens, max_new_tokens=4, assistant_early_exit=2)


def test_arguments_may_come_by_their_place() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(2, LONG)
    plan = random_plan(model)
    mask = torch.ones_like(tokens)
    with compressed(model, plan) as new_cache, torch.no_grad():
        expected = model.model(input_ids=tokens).last_hidden_state
        cache = new_cache()
        found = model.model(tokens[:, :6], mask[:, :6], None, cache)[0]
        rest = model.model(tokens[:, 6:], mask, None, cache)[0]
    assert cache.get_seq_length() == LONG
    assert_equal(torch.cat([found, rest], dim=1), expected)


def test_who_wants_no_cache_gets_none() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    with compressed(model, random_plan(model)), torch.no_grad():
        assert model(input_ids=tokens).past_key_values is not None
        assert model(input_ids=tokens, use_cache=False).past_key_values is None
        assert len(model(input_ids=tokens, use_cache=False, return_dict=False)) == 1
        assert len(model.model(input_ids=tokens, use_cache=False, return_dict=False)) == 1
        model.config.use_cache = False
        assert model(input_ids=tokens).past_key_values is None


@pytest.mark.parametrize("rotary", ROTARIES)
class TestAfterAnError:
    def test_a_refused_call_leaves_no_trace(self, rotary: str) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens(2, LONG)
        plan = random_plan(model, rotary=rotary)
        expected = steps(model, plan, tokens, [LONG])
        with compressed(model, plan) as new_cache, torch.no_grad():
            cache = new_cache()
            first = model(input_ids=tokens[:, :6], past_key_values=cache).logits
            with pytest.raises(Exception, match="unknown_argument"):
                model(input_ids=tokens[:, :3], past_key_values=cache, unknown_argument=1)
            rest = model(input_ids=tokens[:, 6:], past_key_values=cache).logits
        assert_equal(torch.cat([first, rest], dim=1), expected)

    def test_a_cache_that_is_incomplete_is_refused(self, rotary: str) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens(2, LONG)

        def fail(*ignored: object) -> None:
            raise RuntimeError("on purpose")

        with compressed(model, random_plan(model, rotary=rotary)) as new_cache, torch.no_grad():
            cache = new_cache()
            hook = model.model.layers[1].register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="on purpose"):
                model(input_ids=tokens, past_key_values=cache)
            hook.remove()
            with pytest.raises(CacheError, match="make a new one"):
                model(input_ids=tokens, past_key_values=cache)
            cache.reset()
            model(input_ids=tokens, past_key_values=cache)
