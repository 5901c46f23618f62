"""The pipeline in one call: text, activations, bases, plan."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.errors import ArgumentError
from manifoldkv.models.support import (
    attention_of,
    cached_tokens,
    check_supported,
    decoder_layers,
    sliding_windows,
    unwrapped,
)
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.ranks import LayerBases, RankProblem, Ranks
from manifoldkv.recipes.bits import check_bits, prepare_bits, solve_bits
from manifoldkv.recipes.commuting import check_commuting, prepare_commuting, solve_commuting
from manifoldkv.recipes.config import CompressionConfig
from manifoldkv.recipes.prepared import PreparedRanks, check_ranks, context_of, prepare_ranks
from manifoldkv.recipes.recipe import (
    DEFAULT_RECIPE,
    AnyRecipe,
    BitRecipe,
    CommutingRecipe,
    StoredRecipe,
    recipe_named,
)
from manifoldkv.recipes.rounding import quantize
from manifoldkv.recipes.solve import BasisFinder, find_bases
from manifoldkv.recipes.stored import check_stored, prepare_stored, solve_stored
from manifoldkv.recipes.tune import tune
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_model, digest_of_tokens
from manifoldkv.runs.executors import Executor, executor_named, on_threads
from manifoldkv.runs.files import only_run
from manifoldkv.runs.source import versions
from manifoldkv.text.sources import TextSource

LOG = logging.getLogger(__name__)


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
        Where every basis is stored as soon as it is found, then rank sensitivities, and the state
        of the tuning every few steps. A run that was interrupted, by whatever, goes on there when
        it is started again, and ends in the same plan; other settings in the same folder share
        what they have in common. Nothing is taken from there that other code has made. One run at
        a time.
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
        If a weight of the model is not finite, or what a layer computes is not.
    ArgumentError
        If the ratio is above 1, or too small for the ranks to choose from; if a rank rule is
        given to a recipe other than a `Recipe`, or packs of latents do not fit the features of a
        layer.
        If a recipe, objective or solver does not exist, or the two do not go together.
        If the seed is not an integer of 64 bits.
        If the tokens are not a (sequences, length) tensor of the model's ids, the text is too
        short, or the sequences are longer than the model takes.
    PlanError
        If the layout of the quantisation does not fit the model, there is no plan for a context
        of so many tokens, or a `StoredRecipe` is asked for a model with sliding windows.
    RunError
        If Ray is not installed or reached, or a task is lost for good.
        If another run is at work in the folder, it cannot be written to, or a file in it is
        damaged (which is named, and computed again once it is deleted).
    """
    config = replace(config or CompressionConfig(), **settings)
    model = unwrapped(model)
    executor = executor_named(executor)
    recipe = config.complete_recipe()
    if isinstance(recipe, StoredRecipe):
        return solve_stored(model, prepare_stored(model, tokens, config, recipe), folder)
    if isinstance(recipe, BitRecipe):
        return solve_bits(model, prepare_bits(model, tokens, config, recipe), folder)
    if isinstance(recipe, CommutingRecipe):
        commuting = prepare_commuting(model, tokens, config, recipe)
        plan = solve_commuting(model, commuting, folder)
        return _finished(model, plan, commuting.tokens, config, recipe.tuning_steps, folder)
    run = prepare_ranks(model, tokens, config, recipe)
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
        plan = _plan(model, run, bases, ranks)
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
    model, recipe = unwrapped(model), config.complete_recipe()
    if isinstance(recipe, StoredRecipe):
        check_stored(model, text, config, recipe)
    elif isinstance(recipe, BitRecipe):
        check_bits(model, text, config, recipe)
    elif isinstance(recipe, CommutingRecipe):
        check_commuting(model, config, recipe)
        context_of(model, text, config)
    else:
        check_ranks(model, text, config, recipe)


def _finished(
    model: PreTrainedModel,
    plan: CompressionPlan,
    tokens: Tensor,
    config: CompressionConfig,
    steps: int,
    folder: str | Path | None,
) -> CompressionPlan:
    """Return a plan tuned, and rounded if that is asked for."""
    threads = torch.get_num_threads()
    alone = nullcontext() if folder is None else only_run(Path(folder))
    with alone, on_threads(threads):
        checkpoints = _checkpoints(folder, model, tokens, threads)
        plan = tune(model, plan, tokens, steps=steps, seed=config.seed, checkpoints=checkpoints)
        if config.quantization is None:
            return plan
        return quantize(plan, model, tokens, config.quantization)


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


def _rank_checkpoints(checkpoints: Checkpoints, run: PreparedRanks) -> Checkpoints:
    """Return the checkpoints of rank sensitivities, which depend on all bases."""
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


def _choose_ranks(run: PreparedRanks, problem: RankProblem) -> list[Ranks]:
    """Return the ranks of all layers by the rule of the recipe, which must meet the budget."""
    name = run.recipe.describe()["ranks"]["name"]
    LOG.info("choosing ranks by the %s rule", name)
    ranks = run.recipe.ranks.choose(problem)
    if run.budget.cost(ranks) > run.budget.latent_elements:
        raise ArgumentError(f"rank rule {name} exceeds the ratio {run.budget.ratio:g}")
    return ranks


def _plan(
    model: PreTrainedModel, run: PreparedRanks, bases: list[LayerBases], ranks: list[Ranks]
) -> CompressionPlan:
    layers = [
        LayerPlan(of_layer.keys[key], of_layer.values[value], window)
        for of_layer, (key, value), window in zip(bases, ranks, run.budget.windows, strict=True)
    ]
    return run.plan(model, layers)


def ratio_from_bytes(
    model: PreTrainedModel,
    nbytes: float,
    *,
    context: int,
    recipe: AnyRecipe | str = DEFAULT_RECIPE,
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
    recipe : Recipe, BitRecipe, CommutingRecipe, StoredRecipe or str
        Whose ratio it is: that of a `BitRecipe` is one to a cache in 16 bits, in which the first
        tokens are counted too, whatever they take in the dtype of the model. That of a
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
    check_supported(model)
    windows = sliding_windows(model.config)
    kv_heads = model.config.get_text_config().num_key_value_heads
    head_dim = int(attention_of(decoder_layers(model)[0]).head_dim)
    elements, itemsize, beyond = 2 * kv_heads * head_dim, model.dtype.itemsize, 0
    if isinstance(recipe, BitRecipe):
        sinks = min(recipe.sinks, context) * sum(window is None for window in windows)
        beyond = sinks * elements * (itemsize - 2)
    if isinstance(recipe, BitRecipe | StoredRecipe):
        itemsize = 2
    if context < 1 or not nbytes > beyond:
        raise ArgumentError(f"{nbytes:g} bytes for {context} tokens leave room for nothing")
    tokens = sum(cached_tokens(context, window) for window in windows)
    return min(1.0, (nbytes - beyond) / (tokens * elements * itemsize))
