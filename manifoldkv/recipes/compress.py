"""The pipeline in one call: text, activations, bases, plan."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.errors import ArgumentError
from manifoldkv.models.decoder import Decoder
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.recipes.config import CompressionConfig
from manifoldkv.recipes.named import DEFAULT_RECIPE, recipe_named
from manifoldkv.recipes.recipe import Recipe
from manifoldkv.recipes.rounding import quantize
from manifoldkv.recipes.run import Run
from manifoldkv.recipes.tune import tune
from manifoldkv.runs.executors import Executor, executor_named, on_threads
from manifoldkv.runs.files import only_run
from manifoldkv.text.sources import TextSource
from manifoldkv.text.tokens import calibration_tokens
from manifoldkv.windows import cached_tokens


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
        Folder of checkpoints: every basis once solved, rank sensitivities, and the state of tuning
        every few steps. An interrupted run resumes from it with the same plan; runs with other
        settings share common results, and results of other code are ignored. One run at a time.
    executor : {"local", "ray"} or Executor
        Where bases are found, and rank sensitivities under the threshold and the optimal rule; the
        plan is the same. The sequential rule, tuning, rounding and all of a `BitRecipe` or a
        `StoredRecipe` run in this process.
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
        If `work` is less than the cheapest plan takes, or no plan loses as little as `nats`; if
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
    executor = executor_named(executor)
    run = started(decoder, tokens, replace(config or CompressionConfig(), **settings))
    plan = run.recipe.fit(decoder, run, folder, executor)
    steps, quantization = run.recipe.tuning_steps, run.config.quantization
    alone = nullcontext() if folder is None else only_run(Path(folder))
    with alone, on_threads(torch.get_num_threads()):
        if steps:
            checkpoints, seed = run.checkpoints(decoder, folder), run.config.seed
            plan = tune(model, plan, run.tokens, steps=steps, seed=seed, checkpoints=checkpoints)
        if quantization is not None:
            plan = quantize(plan, model, run.tokens, quantization)
    return plan


def frontier(
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    config: CompressionConfig | None = None,
    **settings: Any,
) -> dict[str, float]:
    """Return the loss of plans at a ratio by limit of work, in nats per token.

    Limits are the keys: ``"2"``, ``"4"``, ``"8"``, ``"16"`` and ``"unlimited"``, without those that
    no plan meets. Losses are those of a rate-distortion calculation with Gaussian latents on four
    sequences of at most 256 tokens, which measured ones exceed. The dictionary is empty if the
    recipe is not a `BitRecipe`. Parameters are those of `compress`.

    Raises
    ------
    ManifoldKVError
        As `compress`, before any long work.
    """
    decoder = Decoder.of(model)
    run = started(decoder, tokens, replace(config or CompressionConfig(), **settings))
    return run.recipe.frontier(decoder, run)


def started(decoder: Decoder, tokens: Tensor | TextSource | str, config: CompressionConfig) -> Run:
    """Check a run, then read its text.

    Parameters
    ----------
    decoder : Decoder
        View of the model.
    tokens, config
        As in `compress`.

    Raises
    ------
    ManifoldKVError
        As `compress`, before any long work.
    """
    recipe = config.complete_recipe()
    recipe.check(decoder, tokens, config)
    name, ids = calibration_tokens(decoder.model, tokens, config.sequences, config.length)
    context = ids.shape[1] if config.context is None else config.context
    return Run(config, recipe, name, ids, context)


def check(model: PreTrainedModel, text: TextSource | str, config: CompressionConfig) -> None:
    """Raise the errors that `compress` raises before it reads a text.

    Parameters
    ----------
    model : PreTrainedModel
        As in `compress`.
    text : TextSource or str
        Calibration data. Nothing of it is read; a name need not be that of a text source.
    config : CompressionConfig
        What plan to make.

    Raises
    ------
    ManifoldKVError
        As `compress`.
    """
    config.complete_recipe().check(Decoder.of(model), text, config)


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
