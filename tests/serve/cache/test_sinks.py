"""The first tokens of every sequence are seen as they are, however they come and go."""

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from manifoldkv import CompressionPlan, Quantization, compressed
from manifoldkv.core.errors import PlanError
from manifoldkv.recipes.rounding import quantize
from manifoldkv.serve.cache import attention as cache_attention
from manifoldkv.serve.cache import backend as cache_backend
from manifoldkv.serve.cache.sinks import Sinks
from manifoldkv.statistics.capture import capture
from tests.families import KINDS, tiny_model, tiny_tokens
from tests.plans import random_plan
from tests.serve.cache.test_compressed import (
    LONG,
    ROTARIES,
    assert_equal,
    in_pieces,
    padded_batch,
    reference,
    steps,
)
from tests.serve.cache.test_stock import check_law, prefilled, stock_cache

LAYOUTS = {
    "exact": {},
    "static": {"quantization": Quantization(3, "static", group_size=4)},
    "token": {"quantization": Quantization(4, "token", group_size=4)},
}
PIECES = ([LONG], [1] * LONG, [2, 1, 4, 1, 6])


@pytest.mark.parametrize("sinks", [1, 4, 64])
@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("family", KINDS)
def test_first_tokens_are_seen_as_they_are(family: str, rotary: str, sinks: int) -> None:
    model, tokens = tiny_model(family), tiny_tokens(2, LONG)
    plan = random_plan(model, rotary=rotary, sinks=sinks)
    expected = reference(model, plan, tokens)
    for sizes in PIECES:
        assert_equal(steps(model, plan, tokens, sizes), expected)
    full = random_plan(model, key_rank=8, value_rank=8, rotary=rotary, sinks=sinks)
    assert_equal(steps(model, full, tokens, PIECES[-1]), model(input_ids=tokens).logits)
    windows = [layer.window for layer in plan.layers]
    without = reference(model, replace(plan, sinks=0), tokens)
    if all(windows):
        assert_equal(without, expected)
        return
    assert float((expected - without).abs().max()) > 0.001
    if sinks >= LONG and not any(windows):
        assert_equal(expected, model(input_ids=tokens).logits)


