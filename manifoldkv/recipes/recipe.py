"""Recipes: named compositions of an objective, a solver, a rank rule and what comes after them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from manifoldkv.basis import Site, parse_grouping
from manifoldkv.coding.allocation import WIDTHS, checked_widths
from manifoldkv.errors import ArgumentError
from manifoldkv.objectives import KQSVD, OBJECTIVES, EigenAttention, LayerOutput, Objective
from manifoldkv.ranks import PAPER_CANDIDATES, RANK_RULES, Optimal, RankRule, Sequential, Uniform
from manifoldkv.registry import Registry
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
    tuning_steps : int
        Of `tune`, at the end; 0 leaves bases as the solver found them.

    Raises
    ------
    ArgumentError
        If a name is not registered.
        If a grouping does not exist.
    """

    objective: Objective
    solver: Solver
    key_grouping: str | int = "shared"
    value_grouping: str | int = 1
    ranks: RankRule = field(default_factory=Uniform)
    tuning_steps: int = 0

    def __post_init__(self) -> None:
        for name, registry in REGISTRIES.items():
            object.__setattr__(self, name, registry.resolve(getattr(self, name)))
        for name in ("key_grouping", "value_grouping"):
            object.__setattr__(self, name, parse_grouping(getattr(self, name)))

    def grouping(self, site: Site) -> str | int:
        """Return which heads share a basis at a site."""
        return self.key_grouping if site == "key" else self.value_grouping

    def describe(self) -> dict[str, Any]:
        """Return all fields, methods by their names and fields, as a plan's provenance has them."""
        methods = {
            name: registry.describe(getattr(self, name)) for name, registry in REGISTRIES.items()
        }
        return asdict(self) | methods


REGISTRIES: dict[str, Registry[Any]] = {
    "objective": OBJECTIVES,
    "solver": SOLVERS,
    "ranks": RANK_RULES,
}
"""Of the methods of a `Recipe`, by its fields."""


@dataclass(frozen=True)
class BitRecipe:
    """Latents get the bits that cost least, of all ranks and widths within the ratio.

    Let F = E[g gᵀ] be the Fisher information of the keys or values x of a layer, all heads side by
    side (`fisher_moments`), and C their covariance. With F^½ C F^½ = V Λ Vᵀ, the latents
    y = Vᵀ F^½ (x - mean) are uncorrelated, and an error in any of them, in any layer, costs half
    its square in nats, to second order; what shrinks all tokens alike costs more than noise
    (`coherent_costs`), and codes are given back with a gain that allows for it. One water-filling
    over all latents of the model is then the whole allocation: of ranks (latents of 0 bits are not
    stored) and of bits. The ratio is one to the bytes of a cache in 16 bits: latents, norms and
    sinks.

    Keys and values of neighbouring layers say much the same of a token. Each is predicted, by ridge
    regression, from what the cache gives back of the layers below (values from the keys of their
    own layer too), and x is what is left: predictive coding along the layers. What is left depends
    on the bits below and these on what is left, so that both are found three times, first as if
    everything was given back exactly.

    The last eighth of the calibration sequences, if there are eight or more, is held out: its
    errors and its Fisher information give ``predicted_nats`` of the plan's provenance. On other
    text the divergence was 1.2 to 1.6 times the prediction from 16 × 512 tokens, and 2.7 to 5.2
    times from 8 × 128 (both reference models, recipes bits and best, ratios 1/8 and 1/4, 16 × 256
    held-out tokens).

    Parameters
    ----------
    widths : tuple of int
        Bits that a latent may have, increasing from 0 to at most 8.
    sinks : int
        The first tokens, which stay as they are.
    below : int or None
        How many layers below predict keys and values; with 0 only values are predicted, from the
        keys of their own layer, and with None nothing is.

    Raises
    ------
    ArgumentError
        If the widths do not increase from 0 to at most 8 bits, or `sinks` or `below` is negative.
    """

    widths: tuple[int, ...] = WIDTHS
    sinks: int = 4
    below: int | None = 2

    def __post_init__(self) -> None:
        checked_widths(self.widths)
        _check_coded(self)

    def describe(self) -> dict[str, Any]:
        """Return all fields and what they stand for, as `Recipe.describe` does."""
        return {
            "objective": {"name": "fisher"},
            "solver": {"name": "closed-form"},
            "key_grouping": "all",
            "value_grouping": "all",
            "ranks": {"name": "bits", "widths": list(self.widths)},
            "sinks": self.sinks,
            "below": self.below,
        }


Weights = Literal["fisher", "kq-svd", "layer-output"]
"""What an error in keys and values costs."""


