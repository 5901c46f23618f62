"""The settings of a run, checked before any long work."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.basis import Rotary
from manifoldkv.errors import PlanError, RankError
from manifoldkv.models.support import (
    attention_of,
    check_supported,
    decoder_layers,
    sliding_windows,
)
from manifoldkv.pipeline.recipes import (
    DEFAULT_RECIPE,
    AnyRecipe,
    BitRecipe,
    CommutingRecipe,
    Recipe,
    StoredRecipe,
    recipe_named,
)
from manifoldkv.pipeline.solve import BasisFinder
from manifoldkv.plan.files import check_context
from manifoldkv.plan.quantization import Quantization, check_layout
from manifoldkv.ranks import RANK_RULES, Budget, RankRule
from manifoldkv.ranks.base import CandidateRanks
from manifoldkv.solvers.base import check_seed
from manifoldkv.text.sources import TextSource
from manifoldkv.text.tokens import calibration_tokens


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
    UnknownNameError
        If a recipe or a rank rule does not exist.
    RankError, PlanError
        If a rank rule is given to a recipe other than a `Recipe`, or a quantisation to a
        `BitRecipe` or a `StoredRecipe`.
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
        self.complete_recipe()

    def complete_recipe(self) -> AnyRecipe:
        """Return the recipe with the rank rule of this run."""
        recipe = recipe_named(self.recipe)
        if isinstance(recipe, BitRecipe | StoredRecipe):
            name = "ranks and bits" if isinstance(recipe, BitRecipe) else "its step"
            if self.ranks is not None:
                raise RankError(
                    f"the recipe finds {name} from one budget: leave the rank rule out, or take "
                    "another recipe (low-rank)"
                )
            if self.quantization is not None:
                raise PlanError(
                    "the recipe rounds every latent by itself: leave the quantisation out, or take "
                    "another recipe (low-rank)"
                )
            return recipe
        if isinstance(recipe, CommutingRecipe) and self.ranks is not None:
            raise RankError(
                "recipe commuting has the same ranks in all layers: leave the rank rule out, or "
                "take another recipe"
            )
        if isinstance(recipe, CommutingRecipe) or self.ranks is None:
            return recipe
        return replace(recipe, ranks=RANK_RULES.resolve(self.ranks))


@dataclass(frozen=True)
class PreparedRun:
    """A run of `compress` before its long work; all that could refuse it has been asked.

    Parameters
    ----------
    config : CompressionConfig
        What plan to make.
    recipe : Recipe
        With the rank rule of the run.
    text : str
        Name of the calibration text.
    tokens : Tensor
        Token ids, (sequences, length), int64.
    budget : Budget
        For the ranks of all layers.
    candidates : list of CandidateRanks
        Ranks that bases are found at, by layer.
    """

    config: CompressionConfig
    recipe: Recipe
    text: str
    tokens: Tensor
    budget: Budget
    candidates: list[CandidateRanks]


def prepare(
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    config: CompressionConfig,
    recipe: Recipe,
) -> PreparedRun:
    """Read the text and return what a run of `compress` starts from; its errors are raised here.

    Nothing here takes long. The recipe is the complete one of the run.
    """
    check_supported(model)
    check_seed(config.seed)
    windows = sliding_windows(model.config)
    for index, window in enumerate(windows):
        check_layout(config.quantization, index, window, recent=recipe.recent_share > 0)
    if config.context is not None:
        check_context(config.context)
    BasisFinder(recipe, config.rotary, config.seed)  # do objective and solver go together?
    head_dim = int(attention_of(decoder_layers(model)[0]).head_dim)
    Budget(config.ratio, head_dim, windows, context=1)  # refuses what is no ratio
    text, ids = calibration_tokens(model, tokens, config.sequences, config.length)
    context = ids.shape[1] if config.context is None else config.context
    budget = Budget(config.ratio, head_dim, windows, context, recipe.recent_share)
    return PreparedRun(config, recipe, text, ids, budget, recipe.ranks.candidate_ranks(budget))
