"""Models with weights that are not finite, or all zero: refused by name, or compressed."""

import pytest
import torch
from transformers import PreTrainedModel

from manifoldkv import compress
from manifoldkv.core.errors import ModelError
from manifoldkv.models.offloading import named_weights
from manifoldkv.models.weights import check_finite
from manifoldkv.recipes.self_generated import own_text
from manifoldkv.statistics.capture import capture
from manifoldkv.text.sources import TextSource
from tests.families import FAMILIES, tiny_model, tiny_tokens
from tests.short_recipes import short

WEIGHTS = (
    "model.embed_tokens.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.2.self_attn.k_proj.weight",
)


def damaged(name: str, value: float, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = tiny_model("llama", dtype)
    model.get_parameter(name).data[3, 1] = value
    return model


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_that_is_not_finite_is_named(name: str, value: float, dtype: torch.dtype) -> None:
    with pytest.raises(ModelError, match=rf"weight {name} holds NaN or infinity: .*{dtype} here"):
        check_finite(damaged(name, value, dtype))


@pytest.mark.parametrize("family", FAMILIES)
def test_finite_weights_pass(family: str) -> None:
    check_finite(tiny_model(family, torch.bfloat16))


def test_weights_near_the_largest_number_are_finite() -> None:
    check_finite(damaged(WEIGHTS[0], torch.finfo(torch.float32).max))


def test_no_text_is_generated_from_weights_or_logits_that_are_not_finite() -> None:
    """The logits of finite weights, in a dtype that activations do not fit."""
    with pytest.raises(ModelError, match=f"weight {WEIGHTS[0]} holds NaN"):
        own_text(damaged(WEIGHTS[0], float("nan")), 1, 4)
    model = damaged("lm_head.weight", 6e4, torch.float16)
    model.lm_head.weight.data.fill_(6e4)
    with pytest.raises(ModelError, match=r"not finite in torch\.float16: load it in bfloat16"):
        own_text(model, 1, 4)


@pytest.mark.parametrize("recipe", ["best", "low-rank", "stored"])
def test_a_damaged_model_is_refused_before_the_text_is_read(recipe: str) -> None:
    with pytest.raises(ModelError, match=f"weight {WEIGHTS[1]} holds NaN"):
        compress(damaged(WEIGHTS[1], float("nan")), TextSource("unread", None), recipe=recipe)


def test_a_layer_that_computes_nan_is_not_called_a_wrong_rotation() -> None:
    with pytest.raises(ModelError, match=r"the output of layer 1 is not finite in torch\.float32"):
        list(capture(damaged(WEIGHTS[1], float("nan")), tiny_tokens(2, 8)))


def test_a_layer_of_zeros_is_captured() -> None:
    model = tiny_model("llama")
    for _, weight in named_weights(model):
        weight.zero_()
    assert [x.outputs.abs().max() for x in capture(model, tiny_tokens(2, 8))] == [0, 0, 0]


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_a_projection_of_zeros_is_compressed(part: str) -> None:
    model = tiny_model("llama", torch.float32)
    for layer in model.model.layers:
        getattr(layer.self_attn, part).weight.zero_()
    plan = compress(model, tiny_tokens(4, 16), recipe=short("low-rank"), ratio=0.5)
    assert plan.ratio <= 0.5


@pytest.mark.parametrize(
    ("family", "tokens"), [("llama", (1, 2)), ("gemma3", (2, 2)), ("qwen3", (1, 3))]
)
def test_a_few_tokens_are_enough_for_a_closed_form(family: str, tokens: tuple[int, int]) -> None:
    plan = compress(
        tiny_model(family, torch.float32), tiny_tokens(*tokens), recipe=short("low-rank"), ratio=0.5
    )
    assert plan.ratio <= 0.5