@dataclass(frozen=True)
class CommutingRecipe:
    """Keys in bases that commute with their rotation, values in as many latents.

    A plan of it is the only one that `export_checkpoint` can fold into the weights of a model: keys
    are stored after rotation and never rebuilt, all layers have the same ranks of frequencies, and
    keys and values of a group of heads the same width (see `manifoldkv.commuting`). The ratio is
    kept at every length, since no token stays exact. It depends neither on the rank rule nor on
    whether keys are stored before rotation.

    Parameters
    ----------
    objective : {"fisher", "kq-svd", "layer-output"}
        What an error costs: nats to second order (`fisher_moments`); its share of the scores and of
        the output that the queries and W_O of a layer read; or the error at the output of the
        decoder layer, to which Riemannian Adam moves the bases of ``"kq-svd"``, of their ranks.
    grouping : str or int
        Which heads have a basis together, ``"all"`` or a number: each group becomes one KV head.
    tuning_steps : int
        Of `tune`, at the end; 0 leaves bases in closed form.

    Raises
    ------
    ArgumentError
        If there is no such objective.
        If the grouping is none, or shares one small basis between heads.
    """

    objective: Weights = "fisher"
    grouping: str | int = "all"
    tuning_steps: int = 0

    def __post_init__(self) -> None:
        known = get_args(Weights)
        if self.objective not in known:
            raise ArgumentError(
                f"unknown objective {self.objective!r} of commuting bases; known: "
                f"{', '.join(known)}"
            )
        object.__setattr__(self, "grouping", parse_grouping(self.grouping))
        if self.grouping == "shared":
            raise ArgumentError(
                "a commuting basis is one of heads side by side: take grouping all, or a number"
            )

    def describe(self) -> dict[str, Any]:
        """Return all fields and what they stand for, as `Recipe.describe` does."""
        return {
            "objective": {"name": self.objective},
            "solver": {
                "name": "riemannian-adam" if self.objective == "layer-output" else "closed-form"
            },
            "key_grouping": self.grouping,
            "value_grouping": self.grouping,
            "ranks": {"name": "frequencies"},
            "tuning_steps": self.tuning_steps,
        }


@dataclass(frozen=True)
class StoredRecipe:
    """A plan for a `Codec`: latents become symbols, which an entropy coder stores.

    Coordinates are Fisher's, as in `BitRecipe`, but the Fisher information is that of a prompt
    whose cache is stored after it was read exactly: what its errors cost are the predictions after
    it (`fisher_moments`, whose `prompt` is half of every calibration sequence). One step for all
    latents of the model is then the whole allocation; it is chosen so that the bytes of a blob,
    with everything in it, are expected to meet the ratio. They are compared to a cache in 16 bits,
    at the context of the run. No model runs on such latents: a codec gives a stock cache back.

    Keys and values are predicted from the layers below as in `BitRecipe`; the step is found three
    times, since it depends on what predictions leave, and these on what it gives back.

    Parameters
    ----------
    sinks : int
        The first tokens, which stay as they are.
    below : int or None
        As in `BitRecipe`.

    Raises
    ------
    ArgumentError
        If there are no such first tokens or layers below.
    """

    sinks: int = 4
    below: int | None = 2

    def __post_init__(self) -> None:
        _check_coded(self)

    def describe(self) -> dict[str, Any]:
        """Return all fields and what they stand for, as `Recipe.describe` does."""
        return {
            "objective": {"name": "fisher"},
            "solver": {"name": "closed-form"},
            "key_grouping": "all",
            "value_grouping": "all",
            "ranks": {"name": "entropy"},
            "sinks": self.sinks,
            "below": self.below,
        }


def _check_coded(recipe: BitRecipe | StoredRecipe) -> None:
    for name in ("sinks", "below"):
        value = getattr(recipe, name)
        if value is not None and value < 0:
            raise ArgumentError(f"{name} must be >= 0, got {value}")


AnyRecipe = Recipe | BitRecipe | CommutingRecipe | StoredRecipe

RECIPES: dict[str, AnyRecipe] = {
    "best": BitRecipe(),
    "bits": BitRecipe(below=None),
    "low-rank": Recipe(
        KQSVD(),
        ClosedForm(),
        key_grouping="all",
        value_grouping="all",
        ranks=Optimal(),
        tuning_steps=200,
    ),
    "eigen-attention": Recipe(EigenAttention(), ClosedForm()),
    "paper": Recipe(
        LayerOutput(),
        Predictor(),
        ranks=Sequential(candidates=PAPER_CANDIDATES, sequences=None, rows=None),
    ),
    "fast": Recipe(LayerOutput(), RiemannianAdam(), ranks=Sequential(candidates=PAPER_CANDIDATES)),
    "commuting": CommutingRecipe(),
    "stored": StoredRecipe(),
}
DEFAULT_RECIPE = "best"


def recipe_named(recipe: str | AnyRecipe) -> AnyRecipe:
    """Return a recipe by its name, or itself.

    Raises
    ------
    ArgumentError
        If there is none of this name.
    """
    if isinstance(recipe, AnyRecipe):
        return recipe
    if recipe not in RECIPES:
        raise ArgumentError(f"unknown recipe {recipe!r}; known: {', '.join(RECIPES)}")
    return RECIPES[recipe]
