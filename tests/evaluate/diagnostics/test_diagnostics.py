"""Errors of compressed layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from manifoldkv import (
    RECIPES,
    Codec,
    CompressionPlan,
    Quantization,
    compress,
    compressed,
)
from manifoldkv.core.basis import HeadGrouping, Rotary
from manifoldkv.core.errors import PlanError
from manifoldkv.evaluate.diagnostics import diagnose, diagnose_plan, layer_errors
from manifoldkv.models.support import attention_of, decoder_layers
from manifoldkv.recipes.full_rank import full_rank_plan
from manifoldkv.statistics.outputs import attention_output, layer_output
from manifoldkv.testing import HEAD_DIM, random_basis, tiny_activations
from tests.families import tiny_model, tiny_tokens
from tests.plans import designed_plan, random_plan
from tests.short_recipes import short
from tests.stored import some_tokens, stored_model, stored_plan

ERRORS = ["attention_output_error", "layer_output_error", "cosine_similarity"]


def test_exact_layer_has_no_error():
    errors = layer_errors(tiny_activations())
    assert errors.attention_output_error == 0
    assert errors.layer_output_error < 1e-6
    assert errors.cosine_similarity == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("rotary", ["pre", "post"])
def test_full_rank_has_no_error(rotary):
    key = random_basis(HEAD_DIM, HeadGrouping("shared", 2), 0)
    value = random_basis(HEAD_DIM, HeadGrouping(1, 2), 1)
    errors = layer_errors(tiny_activations(), key, value, rotary=rotary)
    assert errors.attention_output_error < 1e-10
    assert errors.layer_output_error < 1e-6


def test_errors_are_means_of_ratios_per_sequence():
    activations = tiny_activations()
    key = random_basis(3, HeadGrouping("shared", 2), 0)
    value = random_basis(5, HeadGrouping(1, 2), 1)
    errors = layer_errors(activations, key, value)

    attention = attention_output(activations, key, value).numpy()
    exact = attention_output(activations).numpy()
    output = layer_output(activations, torch.from_numpy(attention)).numpy()
    expected = activations.outputs.numpy()

    def mean_ratio(approximate, true):
        pairs = zip(approximate, true, strict=True)
        return np.mean([np.linalg.norm((a - t).ravel()) / np.linalg.norm(t) for a, t in pairs])

    cosines = (output * expected).sum(-1)
    cosines /= np.linalg.norm(output, axis=-1) * np.linalg.norm(expected, axis=-1)
    assert errors.attention_output_error == pytest.approx(mean_ratio(attention, exact))
    assert errors.layer_output_error == pytest.approx(mean_ratio(output, expected), rel=1e-6)
    assert errors.cosine_similarity == pytest.approx(cosines.mean(), rel=1e-6)


def test_diagnose_has_a_row_per_layer_with_bases():
    activations = tiny_activations()
    key = random_basis(3, HeadGrouping("shared", 2), 0)
    frame = diagnose([activations], {1: (key, None), 5: (None, None)})
    assert list(frame.columns) == [
        "layer",
        "attention_output_error",
        "layer_output_error",
        "cosine_similarity",
    ]
    assert frame["layer"].tolist() == [1]
    assert frame["layer_output_error"][0] == layer_errors(activations, key).layer_output_error


def recorded(
    model: PreTrainedModel, tokens: Tensor, given: list[Tensor] | None = None
) -> tuple[list[np.ndarray], list[Tensor]]:
    """Attention before W_O and outputs of all layers in one forward pass.

    With `given` every layer hands these outputs on instead of its own.
    """
    attention: list[np.ndarray] = []
    outputs: list[Tensor] = []

    def at_output_projection(module: nn.Module, args: tuple) -> None:
        attention.append(args[0].numpy())

    def after_layer(module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        outputs.append(output)
        return None if given is None else given[len(outputs) - 1]

    hooks = [layer.register_forward_hook(after_layer) for layer in decoder_layers(model)]
    hooks += [
        attention_of(layer).o_proj.register_forward_pre_hook(at_output_projection)
        for layer in decoder_layers(model)
    ]
    model(tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return attention, outputs


def errors_by_hand(
    stock: tuple[list[np.ndarray], list[Tensor]], other: tuple[list[np.ndarray], list[Tensor]]
) -> pd.DataFrame:
    """The columns of a diagnosis from two forward passes."""

    def mean_ratio(found: np.ndarray, exact: np.ndarray) -> float:
        pairs = zip(found, exact, strict=True)
        return float(np.mean([np.linalg.norm(f - e) / np.linalg.norm(e) for f, e in pairs]))

    rows = []
    for exact, expected, found, output in zip(stock[0], stock[1], *other, strict=True):
        a, b = output.numpy(), expected.numpy()
        cosines = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
        rows.append((mean_ratio(found, exact), mean_ratio(a, b), cosines.mean()))
    return pd.DataFrame(rows, columns=ERRORS)


LLAMA_PLANS: dict[str, Callable[[PreTrainedModel], CompressionPlan]] = {
    name: partial(compress, tokens=tiny_tokens(8, 24), recipe=short(name), ratio=0.5)
    for name in RECIPES
    if name != "stored"
}
LLAMA_PLANS |= {
    "low-rank chain": partial(designed_plan, kind="low-rank chain", sinks=2, ratio=0.3),
    "sinks": partial(random_plan, sinks=3),
    "sinks after rotation": partial(random_plan, sinks=2, rotary="post"),
    "static": partial(random_plan, quantization=Quantization(3, "static", group_size=2)),
    "token": partial(random_plan, quantization=Quantization(2, "token"), rotary="post", sinks=2),
}
PLANS = [("llama", name, plan) for name, plan in LLAMA_PLANS.items()] + [
    (family, name, LLAMA_PLANS[name])
    for family in ("gemma2", "gemma3", "gpt-oss", "mistral")
    for name in ("low-rank chain", "sinks after rotation", "static")
]


@pytest.mark.parametrize(("family", "name", "make"), PLANS, ids=[f"{f}-{n}" for f, n, _ in PLANS])
def test_a_diagnosis_is_that_of_passes_whose_layers_read_the_cache(
    family: str, name: str, make: Callable[[PreTrainedModel], CompressionPlan]
) -> None:
    """Every layer is given what the stock model gives it, and reads from the cache."""
    model, tokens = tiny_model(family), tiny_tokens(3, 36)
    plan = make(model)
    stock = recorded(model, tokens)
    with compressed(model, plan):
        expected = errors_by_hand(stock, recorded(model, tokens, given=stock[1]))
    found = diagnose_plan(model, plan, tokens)
    assert found["layer"].tolist() == [0, 1, 2]
    assert found["key_rank"].tolist() == [layer.key.rank for layer in plan.layers]
    assert found["value_rank"].tolist() == [layer.value.rank for layer in plan.layers]
    np.testing.assert_allclose(found[ERRORS], expected, rtol=1e-5, atol=1e-12)
    assert (expected[ERRORS[:2]].max() > 1e-3).all()  # some layers have full rank


def errors_over_decoded(model: PreTrainedModel, codec: Codec, tokens: Tensor) -> np.ndarray:
    """Errors of a forward pass whose attention, the stock one, gets decoded keys and values."""
    stock = recorded(model, tokens)
    held = DynamicCache(config=model.config)
    model(tokens, past_key_values=held)
    decoded = codec.decode(codec.encode(held)).layers

    def reading(
        module: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, **more: Any
    ) -> Any:
        layer = decoded[module.layer_idx]
        return eager_attention_forward(module, queries, layer.keys, layer.values, mask, **more)

    AttentionInterface.register("decoded-reference", reading)
    AttentionMaskInterface.register("decoded-reference", eager_mask)
    before = model.config._attn_implementation
    model.config._attn_implementation = "decoded-reference"
    try:
        return errors_by_hand(stock, recorded(model, tokens, given=stock[1])).to_numpy()
    finally:
        model.config._attn_implementation = before


def test_stored_caches_are_diagnosed_as_a_codec_decodes_them() -> None:
    """On most texts: products of other shapes may round a latent at a border to its other symbol.

    Which texts have one depends on the CPU.
    """
    model, plan, texts = stored_model(), stored_plan(), some_tokens(16, 14).split(1)
    codec = Codec(model, plan)
    expected = np.stack([errors_over_decoded(model, codec, text) for text in texts])
    found = np.stack([diagnose_plan(model, plan, text)[ERRORS].to_numpy() for text in texts])
    assert (expected.mean(axis=0)[:, :2] > 1e-3).all()
    same = [np.allclose(*pair, rtol=1e-4, atol=0) for pair in zip(found, expected, strict=True)]
    assert sum(same) > len(texts) / 2


@pytest.mark.parametrize("rotary", ["pre", "post"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss"])
def test_a_plan_that_cuts_nothing_has_no_error(family: str, rotary: Rotary) -> None:
    model = tiny_model(family)
    found = diagnose_plan(model, full_rank_plan(model, rotary), tiny_tokens(2, 36))
    assert (found[ERRORS[:2]] < 1e-6).all(axis=None)


@pytest.mark.parametrize("recipe", ["bits", "best"])
def test_more_bits_are_less_error(recipe: str) -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(16, 48)
    plans = [compress(model, tokens, recipe=recipe, ratio=r) for r in (0.2, 0.4, 0.6)]
    errors = [diagnose_plan(model, plan, tiny_tokens(4, 48))[ERRORS[:2]].mean() for plan in plans]
    assert (errors[0] > errors[1]).all()
    assert (errors[1] > errors[2]).all()
    assert (errors[2] > 1e-3).all()


def test_a_plan_of_another_model_is_refused() -> None:
    plan = random_plan(tiny_model("llama"))
    with pytest.raises(PlanError, match="another model"):
        diagnose_plan(tiny_model("qwen3"), plan, tiny_tokens())
