"""The settings of a run, and whether they go together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from manifoldkv.basis import Rotary, check_rotary
from manifoldkv.coding.integers import Quantization
from manifoldkv.errors import ArgumentError, PlanError
from manifoldkv.ranks import RANK_RULES, RankRule
from manifoldkv.recipes.recipe import (
    DEFAULT_RECIPE,
    AnyRecipe,
    BitRecipe,
    CommutingRecipe,
    StoredRecipe,
    recipe_named,
)
from manifoldkv.seeds import check_seed


@dataclass(frozen=True)
class CompressionConfig:
    """All that decides what plan `compress` makes, beside the model and the text.

    Parameters
    ----------
    ratio : float
        Largest share of the bytes of an uncompressed cache that a text of `context` tokens may
        take, before quantisation, in (0, 1]. The achieved one is `CompressionPlan.ratio`;
        `ratio_from_bytes` returns the one of a budget in bytes.
    recipe : Recipe, BitRecipe, CommutingRecipe, StoredRecipe or str
        How: a composition of one's own, or a name out of `RECIPES`.
    ranks : RankRule or str, optional
        The recipe's own rule if omitted; a name stands for a registered one with default fields
        (``"uniform"``, ``"sequential"``, ``"threshold"``, ``"optimal"``). Rules go with a
        `Recipe` alone.
    rotary : {"pre", "post"}
        Whether keys are stored before rotation (better) or after it (faster). Those of a
        `CommutingRecipe` are the same either way, and stored after it.
    quantization : Quantization, optional
        Also round the latents to integers; see `quantize`. Those of a `BitRecipe` or a
        `StoredRecipe` are rounded already.
    seed : int
        Of everything random.
    sequences, length : int, optional
        How much of a text is read: so many windows of so many tokens; 64 of 512, or of what the
        model can take, if omitted.
    context : int, optional
        Tokens of the text that the ratio holds for, 2^20 at most; those of a calibration sequence
        if omitted. It matters where tokens stay exact, and where layers have sliding windows.

    Raises
    ------
    ArgumentError
        If a recipe, a rank rule or a rotary space does not exist.
        If the seed is not an integer of 64 bits.
    ArgumentError, PlanError
        If a rank rule is given to a recipe other than a `Recipe`, or a quantisation or keys after
        rotation to a `BitRecipe` or a `StoredRecipe`.
    """

    ratio: float = 0.5
    recipe: AnyRecipe | str = DEFAULT_RECIPE
    ranks: RankRule | str | None = None
    rotary: Rotary = "pre"
    quantization: Quantization | None = None
    seed: int = 0
    sequences: int | None = None
    length: int | None = None
    context: int | None = None

    def __post_init__(self) -> None:
        check_rotary(self.rotary)
        check_seed(self.seed)
        self.complete_recipe()

    def complete_recipe(self) -> AnyRecipe:
        """Return the recipe with the rank rule of this run."""
        recipe = recipe_named(self.recipe)
        if isinstance(recipe, BitRecipe | StoredRecipe):
            name = "ranks and bits" if isinstance(recipe, BitRecipe) else "its step"
            if self.ranks is not None:
                raise ArgumentError(
                    f"the recipe finds {name} from one budget: leave the rank rule out, or take "
                    "another recipe (low-rank)"
                )
            if self.quantization is not None:
                raise PlanError(
                    "the recipe rounds every latent by itself: leave the quantisation out, or take "
                    "another recipe (low-rank)"
                )
            if self.rotary == "post":
                raise PlanError(
                    "the recipe stores keys before rotation: leave rotary out, or take another "
                    "recipe (low-rank)"
                )
            return recipe
        if isinstance(recipe, CommutingRecipe) and self.ranks is not None:
            raise ArgumentError(
                "recipe commuting has the same ranks in all layers: leave the rank rule out, or "
                "take another recipe"
            )
        if isinstance(recipe, CommutingRecipe) or self.ranks is None:
            return recipe
        return replace(recipe, ranks=RANK_RULES.resolve(self.ranks))
