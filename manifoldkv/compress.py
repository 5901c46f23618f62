"""The road in one call: text, activations, bases, plan."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from manifoldkv.activations import Rotary
from manifoldkv.bases import Find, find_bases, versions
from manifoldkv.calibration import TextSource, calibration_tokens
from manifoldkv.errors import RankError
from manifoldkv.executors import Executor, executor_named, on_threads
from manifoldkv.models import attention_of, check_supported, decoder_layers
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
from manifoldkv.rank_selection import (
    Ranks,
    budget_from_ratio,
    candidate_ranks,
    check_budget,
    optimal,
)
from manifoldkv.recipes import RankRule, Recipe, recipe_named
from manifoldkv.solvers.base import check_seed
from manifoldkv.steps import Kept, digest_of_model, digest_of_tokens
from manifoldkv.surfaces import LayerBases, divergences, sequential_ranks, threshold_ranks
from manifoldkv.tuning import tune

LOG = logging.getLogger(__name__)

RATIO_TOLERANCE = 1e-9


def compress(
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    *,
    ratio: float = 0.5,
    recipe: str | Recipe = "eigen-attention",
    ranks: RankRule | None = None,
    rotary: Rotary = "pre",
    quantization: Quantization | None = None,
    seed: int = 0,
    sequences: int | None = None,
    length: int | None = None,
    folder: str | Path | None = None,
    executor: str | Executor = "local",
) -> CompressionPlan:
    """Find bases for the cache of a model.

    Every phase is logged as it begins (logger ``manifoldkv``, level INFO).

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model with rotary embeddings. It is left as it was.
    tokens : Tensor, TextSource or str
        Calibration data: token ids (sequences, length) without padding; or a text, of which the
        calibration part is read with the tokenizer the model was saved with.
    ratio : float
        Largest share of the numbers of an uncompressed cache that may be stored, in (0, 1].
        The achieved one is `CompressionPlan.ratio`. `ratio_from_bytes` has it for a budget in
        bytes.
    recipe : str or Recipe
        How: a name out of `RECIPES`, or a composition of one's own.
    ranks : {"uniform", "sequential", "threshold", "optimal"}
        The recipe's own rule if omitted. ``"uniform"``: every layer gets the same ranks.
        ``"sequential"``: the paper's greedy rule on errors measured behind the compressed layers
        below. ``"threshold"``: EigenAttention's, the same share of the singular values and the same
        error for every layer. ``"optimal"``: the allocation over all layers at once with the
        smallest sum of `divergences` of the predictions. All but the first find bases for all
        candidate ranks first (`candidate_ranks`), eight times the work.
    rotary : {"pre", "post"}
        Whether keys are stored before rotation (better) or after it (faster).
    quantization : Quantization, optional
        Also round the latents to integers; see `quantize`.
    seed : int
        Of everything random.
    sequences, length : int, optional
        How much of a text is read: so many windows of so many tokens; 64 of 512, or of what the
        model can take, if omitted.
    folder : str or Path, optional
        Where every basis is kept as soon as it is found, then what ranks cost, and the state of
        the tuning every few steps. A run that was interrupted, by whatever, goes on there when it
        is started again, and ends in the same plan; other settings in the same folder share what
        they have in common. One run at a time.
    executor : {"local", "ray"} or Executor
        Where bases are found, and what their ranks cost under the threshold and the optimal rule;
        the plan is the same. The sequential rule, tuning and rounding run in this process.

    Raises
    ------
    UnsupportedModelError
        If the attention of the model cannot be handled.
    RankError
        If the ratio is too small for the ranks to choose from (or for the rule, if that is
        ``"threshold"``), or above 1.
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
    executor = executor_named(executor)
    settled = settle(
        model,
        tokens,
        ratio=ratio,
        recipe=recipe,
        ranks=ranks,
        rotary=rotary,
        quantization=quantization,
        seed=seed,
        sequences=sequences,
        length=length,
    )
    recipe, tokens = settled.recipe, settled.tokens
    threads = torch.get_num_threads()
    alone = nullcontext() if folder is None else only_run(Path(folder))
    with alone, on_threads(threads):  # all of it, also what is no task
        kept = _kept(folder, model, tokens, threads)
        table = find_bases(model, tokens, settled.find, settled.ranks, executor, threads, kept)
        chosen = _chosen_ranks(model, settled, table, executor, kept)
        layers = [
            LayerPlan(bases.keys[key], bases.values[value], window)
            for bases, (key, value), window in zip(table, chosen, settled.windows, strict=True)
        ]
        provenance = Provenance(
            model=model.config._name_or_path,
            text=settled.text,
            sequences=tokens.shape[0],
            length=tokens.shape[1],
            objective=recipe.objective,
            solver=recipe.solver,
            seed=seed,
            requested_ratio=ratio,
            threads=threads,
            versions=versions(),
        )
        digest, recent = config_hash(model.config), settled.recent
        plan = CompressionPlan(tuple(layers), rotary, digest, provenance, recent=recent)
        plan = tune(model, plan, tokens, steps=recipe.tuning_steps, seed=seed, kept=kept)
        return plan if quantization is None else quantize(plan, model, tokens, quantization)


@dataclass(frozen=True)
class Settled:
    """What is settled before the long work of a run; all that could refuse it has been asked.

    Parameters
    ----------
    recipe : Recipe
        With the rank rule of the run.
    find : Find
        How bases are found.
    rotary : {"pre", "post"}
        Where keys are projected.
    windows : list
        Sliding window of every layer, or None.
    head_dim : int
        Of every head.
    text : str
        Name of the calibration text.
    tokens : Tensor
        Token ids, (sequences, length).
    recent : int
        Newest tokens that stay exact.
    budget : int
        For the ranks of all layers, as in `rank_selection`.
    ranks : tuple of list of int
        Key ranks and value ranks that bases are found at.
    """

    recipe: Recipe
    find: Find
    rotary: Rotary
    windows: list[int | None]
    head_dim: int
    text: str
    tokens: Tensor
    recent: int
    budget: int
    ranks: tuple[list[int], list[int]]