@pytest.mark.parametrize("rotary", ROTARIES)
def test_heads_together_in_blocks_of_queries_and_tiles(
    rotary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = tiny_model("qwen3"), tiny_tokens(2, LONG)
    options = {"key_grouping": "all", "value_grouping": "all", "oblique": True}
    plan = random_plan(model, rotary=rotary, sinks=3, **options)
    expected = reference(model, plan, tokens)
    monkeypatch.setattr(cache_backend, "ELEMENTS_AT_A_TIME", 2 * 2 * 8 * 3)
    monkeypatch.setattr(cache_attention, "SCORES_AT_A_TIME", 2 * 4 * LONG * 5)
    assert_equal(steps(model, plan, tokens, [LONG]), expected)
    assert_equal(steps(model, plan, tokens, [2, 7, 1, 4]), expected)


@pytest.mark.parametrize("pads", [1, 4, 9])
@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss"])
def test_rows_of_a_padded_batch_are_texts_alone(family: str, rotary: str, pads: int) -> None:
    """Chunks end in the padding, in the first tokens, and behind them."""
    model = tiny_model(family)
    tokens, mask, positions = padded_batch(pads)
    plan = random_plan(model, rotary=rotary, sinks=3)
    alone = [steps(model, plan, tokens[:1, pads:], [LONG - pads])]
    alone.append(steps(model, plan, tokens[1:], [LONG]))
    inputs = {"attention_mask": mask, "position_ids": positions}
    for sizes in ([LONG], [1] * LONG, [2, 3, 4, 1, 4]):
        with compressed(model, plan) as new_cache:
            cache = new_cache()
            found = in_pieces(model, cache, tokens, sizes, **inputs)
        assert_equal(found[:1, pads:], alone[0])
        assert_equal(found[1:], alone[1])
        assert cache.nbytes() == plan.nbytes(LONG, batch=2, dtype=model.dtype)


@pytest.mark.parametrize("rotary", ROTARIES)
def test_a_mask_of_four_dimensions_tells_padding_too(rotary: str) -> None:
    model = tiny_model("llama")
    tokens, mask, positions = padded_batch(4)
    plan = random_plan(model, rotary=rotary, sinks=3)
    causal = torch.ones(LONG, LONG, dtype=torch.bool).tril()
    sees = causal & mask[:, None, None].bool()
    with compressed(model, plan), torch.no_grad():
        expected = model(tokens, attention_mask=mask, position_ids=positions).logits
        found = model(tokens, attention_mask=sees, position_ids=positions).logits
        unknown = model(tokens, position_ids=positions, attention_mask=causal[None, None]).logits
    assert_equal(found[:1, 4:], expected[:1, 4:])
    assert_equal(found[1:], expected[1:])
    assert float((unknown - expected)[:1, 4:].abs().max()) > 0.001


@pytest.mark.parametrize("rotary", ROTARIES)
def test_several_texts_in_a_row_have_the_sinks_of_the_last(rotary: str) -> None:
    """Of a mask of blocks the last query sees the last alone; the others are seen as latents."""
    model, tokens = tiny_model("llama"), tiny_tokens(1, LONG)
    plan = random_plan(model, rotary=rotary, sinks=3)
    texts = torch.arange(LONG) >= 6
    sees = (texts.unsqueeze(1) == texts) & torch.ones(LONG, LONG, dtype=torch.bool).tril()
    with compressed(model, plan), torch.no_grad():
        positions = torch.cat([torch.arange(6), torch.arange(LONG - 6)]).unsqueeze(0)
        found = model(tokens, attention_mask=sees[None, None], position_ids=positions).logits
    assert_equal(found[:, :6], reference(model, replace(plan, sinks=0), tokens[:, :6]))
    assert_equal(found[:, 6:], reference(model, plan, tokens[:, 6:]))


@pytest.mark.parametrize("rotary", ROTARIES)
def test_hidden_tokens_within_a_text_move_no_beginning(rotary: str) -> None:
    model = tiny_model("llama")
    tokens, mask, _ = padded_batch(2)
    mask[0, 3:5] = 0
    plan = random_plan(model, rotary=rotary, sinks=5)
    with compressed(model, plan) as new_cache:
        once, apart = (
            in_pieces(model, new_cache(), tokens, sizes, attention_mask=mask)
            for sizes in ([LONG], [3, 1, 2, 1, LONG - 7])
        )
    assert_equal(apart[mask == 1], once[mask == 1])


@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize(("family", "sinks"), [("llama", 0), ("llama", 3), ("mistral", 0)])
def test_exact_prefill_shows_a_prompt_uncompressed_and_stores_it_compressed(
    family: str, sinks: int, rotary: str
) -> None:
    """A single layer stores the same whatever its prompt saw."""
    tokens = tiny_tokens(2, LONG)
    for layers in (1, 3):
        model = tiny_model(family, num_hidden_layers=layers)
        plan = random_plan(model, rotary=rotary, sinks=sinks)
        found = steps(model, plan, tokens, [9, 1, 4], prefill="exact")
        uncompressed = model(input_ids=tokens).logits
        assert_equal(found[:, :9], uncompressed[:, :9])
        assert float((found - uncompressed)[:, 9:].abs().max()) > 0.001
        if layers == 1:
            assert_equal(found[:, 9:10], steps(model, plan, tokens, [LONG])[:, 9:10])
        if family == "llama":
            wide = random_plan(model, rotary=rotary, sinks=LONG)
            assert_equal(steps(model, wide, tokens, [2, 7, 1, 4], prefill="exact"), uncompressed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rotary", ROTARIES)
class TestLayouts:
    def plan(
        self, model: PreTrainedModel, rotary: str, layout: str, sinks: int = 3
    ) -> CompressionPlan:
        settings = {"key_grouping": 1, "sinks": sinks}
        return random_plan(model, rotary=rotary, **settings, **LAYOUTS[layout])

    @pytest.mark.parametrize("sinks", [0, 3])
    def test_pieces_are_one_shot(self, rotary: str, layout: str, sinks: int) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens(2, LONG)
        plan = self.plan(model, rotary, layout, sinks)
        once = steps(model, plan, tokens, [LONG])
        for sizes in PIECES:
            assert_equal(steps(model, plan, tokens, sizes), once)
        if sinks:
            assert_equal(once[:, :3], model(input_ids=tokens).logits[:, :3])

    def test_rounding_touches_no_first_token(self, rotary: str, layout: str) -> None:
        """Where all that is seen is a sink, a plan is the stock model at any rank and bits."""
        model, tokens = tiny_model("llama"), tiny_tokens(2, LONG)
        plan = replace(self.plan(model, rotary, layout), sinks=LONG)
        for sizes in PIECES:
            assert_equal(steps(model, plan, tokens, sizes), model(input_ids=tokens).logits)

    def test_bytes_are_counted(self, rotary: str, layout: str) -> None:
        for family in ("llama", "gemma3"):
            model, tokens = tiny_model(family), tiny_tokens(2, LONG)
            plan = self.plan(model, rotary, layout)
            with compressed(model, plan) as new_cache:
                cache = new_cache()
                for count, token in enumerate(tokens.split(1, dim=1), start=1):
                    model(input_ids=token, past_key_values=cache)
                    assert cache.nbytes() == plan.nbytes(count, batch=2, dtype=model.dtype)
            full_layers = sum(layer.window is None for layer in plan.layers)
            more = plan.nbytes(LONG) - replace(plan, sinks=0).nbytes(LONG)
            assert more == full_layers * 3 * 2 * 2 * 8 * 2  # tokens, sites, heads, features, bytes
            assert plan.bytes_per_token() == replace(plan, sinks=0).bytes_per_token()
            cache.compact()
            begins = full_layers * 2 * 8
            positions = 4 * LONG if rotary == "pre" else 0
            assert cache.storage_nbytes() == cache.nbytes() + begins + positions

    def test_a_stock_cache_is_taken_over(self, rotary: str, layout: str) -> None:
        for family in ("llama", "gemma3"):
            model, tokens = tiny_model(family), tiny_tokens(2, LONG)
            for start in (2, LONG - 3):
                check_law(model, self.plan(model, rotary, layout), tokens, start)

    @pytest.mark.parametrize("sinks", [0, 3])
    def test_generate_and_beams(self, rotary: str, layout: str, sinks: int) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens(2, 7 - sinks)
        plan = self.plan(model, rotary, layout, sinks)
        arguments = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        with compressed(model, plan) as new_cache:
            for beams in (1, 3):
                cached, anew = (
                    model.generate(tokens, num_beams=beams, **how, **arguments)
                    for how in ({"past_key_values": new_cache()}, {"use_cache": False})
                )
                assert torch.equal(cached, anew)


def test_static_ranges_are_those_of_all_but_the_first_tokens() -> None:
    model, tokens = tiny_model("gemma3"), tiny_tokens(3, LONG)
    for rotation in ("none", "pca", "hadamard"):
        plan = random_plan(model, sinks=3)
        rounded = quantize(plan, model, tokens, Quantization(8, group_size=64), rotation)
        for activations, layer in zip(capture(model, tokens), rounded.layers, strict=True):
            first = 3 if layer.window is None else 0
            keys = activations.keys_in("pre")[:, :, first:]
            latents = keys @ layer.key.basis.down.to(keys)
            ends = torch.stack([latents.amin(dim=(0, 2, 3)), latents.amax(dim=(0, 2, 3))], dim=-1)
            torch.testing.assert_close(layer.key.quantizer.ranges[:, 0].to(ends), ends)
            values = activations.values_of()[:, :, first:]
            latents = values @ layer.value.basis.down.to(values)
            covariance = torch.cov(latents[:, 0].flatten(0, 1).T)
            beside = covariance - covariance.diagonal().diag()
            assert (float(beside.abs().max()) < 1e-9) == (rotation == "pca")
    with pytest.raises(PlanError, match="3 tokens uncompressed, and calibration sequences of 3"):
        quantize(plan, model, tokens[:, :3], Quantization(8))


@pytest.mark.parametrize("rotary", ROTARIES)
def test_sinks_are_the_stock_caches_own_keys_and_values(rotary: str) -> None:
    """Also where keys were rotated here: by the same angles."""
    model, tokens = tiny_model("llama"), tiny_tokens(2, LONG)
    plan = random_plan(model, rotary=rotary, sinks=3, key_rank=8, value_rank=8)
    stock, cache = stock_cache(model, tokens), prefilled(model, plan, tokens)
    for layer, held in zip(cache.layers, stock.layers, strict=True):
        torch.testing.assert_close(layer.sinks.keys.newest(3), held.keys[:, :, :3])
        torch.testing.assert_close(layer.sinks.values.newest(3), held.values[:, :, :3])


def test_sinks_stay_whole_when_later_tokens_are_dropped() -> None:
    sinks, x = Sinks(4), torch.randn(2, 2, 6, 8)
    sinks.take(x, -x, 0, None, None)
    sinks.keep_first(4)
    assert sinks.are_first
    assert torch.equal(sinks.seen()[0], x[:, :, :4])
    sinks.keep_first(3)
    assert not sinks.are_first
    sinks.take(x[:, :, 3:5], -x[:, :, 3:5], 3, None, None)
    assert sinks.are_first
    assert torch.equal(sinks.seen()[1], -x[:, :, :4])


def test_a_negative_number_of_first_tokens_is_refused() -> None:
    with pytest.raises(PlanError, match="sinks must be >= 0, got -1"):
        random_plan(tiny_model("llama"), sinks=-1)
