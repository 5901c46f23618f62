"""Recipes that take few steps where the library takes many."""

from dataclasses import replace

from manifoldkv import RECIPES, RankRecipe, Recipe

EPOCHS, STEPS, TUNING_STEPS = 2, 5, 3


def short(name: str) -> Recipe:
    """One of the library's recipes, with all its parts and few steps of each."""
    recipe = RECIPES[name]
    if not isinstance(recipe, RankRecipe):
        return recipe
    few = {"epochs": EPOCHS, "steps": STEPS}
    known = {field: count for field, count in few.items() if hasattr(recipe.solver, field)}
    return replace(
        recipe,
        solver=replace(recipe.solver, **known),
        tuning_steps=min(recipe.tuning_steps, TUNING_STEPS),
    )
