"""The settings of a run, and whether they go together."""

from __future__ import annotations

from dataclasses import dataclass

from manifoldkv.basis import Rotary, check_rotary
from manifoldkv.coding.integers import Quantization
from manifoldkv.ranks import RankRule
from manifoldkv.recipes.named import DEFAULT_RECIPE, recipe_named
from manifoldkv.recipes.recipe import Recipe
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
    recipe : Recipe or str
        How: a recipe, or a name out of `RECIPES`.
    ranks : RankRule or str, optional
        The recipe's own rule if omitted; a name stands for a registered one with default fields
        (``"uniform"``, ``"sequential"``, ``"threshold"``, ``"optimal"``). Rules go with a
        `RankRecipe` alone.
    rotary : {"pre", "post"}
        Whether keys are stored before rotation (better) or after it (faster). Those of a
        `CommutingRecipe` are the same either way, and stored after it.
    quantization : Quantization, optional
        Also round the latents to integers; see `quantize`. Those of a `BitRecipe` or a
        `StoredRecipe` are rounded already.
    seed : int
        Of everything random.
    sequences, length : int, optional
        Number of windows of a text, and tokens of each; 64 of 512, or of what the
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
        If a rank rule is given to a recipe other than a `RankRecipe`, or a quantisation or keys
        after rotation to a `BitRecipe` or a `StoredRecipe`.
    """

    ratio: float = 0.5
    recipe: Recipe | str = DEFAULT_RECIPE
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

    def complete_recipe(self) -> Recipe:
        """Return the recipe with the rank rule of this run."""
        recipe = recipe_named(self.recipe)
        recipe.check_config(self)
        return recipe if self.ranks is None else recipe.with_ranks(self.ranks)
