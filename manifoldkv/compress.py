"""The road in one call: text, activations, bases, plan."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.activations import Rotary
from manifoldkv.bases import BasisFinder, find_bases
from manifoldkv.calibration import TextSource, calibration_tokens
from manifoldkv.errors import RankError
from manifoldkv.fingerprint import fingerprint
from manifoldkv.models import (
    attention_of,
    cached_tokens,
    check_supported,
    decoder_layers,
    sliding_windows,
    unwrapped,
)
from manifoldkv.output import only_run
from manifoldkv.plan import (
    CompressionPlan,
    LayerPlan,
    Provenance,
    Quantization,
    check_layout,
    config_hash,
)
from manifoldkv.quantize import quantize
from manifoldkv.ranks import RANK_RULES, Budget, LayerBases, RankProblem, RankRule, Ranks
from manifoldkv.ranks.base import CandidateRanks
from manifoldkv.recipes import DEFAULT_RECIPE, Recipe, recipe_named
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_model, digest_of_tokens
from manifoldkv.runs.executors import Executor, executor_named, on_threads
from manifoldkv.runs.source import versions
from manifoldkv.solvers.base import check_seed
from manifoldkv.tuning import tune

LOG = logging.getLogger(__name__)


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
        How: a composition of one's own, or a name out of `RECIPES`.
    ranks : RankRule or str, optional
        The recipe's own rule if omitted; a name stands for a registered one with default fields
        (``"uniform"``, ``"sequential"``, ``"threshold"``, ``"optimal"``).
    rotary : {"pre", "post"}
        Whether keys are stored before rotation (better) or after it (faster).
    quantization : Quantization, optional
        Also round the latents to integers; see `quantize`.
    seed : int
        Of everything random.
    sequences, length : int, optional
        How much of a text is read: so many windows of so many tokens; 64 of 512, or of what the
        model can take, if omitted.
    context : int, optional
        Tokens of the text that the ratio is kept for; those of a calibration sequence if omitted.
        It matters where tokens stay exact, and where layers have sliding windows.

    Raises
    ------
    UnknownNameError
        If a recipe or a rank rule does not exist.
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
        self.complete_recipe()

    def complete_recipe(self) -> Recipe:
        """Return the recipe with the rank rule of this run."""
        recipe = recipe_named(self.recipe)
        if self.ranks is None:
            return recipe
        return replace(recipe, ranks=RANK_RULES.resolve(self.ranks))


def compress(
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    config: CompressionConfig | None = None,
    *,
    folder: str | Path | None = None,
    executor: str | Executor = "local",
    **settings: Any,
) -> CompressionPlan:
    """Find bases for the cache of a model and return the plan that holds them.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model with rotary embeddings. It is left as it was.
    tokens : Tensor, TextSource or str
        Calibration data: token ids (sequences, length) without padding; or a text, of which the
        calibration part is read with the tokenizer the model was saved with.
    config : CompressionConfig, optional
        What plan to make.
    folder : str or Path, optional
        Where every basis is stored as soon as it is found, then what ranks cost, and the state of
        the tuning every few steps. A run that was interrupted, by whatever, goes on there when it
        is started again, and ends in the same plan; other settings in the same folder share what
        they have in common. Nothing is taken from there that other code has made. One run at a
        time.
    executor : {"local", "ray"} or Executor
        Where bases are found, and what their ranks cost under the threshold and the optimal rule;
        the plan is the same. The sequential rule, tuning and rounding run in this process.
    **settings
        Fields of `CompressionConfig`, in place of those of `config`: ``ratio=0.25``.

    Raises
    ------
    UnsupportedModelError
        If the attention of the model cannot be handled.
    RankError
        If the ratio is above 1, or too small for the ranks to choose from.
    UnknownNameError, UnsolvableError
        If a recipe, objective or solver does not exist, or the two do not go together.
    SeedError
        If the seed is not an integer of 64 bits.
    TextError
        If the tokens are not a (sequences, length) tensor of the model's ids, the text is too
        short, or the sequences are longer than the model takes.
    PlanError
        If the layout of the quantisation does not fit the model.
    ExecutorError
        If Ray is not installed or reached, or a task is lost for good.
    OutputError
        If another run is at work in the folder, it cannot be written to, or a file in it is
        damaged (which is named, and computed again once it is deleted).
    """
    config = replace(config or CompressionConfig(), **settings)
    model = unwrapped(model)
    executor = executor_named(executor)
    run = prepare(model, tokens, config)
    threads = torch.get_num_threads()
    alone = nullcontext() if folder is None else only_run(Path(folder))
    with alone, on_threads(threads):  # all of it, also what is no task
        checkpoints = _checkpoints(folder, model, run.tokens, threads)
        of_ranks = _rank_checkpoints(checkpoints, run)  # a source that cannot be read shows here
        finder = BasisFinder(run.recipe, config.rotary, config.seed)
        bases = find_bases(
            model, run.tokens, finder, run.candidates, executor, threads, checkpoints
        )
        ranks = _choose_ranks(
            run,
            RankProblem(model, run.tokens, bases, run.budget, config.rotary, executor, of_ranks),
        )
        plan = _plan(model, run, bases, ranks, threads)
        plan = tune(
            model,
            plan,
            run.tokens,
            steps=run.recipe.tuning_steps,
            seed=config.seed,
            checkpoints=checkpoints,
        )
        if config.quantization is None:
            return plan
        return quantize(plan, model, run.tokens, config.quantization)


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
        Token ids, (sequences, length).
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
    model: PreTrainedModel, tokens: Tensor | TextSource | str, config: CompressionConfig
) -> PreparedRun:
    """Read the text and return what a run of `compress` starts from; its errors are raised here.

    Nothing here takes long.
    """
    check_supported(model)
    check_seed(config.seed)
    recipe = config.complete_recipe()
    windows = sliding_windows(model.config)
    for index, window in enumerate(windows):
        check_layout(config.quantization, index, window, recent=recipe.recent_share > 0)
    BasisFinder(recipe, config.rotary, config.seed)  # do objective and solver go together?
    head_dim = int(attention_of(decoder_layers(model)[0]).head_dim)
    Budget(config.ratio, head_dim, windows, config.context or 1)  # refuses what is no ratio
    text, ids = calibration_tokens(model, tokens, config.sequences, config.length)
    context = ids.shape[1] if config.context is None else config.context
    budget = Budget(config.ratio, head_dim, windows, context, recipe.recent_share)
    return PreparedRun(config, recipe, text, ids, budget, recipe.ranks.candidate_ranks(budget))


def _checkpoints(
    folder: str | Path | None, model: PreTrainedModel, tokens: Tensor, threads: int
) -> Checkpoints:
    """Return the checkpoints of all that depends on these."""
    if folder is None:
        return Checkpoints()
    settings = {
        "model": digest_of_model(model),
        "tokens": digest_of_tokens(tokens),
        "threads": threads,
        "versions": versions(),
    }
    return Checkpoints(Path(folder), settings)


def _rank_checkpoints(checkpoints: Checkpoints, run: PreparedRun) -> Checkpoints:
    """Return the checkpoints of what ranks cost, which depends on all bases."""
    recipe, described = run.recipe, run.recipe.describe()
    of_bases = ("objective", "solver", "key_grouping", "value_grouping")
    made = checkpoints.made_by(
        BasisFinder, type(recipe.objective), type(recipe.solver), type(recipe.ranks)
    )
    return made.keyed(
        recipe={name: described[name] for name in of_bases},
        rotary=run.config.rotary,
        seed=run.config.seed,
        candidates=run.candidates,
    )


def _choose_ranks(run: PreparedRun, problem: RankProblem) -> list[Ranks]:
    """Return the ranks of all layers by the rule of the recipe, which must keep the budget."""
    name = run.recipe.describe()["ranks"]["name"]
    LOG.info("choosing ranks by the %s rule", name)
    ranks = run.recipe.ranks.choose(problem)
    if run.budget.cost(ranks) > run.budget.latent_elements:
        raise RankError(f"rank rule {name} exceeds the ratio {run.budget.ratio:g}")
    return ranks


def _plan(
    model: PreTrainedModel,
    run: PreparedRun,
    bases: list[LayerBases],
    ranks: list[Ranks],
    threads: int,
) -> CompressionPlan:
    layers = [
        LayerPlan(of_layer.keys[key], of_layer.values[value], window)
        for of_layer, (key, value), window in zip(bases, ranks, run.budget.windows, strict=True)
    ]
    provenance = Provenance(
        model=model.config._name_or_path,
        text=run.text,
        sequences=run.tokens.shape[0],
        length=run.tokens.shape[1],
        context=run.budget.context,
        recipe=run.recipe.describe(),
        seed=run.config.seed,
        requested_ratio=run.config.ratio,
        threads=threads,
        versions=versions(),
    )
    return CompressionPlan(
        tuple(layers),
        run.config.rotary,
        config_hash(model.config),
        fingerprint(model),
        provenance,
        recent=run.budget.recent,
    )


def ratio_from_bytes(model: PreTrainedModel, nbytes: float, *, context: int) -> float:
    """Return the ratio at which the cache of one sequence takes at most some bytes.

    Give `compress` the same context: ``compress(model, text, context=n,
    ratio=ratio_from_bytes(model, 2**30, context=n))``.

    Parameters
    ----------
    model : PreTrainedModel
        Its dtype is that of the cache.
    nbytes : float
        All layers together.
    context : int
        Tokens of the sequence.

    Raises
    ------
    UnsupportedModelError
        If the attention of the model cannot be handled.
    RankError
        If there is no token or no byte.
    """
    check_supported(model)
    if context < 1 or not nbytes > 0:
        raise RankError(f"{nbytes:g} bytes for {context} tokens leave room for nothing")
    kv_heads = model.config.get_text_config().num_key_value_heads
    head_dim = int(attention_of(decoder_layers(model)[0]).head_dim)
    tokens = sum(cached_tokens(context, window) for window in sliding_windows(model.config))
    return min(1.0, nbytes / (tokens * 2 * kv_heads * head_dim * model.dtype.itemsize))
