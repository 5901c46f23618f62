"""Recipes by name."""

from __future__ import annotations

from importlib.metadata import entry_points
from math import inf

from manifoldkv.core.errors import ArgumentError
from manifoldkv.learn.objectives import KQSVD, EigenAttention, LayerOutput
from manifoldkv.learn.ranks import PAPER_CANDIDATES, Optimal, Sequential
from manifoldkv.learn.solvers import ClosedForm, ObliqueFlag, Predictor
from manifoldkv.recipes.bits import BitRecipe
from manifoldkv.recipes.low_rank import RankRecipe
from manifoldkv.recipes.recipe import Recipe
from manifoldkv.recipes.stored import StoredRecipe

GROUP = "manifoldkv.recipes"
RECIPES: dict[str, Recipe] = {
    "bits": BitRecipe(),
    "best": BitRecipe(compute=inf),
    "low-rank": RankRecipe(
        KQSVD(),
        ClosedForm(),
        key_grouping="all",
        value_grouping="all",
        ranks=Optimal(),
        tuning_steps=200,
    ),
    "eigen-attention": RankRecipe(EigenAttention(), ClosedForm()),
    "paper": RankRecipe(
        LayerOutput(),
        Predictor(),
        ranks=Sequential(candidates=PAPER_CANDIDATES, sequences=None, rows=None),
    ),
    "fast": RankRecipe(LayerOutput(), ObliqueFlag(), ranks=Sequential(candidates=PAPER_CANDIDATES)),
    "stored": StoredRecipe(),
}
DEFAULT_RECIPE = "bits"


def register_recipe(name: str, recipe: Recipe) -> None:
    """Make a recipe known by a name, here and in the command line.

    Other packages add recipes by an entry point of the group ``manifoldkv.recipes``, which names a
    `Recipe`.

    Raises
    ------
    ValueError
        If another recipe has the name.
    """
    if RECIPES.get(name, recipe) != recipe:
        raise ValueError(f"recipe {name!r} is already {RECIPES[name]!r}")
    RECIPES[name] = recipe


def recipe_names() -> list[str]:
    """Return all known names: registered ones in order, then entry points."""
    return list(dict.fromkeys([*RECIPES, *(e.name for e in entry_points(group=GROUP))]))


def recipe_named(recipe: str | Recipe) -> Recipe:
    """Return a recipe by its name, or itself.

    Raises
    ------
    ArgumentError
        If the name is unknown.
    """
    if isinstance(recipe, Recipe):
        return recipe
    for entry_point in entry_points(group=GROUP, name=recipe):
        if recipe not in RECIPES:
            RECIPES[recipe] = entry_point.load()
    if recipe not in RECIPES:
        raise ArgumentError(f"unknown recipe {recipe!r}; known: {', '.join(recipe_names())}")
    return RECIPES[recipe]
