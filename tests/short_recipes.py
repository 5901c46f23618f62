"""Recipes that take few steps where the library takes many."""

from dataclasses import replace
from typing import TypeVar

from manifoldkv import RECIPES, RankRecipe, Recipe
from manifoldkv.ranks import RankRule
from manifoldkv.solvers import Solver

EPOCHS, STEPS, TUNING_STEPS = 2, 5, 3
CANDIDATES = (0.25, 1)
T = TypeVar("T", Solver, RankRule)


def short(name: str) -> Recipe:
    """One of the library's recipes, with all its parts and few steps and candidates of each."""
    recipe = RECIPES[name]
    if not isinstance(recipe, RankRecipe):
        return recipe
    return replace(
        recipe,
        solver=with_fields(recipe.solver, epochs=EPOCHS, steps=STEPS),
        ranks=with_fields(recipe.ranks, candidates=CANDIDATES, sequences=1),
        tuning_steps=min(recipe.tuning_steps, TUNING_STEPS),
    )


def with_fields(part: T, **few: object) -> T:
    """A solver or rank rule with those of these fields that it has."""
    return replace(part, **{name: value for name, value in few.items() if hasattr(part, name)})
