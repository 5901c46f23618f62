"""Cached decoding equals one full forward pass with projected keys and values, in float64."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from manifoldkv import CompressionPlan, Quantization, compressed
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.interface import rotation_of
from manifoldkv.models.rotary import rotate_halves, rotation_of_keys
from manifoldkv.models.support import decoder_layers
from manifoldkv.serve.cache import attention as cache_attention
from manifoldkv.serve.cache import backend as cache_backend
from tests.families import KINDS, tiny_model, tiny_tokens
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


def in_pieces(
    model: PreTrainedModel, cache: Any, tokens: Tensor, sizes: list[int], **inputs: Tensor
) -> Tensor:
    """Logits of tokens fed in pieces, their mask and positions cut as `generate` does."""
    found, start = [], cache.get_seq_length()
    for stop in itertools.accumulate(sizes, initial=start):
        if stop == start:
            continue
        more = {}
        if "attention_mask" in inputs:
            more["attention_mask"] = inputs["attention_mask"][:, :stop]
        if "position_ids" in inputs:
            more["position_ids"] = inputs["position_ids"][:, start:stop]
        with torch.no_grad():
            output = model(tokens[:, start:stop], past_key_values=cache, **more)
        found.append(output.logits)
        start = stop
    return torch.cat(found, dim=1)


def padded_batch(pads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two texts, the first of them shorter; their mask, and the positions `generate` gives them."""
    tokens = tiny_tokens(2, LONG)
    tokens[0, :pads] = 0
    mask = torch.ones_like(tokens)
    mask[0, :pads] = 0
    return tokens, mask, (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    assert float((found - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("family", KINDS)
class TestKindsOfAttention:
    """Other families differ in how they make keys and values: tests/models/test_families.py."""

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
        full = random_plan(model, key_rank=8, value_rank=8, rotary=rotary)
        assert_equal(steps(model, full, tokens, [6, 1, LONG - 7]), uncompressed)

    def test_left_padding_changes_nothing(self, family: str, rotary: str) -> None:
        model = tiny_model(family)
        tokens, mask, positions = padded_batch(4)
        plan = random_plan(model, rotary=rotary)
        with compressed(model, plan) as new_cache, torch.no_grad():
            sizes = [6, 3] + [1] * (LONG - 9)
            inputs = {"attention_mask": mask, "position_ids": positions}
            found = in_pieces(model, new_cache(), tokens, sizes, **inputs)
        assert_equal(found[:1, 4:], steps(model, plan, tokens[:1, 4:], [LONG - 4]))
        assert_equal(found[1:], steps(model, plan, tokens[1:], [LONG]))

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
@pytest.mark.parametrize("groupings", [("shared", 2), (1, "all"), (2, 1), ("all", "all")])
def test_every_grouping(groupings: tuple, oblique: bool, rotary: str) -> None:
    model = tiny_model("qwen3", num_attention_heads=8, num_key_value_heads=4)
    plan = random_plan(
        model,
        key_grouping=groupings[0],
        value_grouping=groupings[1],
        oblique=oblique,
        rotary=rotary,
        key_rank=4,  # that of values: the kernel of torch runs on latents
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
    monkeypatch.setattr(cache_backend, "ELEMENTS_AT_A_TIME", 2 * 2 * 8 * 3)
    monkeypatch.setattr(cache_attention, "SCORES_AT_A_TIME", 2 * 4 * LONG * 5)
    assert_equal(steps(model, plan, tokens, [LONG]), whole)
    assert_equal(steps(model, plan, tokens, [9, 1, 4]), whole)


class TestManyQueries:
    """Those of a prompt attend to keys and values that are reconstructed for them."""

    @pytest.fixture(autouse=True)
    def many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cache_attention, "MANY_QUERIES", 2)
        monkeypatch.setattr(cache_attention, "MASKED_AT_A_TIME", LONG * 6)
        monkeypatch.setattr(cache_attention, "QUERIES_AT_A_TIME", 4)
        monkeypatch.setattr(cache_backend, "ELEMENTS_AT_A_TIME", 2 * 2 * 8 * 3)

    @pytest.mark.parametrize("rotary", ROTARIES)
    @pytest.mark.parametrize("family", KINDS)
    def test_they_see_what_the_cache_stores(self, family: str, rotary: str) -> None:
        model, tokens = tiny_model(family), tiny_tokens(2, LONG)
        plan = random_plan(model, rotary=rotary, key_grouping="all", oblique=True)
        expected = reference(model, plan, tokens)
        assert_equal(steps(model, plan, tokens, [LONG]), expected)
        assert_equal(steps(model, plan, tokens, [9, 1, 4]), expected)

    @pytest.mark.parametrize("layout", ["static", "token"])
    def test_rounded_latents(self, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens(2, LONG)
        plan = random_plan(model, quantization=Quantization(4, layout, group_size=4))
        found = steps(model, plan, tokens, [LONG])
        monkeypatch.setattr(cache_attention, "MANY_QUERIES", 10**6)
        assert_equal(found, steps(model, plan, tokens, [LONG]))

    def test_the_kernel_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens(2, LONG)
        calls = []

        def counted(
            queries: torch.Tensor, keys: torch.Tensor, *rest: object, **options: object
        ) -> torch.Tensor:
            calls.append((queries.shape[2], keys.shape[2]))
            return scaled_dot_product_attention(queries, keys, *rest, **options)

        monkeypatch.setattr(cache_attention, "scaled_dot_product_attention", counted)
        steps(model, random_plan(model), tokens, [LONG])
        assert set(calls) == {(LONG, LONG)}  # without a mask
        calls.clear()
        steps(model, random_plan(model), tokens, [2, LONG - 2])
        masked = [call for call in calls if call != (2, 2)]
        assert max(queries for queries, _ in masked) == 4
        assert sum(queries for queries, _ in masked) >= LONG - 2
        seen = 2
        for queries, keys in masked:
            seen += queries
            assert keys == seen  # no key that none of the queries sees
            seen = 2 if seen == LONG else seen

    def test_padded_rows_are_those_of_a_text_alone(self) -> None:
        model = tiny_model("llama")
        tokens, mask, positions = padded_batch(4)
        with compressed(model, random_plan(model)):
            found = model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
            alone = model(input_ids=tokens[:1, 4:]).logits
        assert_equal(found[:1, 4:], alone)
        assert bool(found.isfinite().all())


@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
class TestGenerate:
    arguments = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}  # noqa: RUF012

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


@pytest.mark.parametrize("layout", ["static", "token"])
def test_integers_guess_ahead(layout: str) -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(1, 4).repeat(1, 3)
    plan = random_plan(model, quantization=Quantization(4, layout, group_size=4))
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
