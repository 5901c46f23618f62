from dataclasses import replace

import pytest

from manifoldkv import RECIPES, RankError, Recipe, UnknownNameError, compress, compressed
from manifoldkv.recipes import recipe_named
from tests.families import tiny_model, tiny_tokens


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_makes_a_plan_that_decodes(name: str) -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(2, 20)
    recipe = RECIPES[name]
    recipe = replace(recipe, tuning_steps=recipe.tuning_steps and 2)
    plan = compress(model, tokens, recipe=recipe)
    assert plan.ratio <= 0.5
    assert (plan.recent > 0) == (recipe.recent_share > 0)
    with compressed(model, plan):
        assert model(input_ids=tokens).logits.isfinite().all()


def test_a_recipe_is_found_by_its_name_or_is_itself() -> None:
    assert recipe_named("best") is RECIPES["best"]
    own = Recipe("k-svd", "closed-form")
    assert recipe_named(own) is own


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown recipe 'nothing'; known: eigen-attention"):
        recipe_named("nothing")
    with pytest.raises(UnknownNameError, match="unknown rank rule 'best'; known: uniform"):
        Recipe("k-svd", "closed-form", ranks="best")


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_the_newest_tokens_cannot_take_the_whole_cache(share: float) -> None:
    with pytest.raises(RankError, match=r"a share in \[0, 1\) of the cache"):
        Recipe("k-svd", "closed-form", recent_share=share)
