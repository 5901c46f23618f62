"""What a run of `compress` will take, foretold from a small part of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.activations import Batch, LayerActivations, Rotary, Site, capture
from manifoldkv.bases import Find
from manifoldkv.basis import HeadGrouping
from manifoldkv.calibration import TextSource, calibration_tokens
from manifoldkv.compress import recent_tokens, sliding_windows, uniform_ranks
from manifoldkv.models import attention_of, check_supported, decoder_layers
from manifoldkv.objectives import OBJECTIVES
from manifoldkv.offloading import is_offloaded
from manifoldkv.projection import log_probabilities
from manifoldkv.rank_selection import budget_from_ratio, candidate_ranks
from manifoldkv.recipes import RankRule, Recipe, recipe_named
from manifoldkv.solvers import SOLVERS
from manifoldkv.surfaces import DIVERGENCE_SEQUENCES, ROWS, SEQUENCES

T = TypeVar("T")

REHEARSED_SEQUENCES = 4
TUNED_SEQUENCES = 4
FORWARDS_OF_TUNING = 5
"""What tuning costs for each sequence of a step, in forward passes: the exact one, the compressed
one, and the compressed one again with its gradient."""
STORED_LAYERS = 2
"""Layers whose activations are there at once."""


@dataclass(frozen=True)
class Forecast:
    """Time and memory of a run, which are estimates, and the bytes of its cache.

    Parameters
    ----------
    seconds : dict
        Of the parts: ``"capture"``, ``"bases"``, ``"ranks"`` and ``"tuning"``.
    weight_bytes : int
        All weights; of an offloaded model those of one decoder layer and all that is not in one.
    activation_bytes : int
        Of two layers; they go to files where they do not fit.
    cache_bytes : float
        At most so many per token of a text as long as the calibration sequences, in the dtype of
        the model.
    stock_bytes : int
        Per token of the uncompressed cache.
    """

    seconds: dict[str, float]
    weight_bytes: int
    activation_bytes: int
    cache_bytes: float
    stock_bytes: int


def forecast(
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    *,
    ratio: float = 0.5,
    recipe: str | Recipe = "eigen-attention",
    ranks: RankRule | None = None,
    rotary: Rotary = "pre",
    sequences: int | None = None,
    length: int | None = None,
) -> Forecast:
    """Foretell a run of `compress`, whose parameters these are, on this machine.

    The first layer is captured on a few sequences, and a part of the work is done on it.

    Raises
    ------
    ManifoldKVError
        What `compress` would raise before any long work.
    """
    check_supported(model)
    recipe = recipe_named(recipe)
    recipe = recipe if ranks is None else replace(recipe, ranks=ranks)
    Find(recipe, rotary, seed=0)  # refuses what does not go together
    windows = sliding_windows(model.config)
    layers = len(windows)
    head_dim = int(attention_of(decoder_layers(model)[0]).head_dim)
    budget_from_ratio(ratio, layers, head_dim)
    _, tokens = calibration_tokens(model, tokens, sequences, length)
    _, of_latents = recent_tokens(recipe, ratio, tokens.shape[1], windows)
    few = tokens[:REHEARSED_SEQUENCES].to(model.device)
    with torch.no_grad():
        log_probabilities(model, few[:1])  # the first call is slower than all others
        forward, _ = _timed(lambda: log_probabilities(model, few[:1]))
    captured = capture(model, few, [0])  # keeps the layer's weights loaded as long as it is there
    first, activations = _timed(lambda: next(captured))
    per_layer = max(0.0, first - forward) * len(tokens) / len(few)
    known = activations
    stored = (known.inputs, known.outputs, known.queries, known.keys, known.values)
    per_token = sum(x.nbytes for x in stored) / few.numel()
    stock = 2 * layers * known.kv_heads * head_dim * model.dtype.itemsize
    rank, _ = uniform_ranks(of_latents, head_dim)
    seconds = {
        "capture": forward + layers * per_layer,
        "bases": layers * _solving(activations, recipe, rotary, rank, len(tokens)),
        "ranks": _choosing(activations, recipe, layers, forward, len(tokens)),
        "tuning": recipe.tuning_steps * TUNED_SEQUENCES * FORWARDS_OF_TUNING * forward,
    }
    return Forecast(
        seconds,
        weight_bytes=_weight_bytes(model),
        activation_bytes=round(STORED_LAYERS * tokens.numel() * per_token),
        cache_bytes=ratio * stock,
        stock_bytes=stock,
    )


def _solving(
    activations: LayerActivations, recipe: Recipe, rotary: Rotary, rank: int, sequences: int
) -> float:
    """Seconds for all bases of a layer on so many sequences; activations are of a few."""
    objective = OBJECTIVES.get(recipe.objective)()
    solver, longer = SOLVERS.get(recipe.solver)().rehearsal(activations.sequences / sequences)
    solved = 1 if recipe.ranks == "uniform" else len(candidate_ranks(activations.head_dim)) - 1
    total = 0.0
    groupings: dict[Site, str | int] = {
        "key": recipe.key_grouping,
        "value": recipe.value_grouping,
    }
    for site, width in groupings.items():
        grouping = HeadGrouping(width, activations.kv_heads)
        problem = objective.problem(activations, site, grouping, rotary)
        seconds, _ = _timed(partial(solver.solve, problem, rank))
        total += solved * longer * seconds
    return total


def _choosing(
    activations: LayerActivations, recipe: Recipe, layers: int, forward: float, sequences: int
) -> float:
    """Seconds for the rank rule."""
    candidates = len(candidate_ranks(activations.head_dim))
    if recipe.ranks == "uniform":
        return 0.0
    if recipe.ranks == "optimal":
        variants = 2 * layers * (candidates - 1)
        return min(DIVERGENCE_SEQUENCES, sequences) * forward * (1 + variants)
    grouping = HeadGrouping("shared", activations.kv_heads)
    problem = OBJECTIVES.get("layer-output")().problem(activations, "key", grouping)
    basis = problem.initial(activations.head_dim // 2)
    batch = Batch(torch.arange(1), torch.arange(min(ROWS, activations.length)))
    seconds, _ = _timed(lambda: problem.loss(basis, batch))
    return layers * min(SEQUENCES, sequences) * candidates**2 * seconds


def _weight_bytes(model: PreTrainedModel) -> int:
    def nbytes(module: torch.nn.Module) -> int:
        return sum(p.numel() * p.itemsize for p in module.parameters())

    layers = [nbytes(layer) for layer in decoder_layers(model)]
    return nbytes(model) - (sum(layers) - max(layers) if is_offloaded(model) else 0)


def _timed(run: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    found = run()
    return time.perf_counter() - start, found
