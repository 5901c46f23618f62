"""Cached decoding equals one full forward pass with projected keys and values, in float64."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, PreTrainedModel

from manifoldkv import CompressionPlan, Quantization, compressed
from manifoldkv.cache import attention as cache_attention
from manifoldkv.coding.integers import LAYOUTS
from manifoldkv.errors import CacheError, ModelError, PlanError
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.interface import rotation_of
from manifoldkv.models.rotary import rotate_halves, rotation_of_keys
from manifoldkv.models.support import decoder_layers
from tests.families import FAMILIES, tiny_model, tiny_tokens
from tests.plans import projected_by_hooks, random_plan

TOLERANCE = 2e-5  # norms compute in float32 even in float64 models; logits are of order 1 to 10
ROTARIES = ("pre", "post")
LONG = 14  # beyond every window of the families


def steps(
    model: PreTrainedModel, plan: CompressionPlan, tokens: Tensor, sizes: list[int], **options
) -> Tensor:
    """Logits of a sequence fed in pieces through one cache."""
    assert sum(sizes) == tokens.shape[1]
    with compressed(model, plan, **options) as new_cache, torch.no_grad():
        cache = new_cache()
        pieces = [model(input_ids=x, past_key_values=cache).logits for x in tokens.split(sizes, 1)]
    assert cache.get_seq_length() == tokens.shape[1]
    return torch.cat(pieces, dim=1)


def reference(model: PreTrainedModel, plan: CompressionPlan, tokens: Tensor, **inputs) -> Tensor:
    with projected_by_hooks(model, plan), torch.no_grad():
        return model(input_ids=tokens, use_cache=False, **inputs).logits


def assert_equal(found: Tensor, expected: Tensor) -> None:
    assert float((found - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("family", FAMILIES)
class TestFamilies:
    def test_full_rank_is_the_uncompressed_model(self, family: str, rotary: str) -> None:
        model, tokens = tiny_model(family), tiny_tokens(2, LONG)
        plan = random_plan(model, key_rank=8, value_rank=8, rotary=rotary)
        expected = model(input_ids=tokens).logits
        assert_equal(steps(model, plan, tokens, [LONG]), expected)
        assert_equal(steps(model, plan, tokens, [6] + [1] * (LONG - 6)), expected)

    def test_cached_steps_are_one_pass_with_projected_keys_and_values(
        self, family: str, rotary: str
    ) -> None:
        model, tokens = tiny_model(family), tiny_tokens(2, LONG)
        plan = random_plan(model, rotary=rotary)
        expected = reference(model, plan, tokens)
        for sizes in ([LONG], [1] * LONG, [5, 1, 4, 1, 3]):
            assert_equal(steps(model, plan, tokens, sizes), expected)
        uncompressed = model(input_ids=tokens).logits
        assert float((expected - uncompressed).abs().max()) > 0.01  # the test is not vacuous

    def test_left_padding_changes_nothing(self, family: str, rotary: str) -> None:
        model, tokens = tiny_model(family), tiny_tokens(1, LONG)
        plan = random_plan(model, rotary=rotary)
        alone = steps(model, plan, tokens[:, 4:], [LONG - 4])
        other = tiny_tokens(2, LONG)[1:]
        padded = torch.cat([tokens.index_fill(1, torch.arange(4), 0), other])
        mask = torch.ones_like(padded)
        mask[0, :4] = 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with compressed(model, plan) as new_cache, torch.no_grad():
            cache, found = new_cache(), []
            for start, stop in ((0, 6), (6, 9), *((i, i + 1) for i in range(9, LONG))):
                output = model(
                    input_ids=padded[:, start:stop],
                    attention_mask=mask[:, :stop],
                    position_ids=positions[:, start:stop],
                    past_key_values=cache,
                )
                found.append(output.logits)
        assert_equal(torch.cat(found, dim=1)[:1, 4:], alone)
        assert_equal(torch.cat(found, dim=1)[1:], steps(model, plan, other, [LONG]))

    def test_generate_with_a_cache_is_generate_without(self, family: str, rotary: str) -> None:
        """Without a cache every step sees a fresh compressed one over the whole text."""
        model, tokens = tiny_model(family), tiny_tokens(2, 7)
        plan = random_plan(model, rotary=rotary)
        arguments = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        with compressed(model, plan) as new_cache:
            greedy = model.generate(tokens, past_key_values=new_cache(), **arguments)
            assert torch.equal(greedy, model.generate(tokens, use_cache=False, **arguments))
            assert torch.equal(greedy, model.generate(tokens, **arguments))
            beams = model.generate(tokens, past_key_values=new_cache(), num_beams=3, **arguments)
            unused = model.generate(tokens, use_cache=False, num_beams=3, **arguments)
            assert torch.equal(beams, unused)


@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("oblique", [False, True])
@pytest.mark.parametrize("groupings", list(itertools.product(("shared", 1, 2, "all"), repeat=2)))
def test_every_grouping(groupings: tuple, oblique: bool, rotary: str) -> None:
    model = tiny_model("qwen3", num_attention_heads=8, num_key_value_heads=4)
    plan = random_plan(
        model,
        key_grouping=groupings[0],
        value_grouping=groupings[1],
        oblique=oblique,
        rotary=rotary,
        key_rank=3,
    )
    tokens = tiny_tokens(2, 9)
    expected = reference(model, plan, tokens)
    assert_equal(steps(model, plan, tokens, [9]), expected)
    assert_equal(steps(model, plan, tokens, [4, 1, 1, 3]), expected)


@pytest.mark.parametrize("rotary", ROTARIES)
def test_tiles_and_blocks_of_queries_change_nothing(
    rotary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = tiny_model("mistral"), tiny_tokens(2, LONG)
    plan = random_plan(model, rotary=rotary)
    whole = steps(model, plan, tokens, [LONG])
    monkeypatch.setattr(cache_attention, "ELEMENTS_AT_A_TIME", 2 * 2 * 8 * 3)
    monkeypatch.setattr(cache_attention, "SCORES_AT_A_TIME", 2 * 4 * LONG * 5)
    assert_equal(steps(model, plan, tokens, [LONG]), whole)
    assert_equal(steps(model, plan, tokens, [9, 1, 4]), whole)


class TestManyQueries:
    """Those of a prompt attend to keys and values that are reconstructed for them."""

    @pytest.fixture(autouse=True)
    def many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cache_attention, "MANY_QUERIES", 2)
        monkeypatch.setattr(cache_attention, "MASKED_AT_A_TIME", LONG * 6)
        monkeypatch.setattr(cache_attention, "ELEMENTS_AT_A_TIME", 2 * 2 * 8 * 3)

    @pytest.mark.parametrize("rotary", ROTARIES)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_they_see_what_the_cache_stores(self, family: str, rotary: str) -> None:
        model, tokens = tiny_model(family), tiny_tokens(2, LONG)
        plan = random_plan(model, rotary=rotary, key_grouping="all", oblique=True)
        expected = reference(model, plan, tokens)
        assert_equal(steps(model, plan, tokens, [LONG]), expected)
        assert_equal(steps(model, plan, tokens, [9, 1, 4]), expected)

    @pytest.mark.parametrize("layout", ["static", "token", "kivi"])
    def test_rounded_latents(self, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens(2, LONG)
        plan = random_plan(model, quantization=Quantization(4, layout, group_size=4, residual=3))
        found = steps(model, plan, tokens, [LONG])
        monkeypatch.setattr(cache_attention, "MANY_QUERIES", 10**6)
        assert_equal(found, steps(model, plan, tokens, [LONG]))

    def test_the_kernel_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens(2, LONG)
        calls = []

        def counted(queries: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
            calls.append(queries.shape[2])
            return scaled_dot_product_attention(queries, *rest, **options)

        monkeypatch.setattr(cache_attention, "scaled_dot_product_attention", counted)
        steps(model, random_plan(model), tokens, [LONG])
        assert max(calls) == 6
        assert sum(calls) >= LONG

    def test_padded_rows_are_those_of_a_text_alone(self) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens(2, LONG)
        plan = random_plan(model)
        mask = torch.ones_like(tokens)
        mask[0, :4] = 0
        places = (mask.cumsum(dim=1) - 1).clamp(min=0)
        with compressed(model, plan):
            found = model(input_ids=tokens, attention_mask=mask, position_ids=places).logits
            alone = model(input_ids=tokens[:1, 4:]).logits
        assert_equal(found[:1, 4:], alone)
        assert bool(found.isfinite().all())


@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
class TestGenerate:
    arguments = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}  # noqa: RUF012

    def test_chunked_prefill(self, family: str, rotary: str) -> None:
        model, tokens = tiny_model(family), tiny_tokens(2, 11)
        plan = random_plan(model, rotary=rotary)
        with compressed(model, plan) as new_cache:
            once = model.generate(tokens, past_key_values=new_cache(), **self.arguments)
            chunked = model.generate(
                tokens, past_key_values=new_cache(), prefill_chunk_size=4, **self.arguments
            )
        assert torch.equal(once, chunked)

    def test_prompt_lookup_and_assisted_are_greedy(self, family: str, rotary: str) -> None:
        model, tokens = tiny_model(family), tiny_tokens(1, 4).repeat(1, 3)
        assistant = tiny_model(family, seed=1)
        plan = random_plan(model, rotary=rotary)
        with compressed(model, plan) as new_cache:
            greedy = model.generate(tokens, past_key_values=new_cache(), **self.arguments)
            lookup = model.generate(
                tokens,
                past_key_values=new_cache(),
                prompt_lookup_num_tokens=3,
                **self.arguments,
            )
            assisted = model.generate(
                tokens, past_key_values=new_cache(), assistant_model=assistant, **self.arguments
            )
        assert torch.equal(greedy, lookup)
        assert torch.equal(greedy, assisted)

    def test_a_compressed_assistant(self, family: str, rotary: str) -> None:
        """In a block of its own, for a model that is compressed itself and for one that is not."""
        model, tokens = tiny_model(family), tiny_tokens(1, 4).repeat(1, 3)
        # Nearly the same weights, so that some of its tokens are taken and others are not.
        assistant = tiny_model(family)
        generator = torch.Generator().manual_seed(0)
        for weight in assistant.parameters():
            weight.data += 0.01 * torch.randn(weight.shape, generator=generator).to(weight)
        plan = random_plan(model, rotary=rotary, key_rank=8, value_rank=7)
        greedy = model.generate(tokens, **self.arguments)
        with compressed(assistant, plan.transferred_to(Decoder.of(assistant))):
            found = model.generate(tokens, assistant_model=assistant, **self.arguments)
            assert torch.equal(found, greedy)
            with compressed(model, plan):
                greedy = model.generate(tokens, **self.arguments)
                found = model.generate(tokens, assistant_model=assistant, **self.arguments)
                assert torch.equal(found, greedy)

    def test_a_returned_cache_can_be_continued(self, family: str, rotary: str) -> None:
        model, tokens = tiny_model(family), tiny_tokens(2, 6)
        plan = random_plan(model, rotary=rotary)
        with compressed(model, plan) as new_cache:
            first = model.generate(
                tokens,
                past_key_values=new_cache(),
                return_dict_in_generate=True,
                **self.arguments,
            )
            prompt = torch.cat([first.sequences, tiny_tokens(2, 3)], dim=1)
            # Without a mask, `generate` takes tokens that happen to be 0 for padding.
            arguments = self.arguments | {"attention_mask": torch.ones_like(prompt)}
            continued = model.generate(prompt, past_key_values=first.past_key_values, **arguments)
            anew = model.generate(prompt, past_key_values=new_cache(), **arguments)
        assert torch.equal(continued, anew)

    def test_crop_leaves_no_trace(self, family: str, rotary: str) -> None:
        model, tokens = tiny_model(family), tiny_tokens(2, 9)
        plan = random_plan(model, rotary=rotary)
        expected = reference(model, plan, tokens)
        with compressed(model, plan) as new_cache, torch.no_grad():
            cache = new_cache()
            cache.activate_past_recording()
            model(input_ids=tokens[:, :6], past_key_values=cache)
            model(input_ids=tokens.flip(1)[:, :3], past_key_values=cache)
            cache.crop(-3)
            found = model(input_ids=tokens[:, 6:], past_key_values=cache).logits
            cache.crop(0)
            assert cache.get_seq_length() == 9
        assert_equal(found, expected[:, 6:])

    def test_sequences_can_be_selected_and_repeated(self, family: str, rotary: str) -> None:
        model, tokens = tiny_model(family), tiny_tokens(3, 9)
        plan = random_plan(model, rotary=rotary)
        positions = torch.arange(9).repeat(3, 1)
        chosen = tokens[[2, 0]].repeat_interleave(2, dim=0)
        with compressed(model, plan) as new_cache, torch.no_grad():
            cache = new_cache()
            model(input_ids=tokens[:, :6], position_ids=positions[:, :6], past_key_values=cache)
            cache.batch_select_indices(torch.tensor([2, 0]))
            cache.batch_repeat_interleave(2)
            found = model(input_ids=chosen[:, 6:], past_key_values=cache).logits
        assert_equal(found, reference(model, plan, chosen)[:, 6:])


def test_positions_per_sequence_follow_positions_for_all() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(2, 8)
    plan = random_plan(model)
    with compressed(model, plan) as new_cache, torch.no_grad():
        cache = new_cache()
        model(input_ids=tokens[:, :5], past_key_values=cache)
        positions = torch.arange(5, 8).repeat(2, 1)
        found = model(input_ids=tokens[:, 5:], position_ids=positions, past_key_values=cache).logits
    assert_equal(found, reference(model, plan, tokens)[:, 5:])


def test_positions_may_jump() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(1, 8)
    plan = random_plan(model)
    positions = torch.tensor([[0, 1, 2, 3, 9, 10, 20, 21]])
    # Without a mask, the stock model takes a jump for the start of another text.
    mask = torch.ones_like(tokens)
    expected = reference(model, plan, tokens, position_ids=positions, attention_mask=mask)
    with compressed(model, plan) as new_cache, torch.no_grad():
        cache = new_cache()
        found = [
            model(
                input_ids=tokens[:, i : i + 2],
                position_ids=positions[:, i : i + 2],
                past_key_values=cache,
            ).logits
            for i in range(0, 8, 2)
        ]
    assert_equal(torch.cat(found, dim=1), expected)


@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("family", ["llama", "mistral"])
class TestExactPrefill:
    def test_a_prompt_sees_itself_unprojected(self, family: str, rotary: str) -> None:
        model, tokens = tiny_model(family), tiny_tokens(2, LONG)
        plan = random_plan(model, rotary=rotary)
        found = steps(model, plan, tokens, [LONG], prefill="exact")
        assert_equal(found, model(input_ids=tokens).logits)

    def test_what_is_stored_is_compressed(self, family: str, rotary: str) -> None:
        model, tokens = tiny_model(family), tiny_tokens(2, 10)
        plan = random_plan(model, rotary=rotary)
        compressed_prefill = steps(model, plan, tokens, [4] + [1] * 6)
        exact = steps(model, plan, tokens, [4] + [1] * 6, prefill="exact")
        uncompressed = model(input_ids=tokens).logits
        assert_equal(exact[:, :4], uncompressed[:, :4])
        assert float((exact[:, 4:] - uncompressed[:, 4:]).abs().max()) > 0.01
        assert float((exact[:, :4] - compressed_prefill[:, :4]).abs().max()) > 0.01
        one_layer = tiny_model(family, num_hidden_layers=1)
        plan = random_plan(one_layer, rotary=rotary)
        # A single layer stores the same whatever its prompt saw: later tokens agree.
        first = steps(one_layer, plan, tokens, [4] + [1] * 6)
        second = steps(one_layer, plan, tokens, [4] + [1] * 6, prefill="exact")
        assert_equal(first[:, 4:], second[:, 4:])


def rounded_plan(model: PreTrainedModel, rotary: str, bits: int, layout: str) -> CompressionPlan:
    quantization = Quantization(bits, layout, group_size=4, residual=3)
    return random_plan(model, rotary=rotary, quantization=quantization, key_grouping=1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rotary", ROTARIES)
def test_more_bits_are_closer(rotary: str, layout: str) -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(16, 20)
    exact = steps(model, random_plan(model, rotary=rotary, key_grouping=1), tokens, [20])

    def error(bits: int) -> float:
        rounded = steps(model, rounded_plan(model, rotary, bits, layout), tokens, [20])
        return float((rounded - exact).norm() / exact.norm())

    errors = [error(bits) for bits in (8, 4, 3, 2)]
    for more, fewer in itertools.pairwise(errors):
        assert 0 < more < 0.8 * fewer
    assert errors[0] < 0.03
    assert errors[-1] > 3 * errors[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("rotary", ROTARIES)
class TestQuantized:
    def test_pieces_are_one_shot(self, rotary: str, bits: int, layout: str) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens(2, 20)
        plan = rounded_plan(model, rotary, bits, layout)
        once = steps(model, plan, tokens, [20])
        assert_equal(steps(model, plan, tokens, [1] * 20), once)
        assert_equal(steps(model, plan, tokens, [9, 1, 6, 4]), once)

    def test_generate_and_beams(self, rotary: str, bits: int, layout: str) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens(2, 7)
        plan = rounded_plan(model, rotary, bits, layout)
        arguments = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "num_beams": 3}
        with compressed(model, plan) as new_cache:
            cached = model.generate(tokens, past_key_values=new_cache(), **arguments)
            assert torch.equal(cached, model.generate(tokens, use_cache=False, **arguments))


@pytest.mark.parametrize("rotary", ROTARIES)
def test_the_kivi_layout_refuses_to_guess_ahead(rotary: str) -> None:
    model, assistant, tokens = tiny_model("llama"), tiny_model("llama"), tiny_tokens(1, 4)
    plan = random_plan(model, rotary=rotary, quantization=Quantization(4, "kivi", group_size=4))
    tokens = tokens.repeat(1, 3)
    with compressed(model, plan) as new_cache:
        for how in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
            for more in ({}, {"past_key_values": new_cache()}):
                with pytest.raises(CacheError, match="no assisted decoding and no prompt lookup"):
                    model.generate(tokens, max_new_tokens=5, **how, **more)
        with pytest.raises(CacheError, match="no assisted decoding and no prompt lookup"):
            assistant.generate(tokens, max_new_tokens=5, assistant_model=model)


@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("layout", ["static", "token"])
def test_other_layouts_guess_ahead(layout: str, rotary: str) -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(1, 4).repeat(1, 3)
    plan = random_plan(model, rotary=rotary, quantization=Quantization(4, layout, group_size=4))
    arguments = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    with compressed(model, plan) as new_cache:
        greedy = model.generate(tokens, use_cache=False, **arguments)
        for how in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": tiny_model("llama")}):
            found = model.generate(tokens, past_key_values=new_cache(), **how, **arguments)
            assert torch.equal(found, greedy)


@pytest.mark.parametrize("layout", ["static", "token"])
def test_other_layouts_work_with_windows_and_crops(layout: str) -> None:
    model, tokens = tiny_model("gemma2"), tiny_tokens(2, LONG)
    plan = random_plan(model, quantization=Quantization(4, layout, group_size=4))
    once = steps(model, plan, tokens, [LONG])
    assert_equal(steps(model, plan, tokens, [3] + [1] * (LONG - 3)), once)
    with compressed(model, plan) as new_cache, torch.no_grad():
        cache = new_cache()
        cache.activate_past_recording()
        model(input_ids=tokens[:, :9], past_key_values=cache)
        model(input_ids=tokens.flip(1)[:, :4], past_key_values=cache)
        cache.crop(-4)
        found = model(input_ids=tokens[:, 9:], past_key_values=cache).logits
    assert_equal(found, once[:, 9:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("layout", [None, "static", "token"])
def test_short_dtypes_are_the_same_but_for_rounding(
    family: str, rotary: str, dtype: torch.dtype, layout: str | None
) -> None:
    quantization = None if layout is None else Quantization(8, layout, group_size=4)
    tokens = tiny_tokens(2, LONG)
    logits = {}
    for each in (dtype, torch.float64):
        model = tiny_model(family, dtype=torch.bfloat16).to(each)
        plan = random_plan(model, rotary=rotary, quantization=quantization, value_rank=3)
        found = steps(model, plan, tokens, [9] + [1] * (LONG - 9))
        assert found.dtype == each
        logits[each] = found.double()
    error = float((logits[dtype] - logits[torch.float64]).norm() / logits[torch.float64].norm())
    assert error < (1e-4 if dtype == torch.float32 and layout is None else 0.06)


def test_both_rotations_of_keys_are_used_and_agree() -> None:
    """Llama turns halves against each other, gpt-oss has an angle per pair only."""
    angle = torch.rand(2, 5, 4, dtype=torch.float64)
    x = torch.rand(2, 3, 5, 8, dtype=torch.float64)
    for family, repeats in (("llama", 2), ("gpt-oss", 1)):
        layer = decoder_layers(tiny_model(family))[0]
        cos, sin = (f(angle).repeat(1, 1, repeats) for f in (torch.cos, torch.sin))
        rotate = rotation_of(layer)
        halves = rotation_of_keys(layer, cos.shape[-1]) is rotate_halves
        assert halves == (family == "llama")
        by_pair = torch.view_as_complex(torch.stack(x.unflatten(-1, (2, 4)).unbind(-2), dim=-1))
        turned = by_pair * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
        expected = torch.cat([turned.real, turned.imag], dim=-1)
        assert torch.allclose(rotate(x, cos, sin), expected)
        if halves:
            assert torch.allclose(rotate_halves(x, cos, sin), expected)


class TestTheBlock:
    def test_it_leaves_the_model_as_it_was(self) -> None:
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

    def test_a_call_without_a_cache_is_compressed(self) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens()
        plan = random_plan(model)
        expected = reference(model, plan, tokens)
        with compressed(model, plan):
            assert_equal(model(input_ids=tokens).logits, expected)
            assert_equal(model(input_ids=tokens, use_cache=False).logits, expected)
            assert_equal(model(tokens).logits, expected)

    def test_a_kind_of_cache_that_a_model_asks_for_gives_way(self) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens()
        arguments = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        with compressed(model, random_plan(model)) as new_cache:
            expected = model.generate(tokens, past_key_values=new_cache(), **arguments)
            model.generation_config.cache_implementation = "static"
            assert torch.equal(model.generate(tokens, **arguments), expected)
            found = model.generate(tokens, past_key_values=new_cache(), **arguments)
            assert torch.equal(found, expected)
        assert model.generation_config.cache_implementation == "static"

    def test_nothing_is_left_of_a_block_that_could_not_begin(self) -> None:
        model = tiny_model("llama")
        plan = random_plan(model)
        del model.model.rotary_emb
        with pytest.raises(ModelError, match="no rotary_emb"), compressed(model, plan):
            pass
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())

    def test_a_foreign_cache_raises(self) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens()
        with compressed(model, random_plan(model)):
            with pytest.raises(CacheError, match="DynamicCache is not a compressed cache"):
                model(input_ids=tokens, past_key_values=DynamicCache(config=model.config))
            with pytest.raises(CacheError, match="DynamicCache is not a compressed cache"):
                model.generate(tokens, past_key_values=DynamicCache(), max_new_tokens=2)

    def test_a_cache_of_another_plan_raises(self) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens()
        with compressed(model, random_plan(model)) as new_cache:
            cache = new_cache()
        for other in ({"key_rank": 4}, {"oblique": True}, {"rotary": "post"}, {"sinks": 3}):
            with (
                compressed(model, random_plan(model, **other)),
                pytest.raises(CacheError, match="another plan"),
            ):
                model(input_ids=tokens, past_key_values=cache)

    def test_the_cache_outside_its_block_raises(self) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens()
        with compressed(model, random_plan(model)) as new_cache:
            cache = new_cache()
        with pytest.raises(CacheError, match=r"inside `with manifoldkv\.compressed"):
            model(input_ids=tokens, past_key_values=cache)

    def test_blocks_do_not_nest(self) -> None:
        model = tiny_model("llama")
        plan = random_plan(model)
        with (
            compressed(model, plan),
            pytest.raises(CacheError, match="already inside"),
            compressed(model, plan),
        ):
            pass

    def test_another_model_with_the_same_configuration_object_is_not_touched(self) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens()
        twin = type(model)(model.config).double().eval().requires_grad_(False)
        before = twin(input_ids=tokens).logits
        with compressed(model, random_plan(model)):
            assert_equal(twin(input_ids=tokens).logits, before)

    def test_a_plan_for_another_model_is_refused(self) -> None:
        plan = random_plan(tiny_model("llama"))
        with pytest.raises(PlanError, match="another model"), compressed(tiny_model("qwen3"), plan):
            pass
        deeper = tiny_model("llama", num_hidden_layers=4)
        with pytest.raises(PlanError, match="3 layers, the model 4"), compressed(deeper, plan):
            pass

    def test_an_unknown_prefill_is_refused(self) -> None:
        model = tiny_model("llama")
        with (
            pytest.raises(CacheError, match="unknown prefill"),
            compressed(model, random_plan(model), prefill="none"),
        ):
            pass

    def test_unsupported_models_are_refused(self) -> None:
        model = tiny_model("llama")
        plan = random_plan(model)
        model.config.kv_lora_rank = 4
        with pytest.raises(ModelError, match="MLA"), compressed(model, plan):
            pass

    def test_gradients_do_not_keep_old_steps_alive(self) -> None:
        model, tokens = tiny_model("llama").requires_grad_(True), tiny_tokens()
        with compressed(model, random_plan(model)) as new_cache:
            cache = new_cache()
            for token in tokens.split(1, dim=1):
                model(input_ids=token, past_key_values=cache)
        stored = [part.view for layer in cache.layers for s in layer.stores for part in s.parts]
        assert not any(x.requires_grad for x in stored)
