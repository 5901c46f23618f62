"""Calibration texts that do not span the features of a layer."""

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from manifoldkv import (
    Codec,
    compress,
    compressed,
    load_model,
    open_text,
    perplexity,
    sample_tokens,
)
from tests.families import FAMILIES, MORE_FAMILIES, tiny_model, tiny_tokens
from tests.short_recipes import short

MODEL = "studies/reference_models/reference-llama"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RECIPES = ("bits", "best", "stored", "low-rank", "eigen-attention")
CONTEXT = 64


@st.composite
def texts(draw: st.DrawFn) -> torch.Tensor:
    """Token ids of 2 tokens or more, all alike or of few kinds or many."""
    sequences, length = draw(st.integers(1, 9)), draw(st.integers(2, 12))
    kinds = draw(st.sampled_from([1, 2, 60]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return torch.randint(1, 1 + kinds, (sequences, length), generator=generator)


@settings(max_examples=15)
@given(
    family=st.sampled_from([*FAMILIES, *MORE_FAMILIES]),
    dtype=st.sampled_from(DTYPES),
    recipe=st.sampled_from(RECIPES),
    ratio=st.sampled_from([0.3, 0.5, 0.9]),
    calibration=texts(),
)
def test_logits_are_finite_whatever_the_text(family, dtype, recipe, ratio, calibration) -> None:
    model, tokens = tiny_model(family, dtype), tiny_tokens(2, 20)
    windowed = getattr(model.config, "sliding_window", None) is not None
    if recipe == "stored" and windowed:
        family, model = "llama", tiny_model("llama", dtype)
    plan = compress(model, calibration, recipe=short(recipe), ratio=ratio, context=CONTEXT)
    with torch.no_grad():
        if recipe == "stored":
            stock = DynamicCache(config=model.config)
            model(tokens[:, :-1], past_key_values=stock)
            codec = Codec(model, plan)
            decoded = codec.decode(codec.encode(stock))
            logits = model(tokens[:, -1:], past_key_values=decoded).logits
        else:
            with compressed(model, plan):
                logits = model(tokens).logits
    assert bool(logits.isfinite().all())
    predicted = plan.provenance.predicted_nats
    assert predicted is None or 0 <= predicted < float("inf")


def test_the_error_falls_as_the_text_grows(tmp_path: Path) -> None:
    """From a text that spans a quarter of the 64 features of a layer to one that spans all."""
    model, tokenizer = load_model(MODEL)
    text = open_text("docstrings")
    held_out = sample_tokens(text, tokenizer, sequences=16, length=128, split="held-out")
    long = sample_tokens(text, tokenizer, sequences=8, length=128, split="calibration")
    stock = perplexity(model, held_out).nll
    for recipe in ("bits", "best"):  # of one Fisher information, which a folder keeps
        losses = []
        for tokens in (long[:1, :16], long[:2, :64], long):
            plan = compress(model, tokens, recipe=recipe, ratio=0.25, context=512, folder=tmp_path)
            losses.append(perplexity(model, held_out, plan).nll)
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < stock + 0.02


@pytest.mark.parametrize(
    ("tokens", "warning"),
    [
        (tiny_tokens(1, 12), "the calibration text has 8 tokens, and a layer 16 features"),
        (tiny_tokens(4, 40) % 9, "has 9 distinct tokens, and the first layer"),
        (tiny_tokens(4, 40), None),
    ],
)
def test_a_short_text_is_warned_of(
    tokens: torch.Tensor, warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        compress(tiny_model("llama"), tokens, recipe="bits", ratio=0.5, context=CONTEXT)
    if warning is None:
        assert not caplog.messages
    else:
        assert warning in caplog.text
