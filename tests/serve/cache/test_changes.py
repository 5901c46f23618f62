"""Caches that are cropped, reordered, reset and taken over, with sink tokens and without."""

import pytest
import torch

from manifoldkv import compressed
from tests.families import tiny_model, tiny_tokens
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
from tests.serve.cache.test_stock import check_law


@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize(("family", "sinks"), [("llama", 0), ("llama", 3), ("gemma3", 4)])
class TestWhatChangesACache:
    def test_a_crop_leaves_no_trace(self, family: str, sinks: int, rotary: str) -> None:
        model, tokens = tiny_model(family), tiny_tokens(2, LONG)
        plan = random_plan(model, rotary=rotary, sinks=sinks)
        expected = reference(model, plan, tokens)
        for left in (0, 1, 3, 4, 6):
            with compressed(model, plan) as new_cache, torch.no_grad():
                cache = new_cache()
                cache.activate_past_recording()
                model(input_ids=tokens[:, :left], past_key_values=cache) if left else None
                model(input_ids=tokens.flip(1)[:, :8], past_key_values=cache)
                cache.crop(-8)
                assert cache.nbytes() == plan.nbytes(left, batch=2, dtype=model.dtype)
                found = in_pieces(model, cache, tokens, [2, LONG - left - 2])
            assert_equal(found, expected[:, left:])

    def test_a_crop_of_a_padded_batch(self, family: str, sinks: int, rotary: str) -> None:
        model = tiny_model(family)
        tokens, mask, positions = padded_batch(4)
        inputs = {"attention_mask": mask, "position_ids": positions}
        plan = random_plan(model, rotary=rotary, sinks=sinks)
        with compressed(model, plan) as new_cache, torch.no_grad():
            expected = in_pieces(model, new_cache(), tokens, [LONG], **inputs)
            for left in (2, 4, 5, 8):
                cache = new_cache()
                cache.activate_past_recording()
                in_pieces(model, cache, tokens, [left], **inputs)
                # Other tokens; where the text had not begun, it begins with the last of them.
                more = torch.tensor([[0, 0, 1], [1, 1, 1]]) if left <= 4 else mask[:, -3:]
                other = torch.cat([mask[:, :left], more], dim=1)
                model(tokens[:, :3], attention_mask=other, past_key_values=cache)
                cache.crop(-3)
                found = in_pieces(model, cache, tokens, [1] * (LONG - left), **inputs)
                assert_equal(found[mask[:, left:] == 1], expected[:, left:][mask[:, left:] == 1])

    def test_sequences_are_selected_and_repeated(
        self, family: str, sinks: int, rotary: str
    ) -> None:
        model = tiny_model(family)
        tokens, mask, positions = padded_batch(4)
        plan = random_plan(model, rotary=rotary, sinks=sinks)
        inputs = {"attention_mask": mask, "position_ids": positions}
        order = torch.tensor([1, 1, 0, 0])
        swapped = {name: x[order] for name, x in inputs.items()}
        with compressed(model, plan) as new_cache:
            expected = in_pieces(model, new_cache(), tokens, [LONG], **inputs)[order]
            for start in (3, 5, 9):
                cache = new_cache()
                in_pieces(model, cache, tokens, [start], **inputs)
                cache.batch_select_indices(torch.tensor([1, 0]))
                cache.batch_repeat_interleave(2)
                found = in_pieces(model, cache, tokens[order], [1] * (LONG - start), **swapped)
                seen = swapped["attention_mask"][:, start:] == 1
                assert_equal(found[seen], expected[:, start:][seen])

    def test_a_reset_forgets_where_texts_begin(self, family: str, sinks: int, rotary: str) -> None:
        model = tiny_model(family)
        tokens, mask, positions = padded_batch(4)
        plan = random_plan(model, rotary=rotary, sinks=sinks)
        texts = tiny_tokens(3, LONG)
        with compressed(model, plan) as new_cache:
            cache = new_cache()
            in_pieces(model, cache, tokens, [9], attention_mask=mask, position_ids=positions)
            cache.reset()
            assert cache.nbytes() == cache.storage_nbytes() == 0
            found = in_pieces(model, cache, texts, [5, LONG - 5])
        assert_equal(found, steps(model, plan, texts, [LONG]))

    def test_a_padded_stock_cache_is_taken_over(self, family: str, sinks: int, rotary: str) -> None:
        """Whether `generate` gives padding the position 0 or 1."""
        model = tiny_model(family)
        plan = random_plan(model, rotary=rotary, sinks=sinks)
        for pads, value, start in ((1, 0, 9), (4, 1, 11), (8, 0, 11), (8, 1, 9)):
            tokens, mask, positions = padded_batch(pads)
            inputs = {
                "attention_mask": mask,
                "position_ids": positions.masked_fill(~mask.bool(), value),
            }
            check_law(model, plan, tokens, start, **inputs)

    def test_guessing_ahead_is_greedy(self, family: str, sinks: int, rotary: str) -> None:
        model, tokens = tiny_model(family), tiny_tokens(1, 4).repeat(1, 3)
        plan = random_plan(model, rotary=rotary, sinks=sinks)
        arguments = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
        with compressed(model, plan) as new_cache:
            greedy = model.generate(tokens, use_cache=False, **arguments)
            for how in (
                {"prompt_lookup_num_tokens": 3},
                {"assistant_model": tiny_model(family, seed=1)},
                {"prefill_chunk_size": 5},
            ):
                found = model.generate(tokens, past_key_values=new_cache(), **how, **arguments)
                assert torch.equal(found, greedy)
