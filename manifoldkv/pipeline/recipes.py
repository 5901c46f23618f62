"""Recipes: named compositions of an objective, a solver, a rank rule and what comes after them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from manifoldkv.basis import Site, parse_grouping
from manifoldkv.errors import RankError, UnknownNameError
from manifoldkv.objectives import KQSVD, OBJECTIVES, EigenAttention, LayerOutput, Objective
from manifoldkv.ranks import PAPER_CANDIDATES, RANK_RULES, Optimal, RankRule, Sequential, Uniform
from manifoldkv.ranks.bits import WIDTHS, checked_widths
from manifoldkv.solvers import SOLVERS, ClosedForm, Predictor, RiemannianAdam, Solver


@dataclass(frozen=True)
class Recipe:
    """How a plan is made.

    Objective, solver and rank rule may be given by their registered names, which stand for objects
    with default fields.

    Parameters
    ----------
    objective : Objective
        What a good basis keeps.
    solver : Solver
        How it is found.
    key_grouping, value_grouping : str or int
        Which heads share a basis.
    ranks : RankRule
        How the ranks of all layers are chosen.
    recent_share : float
        Share of the cached bytes that is spent on the newest tokens, which stay exact, at the
        context length of the budget. In [0, 1).
    tuning_steps : int
        Of `tune`, at the end; 0 leaves bases as the solver found them.

    Raises
    ------
    UnknownNameError
        If a name is not registered.
    RankError
        If the share of the newest tokens is not in [0, 1), or a grouping is none.
    """

    objective: Objective
    solver: Solver
    key_grouping: str | int = "shared"
    value_grouping: str | int = 1
    ranks: RankRule = field(default_factory=Uniform)
    recent_share: float = 0.0
    tuning_steps: int = 0

    def __post_init__(self) -> None:
        for name, registry in _REGISTRIES.items():
            object.__setattr__(self, name, registry.resolve(getattr(self, name)))
        for name in ("key_grouping", "value_grouping"):
            object.__setattr__(self, name, parse_grouping(getattr(self, name)))
        if not 0 <= self.recent_share < 1:
            raise RankError(
                f"the newest tokens can take a share in [0, 1) of the cache, not "
                f"{self.recent_share:g}"
            )

    def grouping(self, site: Site) -> str | int:
        """Return which heads share a basis at a site."""
        return self.key_grouping if site == "key" else self.value_grouping

    def describe(self) -> dict[str, Any]:
        """Return all fields, methods by their names and fields, as a plan's provenance has them."""
        methods = {
            name: registry.describe(getattr(self, name)) for name, registry in _REGISTRIES.items()
        }
        return asdict(self) | methods


_REGISTRIES: dict[str, Any] = {"objective": OBJECTIVES, "solver": SOLVERS, "ranks": RANK_RULES}


@dataclass(frozen=True)
class BitRecipe:
    """How a plan of rank and bits from one budget is made, by `allocate_bits`.

    Parameters
    ----------
    widths, norms, sinks
        As in `allocate_bits`.
    tuning_steps : int
        Of `tune`, at the end; 0 leaves coordinates in closed form.

    Raises
    ------
    RankError
        If the widths do not increase from 0 to at most 8 bits.
    """

    widths: tuple[int, ...] = WIDTHS
    norms: bool = True
    sinks: int = 4
    tuning_steps: int = 0

    def __post_init__(self) -> None:
        checked_widths(self.widths)

    def describe(self) -> dict[str, Any]:
        """Return all fields and what they stand for, as `Recipe.describe` does."""
        return {
            "objective": {"name": "fisher"},
            "solver": {"name": "closed-form"},
            "key_grouping": "all",
            "value_grouping": "all",
            "ranks": {"name": "bits", "widths": list(self.widths), "norms": self.norms},
            "sinks": self.sinks,
            "tuning_steps": self.tuning_steps,
        }


RECIPES: dict[str, Recipe | BitRecipe] = {
    "eigen-attention": Recipe(EigenAttention(), ClosedForm()),
    "paper": Recipe(
        LayerOutput(),
        Predictor(),
        ranks=Sequential(candidates=PAPER_CANDIDATES, sequences=None, rows=None),
    ),
    "fast": Recipe(LayerOutput(), RiemannianAdam(), ranks=Sequential(candidates=PAPER_CANDIDATES)),
    "best": Recipe(
        KQSVD(),
        ClosedForm(),
        key_grouping="all",
        value_grouping="all",
        ranks=Optimal(),
        recent_share=0.25,
        tuning_steps=200,
    ),
    "bits": BitRecipe(),
}
DEFAULT_RECIPE = "best"


def recipe_named(recipe: str | Recipe | BitRecipe) -> Recipe | BitRecipe:
    """Return a recipe by its name, or itself.

    Raises
    ------
    UnknownNameError
        If there is none of this name.
    """
    if isinstance(recipe, Recipe | BitRecipe):
        return recipe
    if recipe not in RECIPES:
        raise UnknownNameError(f"unknown recipe {recipe!r}; known: {', '.join(RECIPES)}")
    return RECIPES[recipe]
