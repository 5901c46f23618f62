"""Predictive coding along the layers: what the cache reconstructs, however its tokens came in."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from manifoldkv import BitRecipe, CompressionPlan, Quantization, compress, compressed
from manifoldkv.activations.capture import capture
from manifoldkv.basis import Basis, HeadGrouping
from manifoldkv.coding.predictor import LinearPredictor, layers_below
from manifoldkv.errors import ArgumentError, PlanError
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.site import SitePlan
from tests.families import tiny_model, tiny_tokens
from tests.stored import stored_plan

SINKS = 2


@cache
def predicted_plan(family: str, below: int | None = 1, **settings: object) -> CompressionPlan:
    recipe = BitRecipe(sinks=SINKS, below=below)
    return compress(tiny_model(family), tiny_tokens(3, 24), recipe=recipe, ratio=0.4, **settings)


def reconstructed_by_hand(plan: CompressionPlan, family: str, tokens: Tensor) -> list[list[Tensor]]:
    """Keys before rotation and values of every layer, from the codes of those of a stock model."""
    found: list[list[Tensor]] = []
    for activations in capture(tiny_model(family), tokens):
        layer = plan.layers[activations.layer]
        inputs = [x for sites in reversed(found) for x in sites]
        sites: list[Tensor] = []
        for planned, x in (
            (layer.key, activations.keys_in("pre")),
            (layer.value, activations.values_of()),
        ):
            before = [side_by_side(y) for y in (*sites, *inputs)]
            flat = planned.reconstruct(side_by_side(x), before)
            batch, heads, length, _ = x.shape
            sites.append(flat.view(batch, length, heads, -1).transpose(1, 2))
        found.append(sites)
    return found


def side_by_side(x: Tensor) -> Tensor:
    """Heads of (B, H, n, d) as (B·n, H·d)."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1)


@pytest.mark.parametrize(
    ("family", "below"),
    [("llama", 0), ("llama", 2), ("gemma3", 1), ("mistral", 2), ("qwen3", None), ("gemma3", None)],
)
def test_decoding_token_by_token_is_one_pass(family: str, below: int | None) -> None:
    model, tokens = tiny_model(family), tiny_tokens(2, 14)
    plan = predicted_plan(family, below)
    assert (plan.predictor_depth is None) == (below is None)
    with compressed(model, plan) as new_cache:
        whole = model(input_ids=tokens).logits
        held = new_cache()
        steps = [model(input_ids=t, past_key_values=held).logits for t in tokens.split(1, dim=1)]
        assert held.nbytes() == plan.nbytes(14, batch=2, dtype=model.dtype)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-4, rtol=1e-4)


def test_a_prompt_of_many_tokens_is_decoded_on() -> None:
    """Prompts of 32 tokens and more take another path through attention."""
    model, tokens = tiny_model("llama"), tiny_tokens(2, 44)
    with compressed(model, predicted_plan("llama", 2)) as new_cache:
        whole = model(input_ids=tokens).logits
        held = new_cache()
        parts = [model(input_ids=t, past_key_values=held).logits for t in tokens.split([40, 4], 1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-4, rtol=1e-4)


def test_a_stock_cache_is_reconstructed_as_by_hand() -> None:
    """With exact prefill, attention is that over keys and values reconstructed by hand."""
    model, tokens = tiny_model("llama"), tiny_tokens(2, 20)
    plan = replace(predicted_plan("llama", 2), sinks=0)
    expected = reconstructed_by_hand(plan, "llama", tokens[:, :-1])
    stock = DynamicCache(config=model.config)
    model(tokens[:, :-1], past_key_values=stock)
    rotary = model.model.rotary_emb
    cos, sin = rotary(expected[0][0], torch.arange(tokens.shape[1] - 1)[None])
    by_hand = DynamicCache(config=model.config)
    for index, (keys, values) in enumerate(expected):
        half = keys.shape[-1] // 2
        turned = torch.cat([-keys[..., half:], keys[..., :half]], dim=-1)
        by_hand.update(keys * cos[:, None] + turned * sin[:, None], values, index)
    wanted = model(tokens[:, -1:], past_key_values=by_hand).logits
    with compressed(model, plan, prefill="exact") as new_cache:
        taken = model(tokens[:, -1:], past_key_values=new_cache(stock)).logits
        held = new_cache()
        model(tokens[:, :-1], past_key_values=held)
        filled = model(tokens[:, -1:], past_key_values=held).logits
    torch.testing.assert_close(taken, filled, atol=1e-5, rtol=1e-5)
    # The newest token is coded in the one and exact in the other: it is one of twenty.
    stock_logits = model(tokens).logits[:, -1:]
    assert (taken - wanted).norm() < 0.3 * (taken - stock_logits).norm()


@settings(max_examples=15)
@given(st.data())
def test_crop_and_reorder(data: st.DataObject) -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(2, 16)
    kept = data.draw(st.integers(1, 12))
    order = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=2)))
    with compressed(model, predicted_plan("llama")) as new_cache:
        held = new_cache()
        model(tokens[:, :12], past_key_values=held)
        held.crop(kept - 12)
        held.reorder_cache(order)
        gone_on = model(tokens[order, kept:], past_key_values=held).logits
        whole = model(tokens[order]).logits[:, kept:]
    torch.testing.assert_close(gone_on, whole, atol=1e-4, rtol=1e-4)


