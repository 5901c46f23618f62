"""The pipeline: calibrate a model on a text, fit a plan to the statistics."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.core.errors import ArgumentError
from manifoldkv.core.files import only_run
from manifoldkv.core.modes import in_own_modes
from manifoldkv.core.windows import cached_tokens
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.weights import differentiable
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.recipes.config import CompressionConfig
from manifoldkv.recipes.named import DEFAULT_RECIPE, recipe_named
from manifoldkv.recipes.recipe import Recipe
from manifoldkv.recipes.rounding import quantize
from manifoldkv.recipes.run import HELD_OUT, Run, check_run
from manifoldkv.recipes.smallest import measured, smallest_plan
from manifoldkv.recipes.tune import tune
from manifoldkv.runs.executors import Executor, executor_named, on_threads
from manifoldkv.statistics.statistics import Statistics
from manifoldkv.text.sources import TextSource
from manifoldkv.text.tokens import SEQUENCES, calibration_length, calibration_tokens

FRONTIER_SEQUENCES, FRONTIER_LENGTH = 4, 256
"""Number and largest length of the sequences that losses by limit of compute are estimated on."""


@in_own_modes
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
        Folder of checkpoints: statistics of every eight sequences, every basis once solved, rank
        sensitivities, and the state of tuning every few steps. An interrupted run resumes from it
        with the same plan; runs with other settings share common results, and results of other
        code are ignored. One run at a time.
    executor : {"local", "ray"} or Executor
        Where statistics are collected and bases are found, and rank sensitivities under the
        threshold and the optimal rule; the plan is the same. The sequential rule, tuning and
        quantization run in this process.
    **settings
        Fields of `CompressionConfig`, in place of those of `config`: ``ratio=0.25``.

    Raises
    ------
    ModelError
        If the attention of the model cannot be handled.
        If a weight of the model is not finite, or the output of a layer is not.
    ArgumentError
        If the ratio is above 1, or too small for the ranks to choose from; if a rank rule is
        given to a recipe other than a `RankRecipe`, or packs of latents do not fit the features of
        a layer.
        If `compute` is less than the cheapest plan takes, or no plan loses as little as `nats`; if
        either is given to a recipe other than a `BitRecipe`.
        If a recipe, objective or solver does not exist, or the two do not go together.
        If the seed is not an integer of 64 bits.
        If the tokens are not a (sequences, length) tensor of the model's ids, the text is too
        short, or the sequences are longer than the model takes.
    PlanError
        If the layout of the quantisation does not fit the model, the context
        is too long for a plan, or a `StoredRecipe` is asked for a model with sliding windows.
    RunError
        If Ray is not installed or reached, or a task is lost for good.
        If another run is at work in the folder, it cannot be written to, or a file in it is
        damaged (which is named, and computed again once it is deleted).
    """
    decoder = Decoder.of(model)
    run = started(decoder, tokens, config, settings, folder, executor)
    recipe, config = run.config.complete_recipe(), run.config
    with differentiable(decoder.model):
        statistics = recipe.calibrate(run)
        if config.nats is None:
            plan = recipe.fit(statistics, config)
        else:
            plan = _smallest(run, recipe, statistics)
    alone = nullcontext() if folder is None else only_run(Path(folder))
    with alone, on_threads(torch.get_num_threads()):
        if recipe.tuning_steps:
            plan = tune(
                model,
                plan,
                run.tokens,
                steps=recipe.tuning_steps,
                seed=config.seed,
                checkpoints=run.checkpoints(),
            )
        if config.quantization is not None:
            plan = quantize(plan, model, run.tokens, config.quantization)
    return plan


@in_own_modes
def calibrate(
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    config: CompressionConfig | None = None,
    *,
    folder: str | Path | None = None,
    executor: str | Executor = "local",
    **settings: Any,
) -> Statistics:
    """Return the statistics of a model on a text, to which `fit` fits plans.

    Statistics of parts of a text `Statistics.merge` to those of the whole, and are saved and loaded
    (`Statistics.save`). Those of recipe ``"stored"`` differ from those of ``"bits"`` and
    ``"best"``: they are of prompts.

    Parameters
    ----------
    model, tokens, config, folder, executor, **settings
        As in `compress`.

    Raises
    ------
    ManifoldKVError
        As `compress`; and `ArgumentError` if the recipe fits nothing to statistics.
    """
    run = started(Decoder.of(model), tokens, config, settings, folder, executor)
    recipe = run.config.complete_recipe()
    with differentiable(run.decoder.model):
        statistics = recipe.calibrate(run)
    if not isinstance(statistics, Statistics):
        raise ArgumentError(
            f"{type(recipe).__name__} solves on activations and not on statistics: call compress, "
            "or take another recipe (bits)"
        )
    return statistics


@in_own_modes
def fit(
    statistics: Statistics, config: CompressionConfig | None = None, **settings: Any
) -> CompressionPlan:
    """Return a plan of a model from its statistics; the model does not run.

    ``fit(calibrate(model, text), ratio=1 / 8)`` is ``compress(model, text, ratio=1 / 8)``.

    Parameters
    ----------
    statistics : Statistics
        From `calibrate`, with the same recipe.
    config, **settings
        As in `compress`, without `nats`, whose loss only a model measures.

    Raises
    ------
    ManifoldKVError
        As `compress`.
    """
    config = replace(config or CompressionConfig(), **settings)
    if config.nats is not None:
        raise ArgumentError("nats needs the model: call compress(model, text, nats=…)")
    recipe = config.complete_recipe()
    recipe.check(statistics.model, config, config.context or statistics.length)
    return recipe.fit(statistics, config)


