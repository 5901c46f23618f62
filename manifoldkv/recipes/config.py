"""Settings of a run, checked together."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from manifoldkv.core.basis import Rotary, check_rotary
from manifoldkv.core.errors import ArgumentError
from manifoldkv.core.seeds import check_seed
from manifoldkv.learn.objectives import Objective
from manifoldkv.learn.ranks import RankRule
from manifoldkv.plan.formats.integers import Quantization
from manifoldkv.recipes.named import DEFAULT_RECIPE, recipe_named
from manifoldkv.recipes.recipe import Recipe


@dataclass(frozen=True)
class CompressionConfig:
    """Settings of `compress`, which determine a plan together with the model and the text.

    Parameters
    ----------
    ratio : float
        Largest share of the bytes of an uncompressed cache that a text of `context` tokens may
        take, before quantisation, in (0, 1]. The achieved one is `CompressionPlan.ratio`;
        `ratio_from_bytes` returns the one of a budget in bytes.
    recipe : Recipe or str
        Recipe, or a name of `RECIPES`.
    objective : Objective or str, optional
        Objective of the recipe, the recipe's if omitted; a name stands for a registered one with
        default fields. Coded recipes take those with a metric.
    ranks : RankRule or str, optional
        Rank rule of a `RankRecipe`, the recipe's if omitted; a name stands for a registered one
        with default fields (``"uniform"``, ``"sequential"``, ``"threshold"``, ``"optimal"``).
    compute : float, optional
        Largest number of multiplications of a decode step, in times of uncompressed attention's
        (`CompressionPlan.compute`), of a `BitRecipe`; the recipe's if omitted, infinite for the
        least loss.
    nats : float, optional
        Largest loss in nats per token, in place of a ratio: the smallest cache of a `BitRecipe`
        whose loss on calibration sequences that nothing was fitted to stays below. The provenance
        of the plan has the predicted and the measured loss.
    rotary : {"pre", "post"}
        Whether keys are stored before rotation (smaller error) or after it (faster).
    quantization : Quantization, optional
        Format of integer latents; see `quantize`. Latents of a `BitRecipe` or a `StoredRecipe` are
        quantized already.
    seed : int
        Seed of all random numbers.
    sequences, length : int, optional
        Number of windows of a text, and of tokens of each; 64 of 512, or of the positions of the
        model if fewer, if omitted.
    context : int, optional
        Number of tokens of the text that the ratio holds for, at most 2^20; those of a calibration
        sequence if omitted. It matters with sink tokens and with sliding windows.

    Raises
    ------
    ArgumentError
        If a recipe, a rank rule or a rotary space is unknown.
        If the seed is not an integer of 64 bits.
    ArgumentError, PlanError
        If a rank rule is given to a recipe other than a `RankRecipe`, or a quantisation or keys
        after rotation to a `BitRecipe` or a `StoredRecipe`.
    """

    ratio: float = 0.5
    recipe: Recipe | str = DEFAULT_RECIPE
    objective: Objective | str | None = None
    ranks: RankRule | str | None = None
    compute: float | None = None
    nats: float | None = None
    rotary: Rotary = "pre"
    quantization: Quantization | None = None
    seed: int = 0
    sequences: int | None = None
    length: int | None = None
    context: int | None = None

    def __post_init__(self) -> None:
        check_rotary(self.rotary)
        check_seed(self.seed)
        if self.nats is not None and not 0 < self.nats < inf:
            raise ArgumentError(f"nats must be a positive number, got {self.nats}")
        self.complete_recipe()

    def complete_recipe(self) -> Recipe:
        """Return the recipe with the objective, the rank rule and the compute of this run."""
        recipe = recipe_named(self.recipe).configured(self)
        if self.nats is not None and not recipe.meets_nats:
            raise ArgumentError(
                f"{type(recipe).__name__} makes no plan for a loss: leave nats out, or take "
                "another recipe (bits)"
            )
        return recipe
