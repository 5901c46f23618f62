"""Which tokens eviction keeps, what they take, and what a cache without the others answers."""

import copy
from math import ceil
from pathlib import Path

import pytest
import torch
from methods import METHODS, Setting
from methods import evicted as module
from methods.evicted import Evicted, hidden, importance, reconstructed
from methods.windows import stacked
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from manifoldkv import BitRecipe, CompressionPlan, compress, compressed
from manifoldkv.core.errors import ArgumentError
from manifoldkv.evaluate.retrieval import Prompts
from manifoldkv.models.support import attention_of, decoder_layers
from tests.families import tiny_model, tiny_tokens

TOKENS, TEXTS, ANSWER = 60, 2, 5


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", dtype=torch.float32, max_position_embeddings=256)


@pytest.fixture(scope="module")
def plan(model: PreTrainedModel) -> CompressionPlan:
    """With predictors across layers."""
    recipe = BitRecipe(compute=float("inf"), sinks=2)
    plan = compress(model, tiny_tokens(8, TOKENS), ratio=0.4, recipe=recipe, context=TOKENS)
    assert plan.predictor_depth
    return plan


@pytest.fixture(scope="module")
def prompts(model: PreTrainedModel) -> Prompts:
    ids = tiny_tokens(TEXTS, TOKENS + 1)
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :-1], past_key_values=stock)
    return Prompts(ids, stock)


def method_with(plan: CompressionPlan, model: PreTrainedModel, ratio: float = 0.2) -> Evicted:
    method = METHODS.get("evicted")(Setting(model, tiny_tokens(), TOKENS, "pre", 0, Path()), ratio)
    assert isinstance(method, Evicted)
    method._of_all.plan = plan
    return method


def test_the_plan_is_read_where_another_run_has_left_it(
    model: PreTrainedModel, plan: CompressionPlan, tmp_path: Path
) -> None:
    method = METHODS.get("evicted")(Setting(model, tiny_tokens(), TOKENS, "pre", 0, tmp_path), 0.2)
    assert isinstance(method, Evicted)
    plan.save(tmp_path / "plan")
    for one in method.planned():
        one.plan_folder = tmp_path / "plan"
    assert method.plan.digest() == plan.digest()


@torch.no_grad()
def answers(model: PreTrainedModel, cache: DynamicCache) -> Tensor:
    return model(input_ids=tiny_tokens(TEXTS, ANSWER), past_key_values=cache).logits


@pytest.mark.parametrize("ratio", [0.2, 0.3])
def test_kept_tokens_take_the_bytes_that_are_counted(
    model: PreTrainedModel, plan: CompressionPlan, ratio: float
) -> None:
    method = method_with(plan, model, ratio)
    worth = torch.rand(3, TEXTS, TOKENS, generator=torch.Generator().manual_seed(0))
    kept = method.kept(worth)
    each = [sum(x.nbytes(1, torch.bfloat16) for _, x in layer.sites) for layer in plan.layers]
    exact = method.setting.stock_bytes(plan.sinks) + 3 * ceil(TOKENS / 8)
    for text in range(TEXTS):
        held = sum(int(of.sum()) * size for of, size in zip(kept[:, text], each, strict=True))
        assert method.nbytes(TOKENS) - max(each) < exact + held <= method.nbytes(TOKENS)
    assert method.nbytes(TOKENS) <= ratio * method.setting.stock_bytes(TOKENS)
    assert kept[..., : plan.sinks].all()
    between = slice(plan.sinks, None)
    for mine, chosen in zip(
        worth[..., between].unbind(1), kept[..., between].unbind(1), strict=True
    ):
        assert mine[chosen].min() >= mine[~chosen].max()


def test_without_dropped_tokens_the_cache_is_that_of_the_plan(
    model: PreTrainedModel, plan: CompressionPlan, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = method_with(plan, model)
    monkeypatch.setattr(method, "kept", lambda worth: torch.ones_like(worth, dtype=torch.bool))
    with method.holder(model, prompts) as new_cache:
        found = answers(model, new_cache())
    with compressed(model, plan, prefill="exact") as new_cache:
        expected = answers(model, new_cache(prompts.stock))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_codes_of_dropped_tokens_change_nothing(
    model: PreTrainedModel, plan: CompressionPlan, prompts: Prompts
) -> None:
    """Neither the answers nor what other layers are predicted from."""
    kept = method_with(plan, model).kept(importance(model, prompts))
    assert 0 < kept.float().mean() < 1
    keys, values = stacked(model, prompts.stock, 0)
    other = [torch.where(kept.unsqueeze(-1), x, x.flip(2)) for x in (keys, values)]
    for x, y in zip(
        reconstructed(plan, keys, values, kept), reconstructed(plan, *other, kept), strict=True
    ):
        torch.testing.assert_close(x, y)
    changed = copy.deepcopy(prompts.stock)
    for layer, mask in zip(changed.layers, kept, strict=True):
        layer.values = torch.where(mask[:, None, :, None], layer.values, 7.0)
    with hidden(model, kept):
        torch.testing.assert_close(
            answers(model, copy.deepcopy(prompts.stock)), answers(model, changed)
        )
    seen = answers(model, copy.deepcopy(prompts.stock))
    assert not torch.allclose(answers(model, changed), seen, rtol=1e-2)


@torch.no_grad()
def test_importance_is_the_largest_normalised_attention_of_a_second_reading(
    model: PreTrainedModel, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", TOKENS)
    twice = prompts.ids[:, :-1].repeat(1, 2)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    output = eager(input_ids=twice, output_attentions=True, output_hidden_states=True)
    found = importance(model, prompts)
    for index, layer in enumerate(decoder_layers(model)):
        weights = output.attentions[index][:, :, TOKENS:, :TOKENS]
        projection = attention_of(layer).o_proj.weight.unflatten(1, (4, -1))
        values = prompts.stock.layers[index].values.repeat_interleave(2, dim=1)
        moved = torch.einsum("ohd,bhnd->bhno", projection, values).norm(dim=-1)
        readers = output.hidden_states[index][:, TOKENS:].norm(dim=-1)
        expected = (weights / readers[:, None, :, None] * moved.unsqueeze(2)).amax(dim=(1, 2))
        torch.testing.assert_close(found[index], expected)


def test_plans_are_of_twice_the_ratio_and_of_a_sixteenth_at_least(model: PreTrainedModel) -> None:
    setting = Setting(model, tiny_tokens(), TOKENS, "pre", 0, Path())
    ratios = {1 / 2: 1, 1 / 16: 1 / 8, 1 / 32: 1 / 16, 1 / 64: 1 / 16}
    assert {ratio: Evicted(setting, ratio)._of_all.ratio for ratio in ratios} == ratios
    with pytest.raises(ArgumentError, match=r"ratio must be <= 0\.5"):
        Evicted(setting, 0.6)
