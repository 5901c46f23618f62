"""Grouped-query attention against loops written out, and the way into a model."""

import math
from contextlib import suppress

import pytest
import torch
from transformers import AttentionInterface

from manifoldkv.cache.compressed import NAME as COMPRESSED
from manifoldkv.errors import ModelError
from manifoldkv.models.interface import (
    NAME,
    AttentionSettings,
    attend,
    attention_weights,
    intercepted,
)
from tests.families import FAMILIES, tiny_model, tiny_tokens

QUERY_HEADS, ROWS, TOKENS, HEAD_DIM, VALUE_DIM = 4, 3, 6, 8, 5
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
SETTINGS = {
    "plain": AttentionSettings(0.3),
    "softcap": AttentionSettings(0.3, softcap=0.7),
    "sinks": AttentionSettings(0.3, sinks=SINKS),
    "softcap and sinks": AttentionSettings(0.3, softcap=0.7, sinks=SINKS),
}
MASKS = {
    "full": torch.ones(1, 1, ROWS, TOKENS, dtype=torch.bool),
    "rows of a causal one": torch.ones(TOKENS, TOKENS).tril().bool()[None, None, [0, 2, 5]],
    "one per sequence": torch.tensor([[1, 1, 1, 0, 0, 1], [0, 1, 0, 1, 0, 0]])
    .bool()[:, None, None]
    .repeat(1, 1, ROWS, 1),
}


def random_tensors(kv_heads):
    """Queries, keys and values; values are narrower, as latents are."""
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (2, QUERY_HEADS, ROWS, HEAD_DIM),
        (2, kv_heads, TOKENS, HEAD_DIM),
        (2, kv_heads, TOKENS, VALUE_DIM),
    ]
    return [3 * torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def naive_weights(queries, keys, mask, settings):
    """Weights of one query head and row at a time, in plain floats: (2, H_q, rows, tokens)."""
    weights = torch.zeros(2, QUERY_HEADS, ROWS, TOKENS, dtype=torch.float64)
    share = QUERY_HEADS // keys.shape[1]
    for sequence in range(2):
        visible = mask[sequence % len(mask), 0]
        for head in range(QUERY_HEADS):
            for row in range(ROWS):
                exponentials = {}
                for token in visible[row].nonzero().flatten().tolist():
                    key = keys[sequence, head // share, token]
                    score = settings.scaling * float(queries[sequence, head, row] @ key)
                    if settings.softcap is not None:
                        score = settings.softcap * math.tanh(score / settings.softcap)
                    exponentials[token] = math.exp(score)
                total = sum(exponentials.values())
                if settings.sinks is not None:
                    total += math.exp(settings.sinks[head])
                for token, exponential in exponentials.items():
                    weights[sequence, head, row, token] = exponential / total
    return weights


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_weights_and_attention_are_those_of_naive_loops(kv_heads, mask, settings):
    queries, keys, values = random_tensors(kv_heads)
    expected = naive_weights(queries, keys, mask, settings)
    weights = attention_weights(queries, keys, mask, settings)
    share = QUERY_HEADS // kv_heads
    assert weights.shape == (2, kv_heads, share, ROWS, TOKENS)
    torch.testing.assert_close(weights.flatten(1, 2), expected)
    mixed = attend(queries, keys, values, mask, settings)
    torch.testing.assert_close(mixed, expected @ values.repeat_interleave(share, dim=1))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_what_the_mask_hides_has_no_influence(settings):
    mask = MASKS["one per sequence"]
    queries, keys, values = random_tensors(2)
    hidden = ~mask[:, :, 0, :, None]  # (2, 1, tokens, 1): the same tokens for every row
    changed = attend(
        queries, keys.masked_fill(hidden, 7.0), values.masked_fill(hidden, -7.0), mask, settings
    )
    assert torch.equal(changed, attend(queries, keys, values, mask, settings))


def test_settings_are_read_from_the_keywords_of_the_call():
    """One that is not set is no obstacle, known or not."""
    arguments = {"scaling": 0.3, "softcap": 0.7, "s_aux": SINKS, "dropout": 0.0, "bias": None}
    settings = AttentionSettings.from_arguments(torch.nn.Identity(), arguments)
    assert (settings.scaling, settings.softcap) == (0.3, 0.7)
    assert settings.sinks is SINKS


@pytest.mark.parametrize("value", [False, 0.0, torch.zeros(1)], ids=str)
def test_unknown_keywords_are_refused_by_name(value):
    arguments = {"scaling": 0.3, "sliding_window": 4, "temperature": value, "bias": value}
    with pytest.raises(ModelError, match="Identity calls attention with bias, temp"):
        AttentionSettings.from_arguments(torch.nn.Identity(), arguments)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_intercepted_model_computes_what_it_did_before(family):
    model, tokens = tiny_model(family), tiny_tokens()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        stock = model(input_ids=tokens).logits
        with intercepted(model.config.get_text_config()):
            ours = model(input_ids=tokens).logits
    assert (ours - stock).abs().max() < 1e-5 * stock.abs().max()  # their softmax is float32


@pytest.mark.parametrize("name", [NAME, COMPRESSED])
def test_modules_may_name_all_arguments_and_view_the_output(name):
    """As transformers' own attention functions let them."""
    query, key = torch.rand(2, 1, QUERY_HEADS, ROWS, HEAD_DIM)
    mask = torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool).tril()
    arguments = {"query": query, "key": key, "value": key, "attention_mask": mask, "scaling": 0.3}
    stock, _ = AttentionInterface()["sdpa"](torch.nn.Identity(), **arguments)
    replaced = {"manifoldkv_attend": lambda *given: stock.transpose(1, 2).clone().transpose(1, 2)}
    for more in ({}, replaced):
        output, _ = AttentionInterface()[name](torch.nn.Identity(), **arguments, **more)
        assert torch.allclose(output.view(1, ROWS, -1), stock.reshape(1, ROWS, -1))


@pytest.mark.parametrize("name", [NAME, COMPRESSED])
@pytest.mark.parametrize("heads", [1, QUERY_HEADS])
def test_a_mask_that_adds_to_scores_is_refused(name, heads):
    x = torch.rand(1, QUERY_HEADS, ROWS, HEAD_DIM)
    mask = torch.zeros(1, heads, ROWS, ROWS)
    with pytest.raises(ModelError, match=rf"replaces the attention mask .*float32 of {heads} h"):
        AttentionInterface()[name](torch.nn.Identity(), x, x, x, mask, scaling=0.3)


def test_interception_ends_with_its_block_even_by_an_error():
    config = tiny_model("llama").config
    before = config._attn_implementation
    assert before != NAME
    with suppress(ZeroDivisionError), intercepted(config):
        assert config._attn_implementation == NAME
        raise ZeroDivisionError
    assert config._attn_implementation == before