def settle(
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    *,
    ratio: float,
    recipe: str | Recipe,
    ranks: RankRule | None,
    rotary: Rotary,
    quantization: Quantization | None,
    seed: int,
    sequences: int | None,
    length: int | None,
) -> Settled:
    """Read the text and ask whether a run of `compress` is possible; parameters and errors are its.

    Nothing here takes long.
    """
    check_supported(model)
    check_seed(seed)
    recipe = recipe_named(recipe)
    recipe = recipe if ranks is None else replace(recipe, ranks=ranks)
    windows = sliding_windows(model.config)
    for index, window in enumerate(windows):
        check_layout(quantization, index, window, recent=recipe.recent_share > 0)
    find = Find(recipe, rotary, seed)
    head_dim = int(attention_of(decoder_layers(model)[0]).head_dim)
    budget_from_ratio(ratio, len(windows), head_dim)  # refuses what is no ratio
    text, tokens = calibration_tokens(model, tokens, sequences, length)
    recent, ratio_of_latents = recent_tokens(recipe, ratio, tokens.shape[1], windows)
    budget = budget_from_ratio(ratio_of_latents, len(windows), head_dim)
    if recipe.ranks == "uniform":
        key, value = uniform_ranks(ratio_of_latents, head_dim)
        of_both = [key], [value]
    else:
        candidates = list(candidate_ranks(head_dim))
        check_budget(budget, [2 * candidates[0]] * len(windows), head_dim)
        of_both = candidates, candidates
    return Settled(recipe, find, rotary, windows, head_dim, text, tokens, recent, budget, of_both)


def _kept(folder: str | Path | None, model: PreTrainedModel, tokens: Tensor, threads: int) -> Kept:
    """What is known of all that depends on these."""
    if folder is None:
        return Kept()
    settings = {
        "model": digest_of_model(model),
        "tokens": digest_of_tokens(tokens),
        "threads": threads,
        "versions": versions(),
    }
    return Kept(Path(folder), settings)


def _chosen_ranks(
    model: PreTrainedModel,
    settled: Settled,
    table: Sequence[LayerBases],
    executor: Executor,
    kept: Kept,
) -> list[Ranks]:
    """Of all layers, by the rule of the recipe."""
    rule, tokens, rotary = settled.recipe.ranks, settled.tokens, settled.rotary
    budget, find = settled.budget, settled.find
    if rule == "uniform":
        key_ranks, value_ranks = settled.ranks
        return [(key_ranks[0], value_ranks[0])] * len(settled.windows)
    LOG.info("choosing ranks by the %s rule", rule)
    kept = kept.under(**find.settings, groupings=find.groupings, ranks=settled.ranks)
    if rule == "sequential":
        return sequential_ranks(model, tokens, table, budget, rotary=rotary, kept=kept)[0]
    if rule == "threshold":
        return threshold_ranks(
            model, tokens, table, budget, rotary=rotary, executor=executor, kept=kept
        )
    recent = settled.recent
    costs = divergences(
        model, tokens, table, rotary=rotary, recent=recent, executor=executor, kept=kept
    )
    return optimal(costs, budget, settled.head_dim)


def ratio_from_bytes(model: PreTrainedModel, nbytes: float, *, tokens: int = 1) -> float:
    """The ratio at which the latents of `tokens` tokens of one sequence take at most `nbytes`.

    Parameters
    ----------
    model : PreTrainedModel
        Its dtype is that of the latents.
    nbytes : float
        All layers together.
    tokens : int
        Context length; 1 for a budget per token.

    Raises
    ------
    UnsupportedModelError
        If the attention of the model cannot be handled.
    RankError
        If there is no token or no byte.
    """
    check_supported(model)
    if tokens < 1 or not nbytes > 0:
        raise RankError(f"{nbytes:g} bytes for {tokens} tokens leave room for nothing")
    layers = decoder_layers(model)
    kv_heads = model.config.get_text_config().num_key_value_heads
    numbers = 2 * len(layers) * kv_heads * attention_of(layers[0]).head_dim
    return min(1.0, nbytes / (tokens * numbers * model.dtype.itemsize))


def uniform_ranks(ratio: float, head_dim: int) -> tuple[int, int]:
    """Key and value rank of every layer, together at most ``ratio * 2 * head_dim``.

    They are equal, or the value rank is one larger: values lose more by compression.

    Raises
    ------
    RankError
        If that leaves nothing for keys, or the ratio is above 1.
    """
    if not 1 / head_dim <= ratio <= 1:
        raise RankError(f"ratio {ratio:g} is not between {1 / head_dim:g} (rank 1) and 1")
    total = int(ratio * 2 * head_dim + RATIO_TOLERANCE)
    return total // 2, total - total // 2


def sliding_windows(config: PretrainedConfig) -> list[int | None]:
    """The sliding window of every layer, in tokens."""
    _, keywords = get_layer_types_and_kwargs(config.get_text_config())
    return [layer.get("sliding_window") for layer in keywords]


def recent_tokens(
    recipe: Recipe, ratio: float, length: int, windows: Sequence[int | None]
) -> tuple[int, float]:
    """How many of the newest tokens stay exact, and the ratio that leaves for all others.

    Reckoned for a text as long as the calibration sequences, or as the shortest window.
    """
    held = min([length, *(window - 1 for window in windows if window is not None)])
    recent = int(recipe.recent_share * ratio * held)
    return recent, (ratio - recent / held) / (1 - recent / held)