def test_padded_texts() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(2, 12)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    with compressed(model, predicted_plan("llama")):
        padded = model(tokens, attention_mask=mask).logits[0, 5:]
        alone = model(tokens[:1, 5:]).logits[0]
    torch.testing.assert_close(padded, alone, atol=1e-4, rtol=1e-4)


def test_another_weight_is_another_plan() -> None:
    plan = predicted_plan("llama", 2)
    layer = plan.layers[2]
    moved = replace(layer.value, predictor=LinearPredictor(layer.value.predictor.weights + 1))
    layers = (*plan.layers[:2], replace(layer, value=moved))
    assert replace(plan, layers=layers) != plan


def test_predictions_are_counted_with_the_bases() -> None:
    plan = predicted_plan("llama", 1)
    alone = [
        LayerPlan(replace(layer.key, predictor=None), replace(layer.value, predictor=None))
        for layer in plan.layers
    ]
    # Values of the first layer from its keys; then keys from two sites, values from three.
    numbers = 16 * 16 * (1 + 2 * (2 + 3))
    predictors = [site.predictor for layer in plan.layers for _, site in layer.sites]
    assert sum(p.weights.numel() for p in predictors if p is not None) == numbers
    without = replace(plan, layers=tuple(alone))
    assert plan.basis_nbytes() == without.basis_nbytes() + 2 * numbers
    assert plan.nbytes(50) == without.nbytes(50)


def test_inputs_are_layers_that_hold_the_same_tokens() -> None:
    """Of gemma3's layers some have windows: they hold other tokens."""
    for family, below in (("llama", 2), ("gemma3", 2)):
        plan = predicted_plan(family, below)
        windows = [layer.window for layer in plan.layers]
        for index, layer in enumerate(plan.layers):
            features, depth = layer.key.features, min(below, layers_below(windows, index))
            keys = layer.key.predictor
            assert (0 if keys is None else len(keys.weights)) == 2 * depth * features
            assert len(layer.value.predictor.weights) == (2 * depth + 1) * features


def test_predictors_that_do_not_fit_are_refused() -> None:
    plan = predicted_plan("llama")
    key = plan.layers[1].key

    def changed(**parts: object) -> None:
        replace(plan, layers=(replace(plan.layers[0], **parts), *plan.layers[1:]))

    with pytest.raises(PlanError, match="means and predictors need keys stored before rotation"):
        replace(plan, rotary="post")
    with pytest.raises(PlanError, match="layer 0 key: predictor has 32 inputs, must be keys and"):
        changed(key=key)
    narrower = LinearPredictor(key.predictor.weights[:, :-1])
    with pytest.raises(PlanError, match="layer 0 key: the predictor has 15 outputs, must be 16"):
        changed(key=replace(key, predictor=narrower))
    runs = Quantization(4, "kivi").values()
    with pytest.raises(PlanError, match="rounded in runs cannot be those of a predictor"):
        changed(key=replace(key, quantizer=runs))
    for weights in (torch.ones(4), torch.ones(0, 4), torch.full((4, 4), torch.nan)):
        with pytest.raises(PlanError, match="predictor must be"):
            LinearPredictor(weights)
    with pytest.raises(ArgumentError, match="below must be >= 0, got -1"):
        BitRecipe(below=-1)
    with pytest.raises(PlanError, match="rotation"):
        predicted_plan("llama", 2, rotary="post")


@pytest.mark.parametrize("stored", [False, True])
def test_quantizers_and_means_that_do_not_fit_a_basis_are_refused(stored: bool) -> None:
    plan = stored_plan() if stored else predicted_plan("llama", None)
    layer = plan.layers[0]
    key = replace(layer.key, predictor=None)

    def changed(**parts: object) -> None:
        changed_layer = replace(layer, key=replace(key, **parts))
        replace(plan, layers=(changed_layer, *plan.layers[1:]))

    quantizer = key.quantizer
    fewer = {
        name: tensor if name == "tables" else tensor[:-1]
        for name, tensor in quantizer.tensors().items()
    }
    if stored:
        fewer["tables"] = torch.cat(quantizer.split_tables()[:-1])
    latents = len(quantizer.gain)
    with pytest.raises(PlanError, match=f"key: a quantizer of {latents - 1} latents does not fit"):
        changed(quantizer=replace(quantizer, **fewer))
    with pytest.raises(PlanError, match=r"layer 0 key: mean must be \(16,\) in float32"):
        changed(mean=key.mean[:-1])
    columns = torch.eye(8).repeat(2, 1, 1)
    with pytest.raises(PlanError, match="need a basis of all heads together"):
        changed(basis=Basis(columns, columns, HeadGrouping(1, 2)))
    if stored:
        mixed = replace(plan.layers[1], key=SitePlan(plan.layers[1].key.basis))
        with pytest.raises(PlanError, match="of all sites must be entropy-coded, or those of no"):
            replace(plan, layers=(plan.layers[0], mixed, *plan.layers[2:]))
