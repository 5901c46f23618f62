from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manifoldkv import RECIPES, BitRecipe, RankRecipe
from manifoldkv.errors import ArgumentError
from manifoldkv.models.offloading import load_offloaded
from manifoldkv.ranks import RANK_RULES
from manifoldkv.recipes.coded import REACH
from manifoldkv.recipes.estimate import estimate
from tests.families import tiny_model, tiny_tokens

RANKED = [name for name, recipe in RECIPES.items() if isinstance(recipe, RankRecipe)]


@pytest.mark.parametrize("recipe", RANKED)
@pytest.mark.parametrize("rule", RANK_RULES.names())
def test_parts_that_a_recipe_has_take_time(recipe: str, rule: str) -> None:
    found = estimate(tiny_model("llama"), tiny_tokens(6, 16), recipe=recipe, ranks=rule)
    assert found.seconds["bases"] > 0
    assert found.seconds["capture"] > 0
    assert (found.seconds["ranks"] > 0) == (rule != "uniform")
    assert (found.seconds["tuning"] > 0) == (RECIPES[recipe].tuning_steps > 0)


def test_bits_take_time_for_moments_and_for_quantisers() -> None:
    model, tokens = tiny_model("llama").float(), tiny_tokens(6, 16)
    recipe = BitRecipe(depth=None)
    found = estimate(model, tokens, ratio=0.5, recipe=recipe)
    assert min(found.seconds[part] for part in ("capture", "bases", "ranks")) > 0
    assert found.seconds["tuning"] == 0
    assert found.activation_bytes == 6 * 16 * 4 * (3 + 2) * 32
    predicted = estimate(model, tokens, ratio=0.5, recipe=BitRecipe(depth=1))
    inputs = 2 * REACH * 16  # keys and values of the layers that are predicted from
    assert predicted.activation_bytes == found.activation_bytes + 6 * 16 * 4 * inputs
    assert predicted.seconds["capture"] > 0
    assert found.cache_bytes == found.stock_bytes / 2
    with pytest.raises(ArgumentError, match="too small"):
        estimate(model, tokens, ratio=0.01, recipe=recipe)
    six = tiny_model("llama", head_dim=6)
    assert estimate(six, tokens, ratio=0.5, recipe=recipe).cache_bytes > 0
    with pytest.raises(ArgumentError, match="must be a multiple of 8, got 12: leave trellis out"):
        estimate(six, tokens, ratio=0.5, recipe=replace(recipe, trellis=False))


def test_a_plan_for_stored_caches_takes_time_for_moments_and_tables() -> None:
    model, tokens = tiny_model("llama").float(), tiny_tokens(6, 16)
    found = estimate(model, tokens, ratio=0.5, recipe="stored", context=200)
    assert min(found.seconds[part] for part in ("capture", "bases", "ranks")) > 0
    assert found.seconds["tuning"] == 0
    with pytest.raises(ArgumentError, match="too small"):
        estimate(model, tokens, ratio=0.01, recipe="stored")


def test_bytes_by_hand() -> None:
    model = tiny_model("llama").float()  # 3 layers, hidden 32, 4 query and 2 KV heads of 8
    tokens = tiny_tokens(6, 16)
    found = estimate(model, tokens, ratio=0.5, recipe="eigen-attention")
    assert found.stock_bytes == 3 * 2 * 2 * 8 * 4
    assert found.cache_bytes == found.stock_bytes / 2
    assert found.activation_bytes == 6 * 16 * 4 * 2 * 32
    assert estimate(model, tokens, recipe="fast").activation_bytes == (
        found.activation_bytes + 6 * 16 * 4 * (2 * 2 + 4) * 8
    )
    together = RankRecipe("layer-output", "riemannian-adam", value_grouping="all")
    assert estimate(model, tokens, recipe=together).activation_bytes == (
        found.activation_bytes + 6 * 16 * 4 * (2 * 2 + 2 * 4) * 8
    )
    assert found.weight_bytes == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_offloaded_model_counts_one_layer(recipe: str, tmp_path: Path) -> None:
    whole = tiny_model("llama").float()
    whole.save_pretrained(tmp_path)
    model, _ = load_offloaded(str(tmp_path), torch.float32, "cpu")
    found = estimate(model, tiny_tokens(6, 16), recipe=recipe, context=200)
    layer = sum(p.nbytes for p in whole.model.layers[0].parameters())
    assert found.weight_bytes == sum(p.nbytes for p in whole.parameters()) - 2 * layer
    assert all(p.is_meta for p in model.model.layers[0].parameters())


def test_more_data_takes_longer_where_all_of_it_is_used() -> None:
    few, many = (
        estimate(tiny_model("llama"), tiny_tokens(count, 16), recipe="paper").seconds["bases"]
        for count in (4, 400)
    )
    assert many > 10 * few


def test_what_compress_refuses_is_refused() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(2, 16)
    with pytest.raises(ArgumentError):
        estimate(model, tokens, ratio=1.5)
    with pytest.raises(ArgumentError, match="unknown recipe"):
        estimate(model, tokens, recipe="nothing")
    with pytest.raises(ArgumentError):
        estimate(model, tokens, recipe=RankRecipe("layer-output", "closed-form"))
