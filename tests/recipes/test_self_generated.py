"""A text that a model writes itself."""

import pytest
import torch

from manifoldkv import open_text
from manifoldkv.core.errors import ArgumentError
from manifoldkv.recipes.self_generated import own_text
from tests.families import tiny_model


def test_it_is_drawn_by_the_probabilities_of_the_model() -> None:
    """Pairs of neighbours are as frequent as the model says, given the start token alone."""
    model = tiny_model("llama")
    ids = own_text(model, 4000, 2)
    assert (ids[:, 0] == model.config.bos_token_id).all()
    with torch.no_grad():
        expected = model(input_ids=ids[:1, :1]).logits[0, -1].softmax(dim=-1)
    found = torch.bincount(ids[:, 1], minlength=len(expected)) / len(ids)
    error = (expected * (1 - expected) / len(ids)).sqrt()
    assert ((found - expected).abs() < 5 * error + 1e-3).all()


def test_the_same_seed_writes_the_same_and_no_other_draws_change() -> None:
    model = tiny_model("llama")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (own_text(model, 18, 12, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert first.shape == (18, 12)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(first.unique(dim=0)) == 18


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_it_is_as_long_as_is_asked_for(family: str) -> None:
    model = tiny_model(family)
    assert own_text(model, 3, 1).shape == (3, 1)
    assert own_text(model, 1).shape == (1, model.config.max_position_embeddings)


def test_how_the_model_is_used_to_generate_plays_no_part() -> None:
    """Ends of texts, temperatures and penalties of chats among it."""
    model, other = tiny_model("llama"), tiny_model("llama")
    other.generation_config.eos_token_id = list(range(1, other.config.vocab_size))
    other.generation_config.temperature = 0.1
    assert torch.equal(own_text(model, 2, 30), own_text(other, 2, 30))


def test_a_model_without_a_start_token_begins_anywhere() -> None:
    model = tiny_model("qwen3")
    assert model.config.bos_token_id is model.config.eos_token_id is None
    assert len(own_text(model, 16, 2)[:, 0].unique()) > 4


def test_what_cannot_be_written() -> None:
    model = tiny_model("llama")
    for counts in ((0, 5), (2, 0)):
        with pytest.raises(ArgumentError, match=r"(sequences|length) must be >= 1, got 0"):
            own_text(model, *counts)
    with pytest.raises(ArgumentError, match="longer than the"):
        own_text(model, 1, 100_000)
    with pytest.raises(ArgumentError):
        own_text(model, 1, 4, seed=-1 - 2**64)
    with pytest.raises(ArgumentError, match="own_text"):
        open_text("own")
