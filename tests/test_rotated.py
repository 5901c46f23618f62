"""Moments of rotated keys, from those before rotation."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from manifoldkv import (
    BitRecipe,
    UnsupportedModelError,
    capture,
    compress,
    load_model,
    open_text,
    sample_tokens,
)
from manifoldkv.commuting import hermitian_parts
from manifoldkv.evaluation import perplexity
from manifoldkv.layers.activations import LayerActivations
from manifoldkv.pipeline import prepared, rotated
from manifoldkv.pipeline.rotated import rotated_keys, rotated_moments
from manifoldkv.ranks.fisher import LayerMoments, fisher_moments
from tests.families import FAMILIES, MORE_FAMILIES, tiny_model, tiny_tokens

MODEL = "studies/reference_models/reference-llama"


def check(found: Sequence[LayerMoments], expected: Sequence[LayerMoments]) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert mine.value == other.value
        for name, tensor in other.key.tensors().items():
            scale = float(tensor.abs().max())
            # Some models rotate in float32 whatever they are given.
            torch.testing.assert_close(
                mine.key.tensors()[name], tensor, rtol=0, atol=1e-6 * scale, msg=name
            )


@pytest.mark.parametrize("position", [0, 5, 11])
@pytest.mark.parametrize("family", FAMILIES | MORE_FAMILIES)
def test_at_one_position_they_are_what_rotated_keys_have_there(family: str, position: int) -> None:
    model, tokens = tiny_model(family), tiny_tokens(4, position + 1)
    before, after = (
        fisher_moments(model, tokens, rotary=rotary, first=position) for rotary in ("pre", "post")
    )
    check(rotated_moments(model, before, torch.tensor([position])), after)
    if position:
        unturned = [layer.key.fisher for layer in before]
        assert not any(map(torch.equal, unturned, [layer.key.fisher for layer in after]))


@pytest.mark.parametrize("family", FAMILIES | MORE_FAMILIES)
def test_tokens_that_stand_where_they_stood_have_the_keys_they_had(family: str) -> None:
    model, tokens = tiny_model(family), tiny_tokens()
    own = torch.arange(tokens.shape[1]).expand_as(tokens)
    for activations in capture(model, tokens):
        found = rotated_keys(model, activations, own)
        torch.testing.assert_close(found, activations.keys_in("post"))
        moved = rotated_keys(model, activations, own + 1)
        assert not torch.allclose(moved, found, rtol=1e-3)


@pytest.mark.parametrize("family", ["llama-yarn", "gemma3", "phi3-partial"])
def test_of_several_positions_they_are_the_mean(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotated, "POSITIONS_AT_ONCE", 2)
    model, at = tiny_model(family), [0, 3, 4, 17, 60]
    before = fisher_moments(model, tiny_tokens())
    found = rotated_moments(model, before, torch.tensor(at))
    each = [rotated_moments(model, before, torch.tensor([position])) for position in at]
    for index, layer in enumerate(found):
        for name in ("second", "fisher", "mean"):
            expected = torch.stack([getattr(one[index].key, name) for one in each]).mean(dim=0)
            torch.testing.assert_close(getattr(layer.key, name), expected)


def test_what_all_phases_share_stays_and_nothing_else_after_many_turns() -> None:
    model = tiny_model("llama")
    heads, at = model.config.num_key_value_heads, torch.arange(300_000)
    before = fisher_moments(model, tiny_tokens())
    found = rotated_moments(model, before, at)
    again = rotated_moments(model, found, torch.tensor([7]))
    for layers in zip(before, found, again, strict=True):
        for name in ("second", "fisher"):
            first, second, third = (getattr(layer.key, name)[None] for layer in layers)
            parts = hermitian_parts(first, heads)
            torch.testing.assert_close(hermitian_parts(second, heads), parts)
            scale = float(second.abs().max())
            torch.testing.assert_close(third, second, rtol=0, atol=1e-2 * scale)
            assert (first - second).abs().max() > 0.1 * scale


@pytest.mark.parametrize("recipe", ["bits", "stored"])
def test_a_model_without_angles_is_refused_before_any_long_work(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    del model.model.rotary_emb
    monkeypatch.setattr(prepared, "fisher_moments", None)
    with pytest.raises(UnsupportedModelError, match="no rotary_emb"):
        compress(model, tiny_tokens(), recipe=recipe, ratio=0.5, rotary="post")


def test_plans_of_short_texts_hold_for_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.065 nats when it was written, 0.16 and 0.087 with the one or the other only, 0.43."""
    model, tokenizer = load_model(MODEL)
    text = open_text("docstrings")
    short, long = (
        sample_tokens(text, tokenizer, sequences=sequences, length=length, split=split)
        for sequences, length, split in ((64, 32, "calibration"), (6, 512, "held-out"))
    )
    stock, lost = perplexity(model, long).nll, []
    both = product((rotated_moments, of_sample(short)), (rotated_keys, where_they_stand))
    for moments, keys in both:
        monkeypatch.setattr(prepared, "rotated_moments", moments)
        monkeypatch.setattr(prepared, "rotated_keys", keys)
        plan = compress(model, short, recipe=BitRecipe(below=None), ratio=0.25, rotary="post")
        lost.append(perplexity(model, long, plan).nll - stock)
    assert 0 < lost[0] < min(lost[1:3])
    assert max(lost[1:3]) < lost[3]


def of_sample(tokens: Tensor) -> Any:
    """Stands in for `rotated_moments`: those of rotated keys at the positions of some tokens."""

    def moments(model: Any, before: Any, positions: Tensor) -> list[LayerMoments]:
        return fisher_moments(model, tokens, rotary="post", first=4)

    return moments


def where_they_stand(model: Any, activations: LayerActivations, positions: Tensor) -> Tensor:
    """Stands in for `rotated_keys`."""
    return activations.keys_in("post")
