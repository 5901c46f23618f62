"""Recipes: named compositions of an objective, a solver, a rank rule and what comes after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from manifoldkv.errors import RankError, UnknownNameError

RankRule = Literal["uniform", "sequential", "threshold", "optimal"]
RANK_RULES: tuple[RankRule, ...] = get_args(RankRule)


@dataclass(frozen=True)
class Recipe:
    """How a plan is made.

    Parameters
    ----------
    objective, solver : str
        Registered names.
    key_grouping, value_grouping : str or int
        Which heads share a basis.
    ranks : {"uniform", "sequential", "threshold", "optimal"}
        The rank rule, if `compress` is not given another.
    recent_share : float
        Share of the cached numbers that is spent on the newest tokens, kept as they are, at the
        length of the calibration sequences. In [0, 1).
    tuning_steps : int
        Of `tune`, at the end; 0 leaves bases as the solver found them.

    Raises
    ------
    UnknownNameError
        If there is no such rank rule.
    RankError
        If the share of the newest tokens is not in [0, 1).
    """

    objective: str
    solver: str
    key_grouping: str | int = "shared"
    value_grouping: str | int = 1
    ranks: RankRule = "uniform"
    recent_share: float = 0.0
    tuning_steps: int = 0

    def __post_init__(self) -> None:
        if self.ranks not in RANK_RULES:
            raise UnknownNameError(
                f"unknown rank rule {self.ranks!r}; known: {', '.join(RANK_RULES)}"
            )
        if not 0 <= self.recent_share < 1:
            raise RankError(
                f"the newest tokens can take a share in [0, 1) of the cache, not "
                f"{self.recent_share:g}"
            )


RECIPES = {
    "eigen-attention": Recipe("eigen-attention", "closed-form"),
    "paper": Recipe("layer-output", "predictor"),
    "fast": Recipe("layer-output", "riemannian-adam"),
    "best": Recipe(
        "kq-svd",
        "closed-form",
        key_grouping="all",
        value_grouping="all",
        ranks="optimal",
        recent_share=0.25,
        tuning_steps=200,
    ),
}


def recipe_named(recipe: str | Recipe) -> Recipe:
    """A recipe by its name, or itself.

    Raises
    ------
    UnknownNameError
        If there is none of this name.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise UnknownNameError(f"unknown recipe {recipe!r}; known: {', '.join(RECIPES)}")
    return RECIPES[recipe]