@in_own_modes
def frontier(
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    config: CompressionConfig | None = None,
    **settings: Any,
) -> dict[str, float]:
    """Return the loss of plans at a ratio by limit of compute, in nats per token.

    Limits are the keys: ``"2"``, ``"4"``, ``"8"``, ``"16"`` and ``"unlimited"``, without those that
    no plan meets. Losses are those of a rate-distortion calculation with Gaussian latents on four
    sequences of at most 256 tokens, which measured ones exceed. The dictionary is empty if the
    recipe is not a `BitRecipe`. Parameters are those of `compress`.

    Raises
    ------
    ManifoldKVError
        As `compress`, before any long work.
    """
    run = started(Decoder.of(model), tokens, config, settings)
    recipe = run.config.complete_recipe()
    few = run.tokens[:FRONTIER_SEQUENCES, :FRONTIER_LENGTH]
    config = replace(run.config, context=run.context)
    return recipe.frontier(recipe.calibrate(replace(run, tokens=few)), config)


def started(
    decoder: Decoder,
    tokens: Tensor | TextSource | str,
    config: CompressionConfig | None,
    settings: dict[str, Any],
    folder: str | Path | None = None,
    executor: str | Executor = "local",
) -> Run:
    """Check a run, then read its text.

    Parameters
    ----------
    decoder : Decoder
        View of the model.
    tokens, config, settings, folder, executor
        As in `compress`.

    Raises
    ------
    ManifoldKVError
        As `compress`, before any long work.
    """
    config = replace(config or CompressionConfig(), **settings)
    executor = executor_named(executor)
    check(decoder, tokens, config)
    name, ids = calibration_tokens(decoder.model, tokens, config.sequences, config.length)
    return Run(decoder, config, name, ids, folder, executor)


@in_own_modes
def check(
    model: PreTrainedModel | Decoder, text: Tensor | TextSource | str, config: CompressionConfig
) -> None:
    """Raise the errors that `compress` raises before it reads a text.

    Parameters
    ----------
    model : PreTrainedModel or Decoder
        As in `compress`, or a view of it.
    text : Tensor, TextSource or str
        Calibration data. Nothing of a text is read; a name need not be that of a text source.
    config : CompressionConfig
        What plan to make.

    Raises
    ------
    ManifoldKVError
        As `compress`.
    """
    decoder = model if isinstance(model, Decoder) else Decoder.of(model)
    check_run(decoder, config)
    length = calibration_length(decoder.model, text, config.length)
    recipe = config.complete_recipe()
    recipe.check(decoder.description(), config, config.context or length)
    sequences = len(text) if isinstance(text, Tensor) else config.sequences or SEQUENCES
    if config.nats is not None and sequences < HELD_OUT:
        raise ArgumentError(
            f"nats must have {HELD_OUT} or more calibration sequences, got {sequences}: the loss "
            "is measured on an eighth of them"
        )


def _smallest(run: Run, recipe: Recipe, statistics: Statistics) -> CompressionPlan:
    """Return the smallest plan whose measured loss is within the limit of a run."""
    nats = run.config.nats
    assert nats is not None

    def plan_at(ratio: float) -> CompressionPlan:
        plan = recipe.fit(statistics, replace(run.config, ratio=ratio))
        return measured(run.decoder, plan, run.held_out)

    return smallest_plan(plan_at, nats, recipe.least_ratio(statistics.model, run.context))


@in_own_modes
def ratio_from_bytes(
    model: PreTrainedModel,
    nbytes: float,
    *,
    context: int,
    recipe: Recipe | str = DEFAULT_RECIPE,
) -> float:
    """Return the ratio at which the cache of one sequence takes at most some bytes.

    Give `compress` the same context and recipe: ``compress(model, text, context=n, recipe=name,
    ratio=ratio_from_bytes(model, 2**30, context=n, recipe=name))``.

    Parameters
    ----------
    model : PreTrainedModel
        Its dtype is that of the cache.
    nbytes : float
        All layers together.
    context : int
        Tokens of the sequence.
    recipe : Recipe or str
        Whose ratio it is: that of a `BitRecipe` is one to a cache in 16 bits, in which the first
        tokens are counted too, in any dtype of the model. That of a
        `StoredRecipe` is also one to a cache in 16 bits, to which all that is stored is compared.

    Raises
    ------
    ArgumentError
        If there is no recipe of the name.
        If there is no token or no byte, or the first tokens take all of them.
    ModelError
        If the attention of the model cannot be handled.
    """
    recipe = recipe_named(recipe)
    decoder = Decoder.of(model)
    windows = decoder.windows
    elements, itemsize = 2 * decoder.features, decoder.dtype.itemsize
    open_layers = sum(window is None for window in windows)
    beyond = recipe.bytes_beyond_ratio(open_layers * elements, itemsize, context)
    if recipe.in_sixteen_bits:
        itemsize = 2
    if context < 1 or not nbytes > beyond:
        raise ArgumentError(f"{nbytes:g} bytes for {context} tokens leave room for nothing")
    tokens = sum(cached_tokens(context, window) for window in windows)
    return min(1.0, (nbytes - beyond) / (tokens * elements * itemsize))
