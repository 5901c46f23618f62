"""What a run of `compress` will take, estimated from a small part of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.activations.capture import capture
from manifoldkv.activations.layer import LayerActivations
from manifoldkv.basis import HeadGrouping
from manifoldkv.coding.allocation import fit_quantizers
from manifoldkv.coding.tables import entropy_coding
from manifoldkv.coding.transform import SAMPLES
from manifoldkv.models.offloading import is_offloaded
from manifoldkv.models.projected import log_probabilities
from manifoldkv.models.support import decoder_layers, unwrapped
from manifoldkv.objectives import LayerOutput
from manifoldkv.ranks import Rehearsal
from manifoldkv.recipes.bits import PreparedBits, prepare_bits
from manifoldkv.recipes.commuting import PreparedCommuting, prepare_commuting
from manifoldkv.recipes.commuting_descent import SOLVER
from manifoldkv.recipes.config import CompressionConfig
from manifoldkv.recipes.prepared import PreparedRanks, prepare_ranks
from manifoldkv.recipes.recipe import BitRecipe, CommutingRecipe, StoredRecipe
from manifoldkv.recipes.solve import SITES
from manifoldkv.recipes.stored import PreparedStored, prepare_stored
from manifoldkv.recipes.tune import SEQUENCES_PER_STEP
from manifoldkv.solvers import ClosedForm
from manifoldkv.text.sources import TextSource

LOG = logging.getLogger(__name__)

T = TypeVar("T")

REHEARSED_SEQUENCES = 4
FORWARDS_OF_TUNING = 5
"""What tuning costs for each sequence of a step, in forward passes: the exact one, the compressed
one, and the compressed one again with its gradient."""

STEPS_TRIED = 24
"""Of quantisers that entropy coding is measured with, on twice as many samples as for bits."""

FORWARDS_OF_FISHER = 5
"""What Fisher moments cost for each sequence, in forward passes: one forwards and backwards, and
every layer again."""


@dataclass(frozen=True)
class Estimate:
    """Time and memory of a run, which are estimates, and the bytes of its cache.

    Parameters
    ----------
    seconds : dict
        Of the parts: ``"capture"``, ``"bases"``, ``"ranks"`` and ``"tuning"``.
    weight_bytes : int
        All weights; of an offloaded model those of one decoder layer and all that is not in one.
    activation_bytes : int
        Of one layer, with what an iterative solver stores of it at most; they go to files where
        they do not fit.
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


def estimate(
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    config: CompressionConfig | None = None,
    **settings: Any,
) -> Estimate:
    """Estimate a run of `compress`, whose parameters these are, on this machine.

    The first layer is captured on a few sequences, and a part of the work is done on it.

    Raises
    ------
    ManifoldKVError
        What `compress` would raise before any long work.
    """
    model = unwrapped(model)
    config = replace(config or CompressionConfig(), **settings)
    recipe = config.complete_recipe()
    if isinstance(recipe, BitRecipe | StoredRecipe):
        return _estimate_of_fisher(model, tokens, config, recipe)
    if isinstance(recipe, CommutingRecipe):
        return _estimate_of_commuting(model, tokens, config, recipe)
    run = prepare_ranks(model, tokens, config, recipe)
    layers = run.budget.layers
    rehearsed = _rehearse(model, run.tokens)
    activations, forward = rehearsed.activations, rehearsed.forward
    ranks = run.recipe.ranks.estimated_seconds(_rehearsal(activations, run, forward))
    stock = _stock_bytes(model, activations)
    return Estimate(
        {
            "capture": forward + layers * rehearsed.per_layer,
            "bases": _solving(activations, run),
            "ranks": ranks,
            "tuning": _tuning(run.recipe.tuning_steps, forward),
        },
        weight_bytes=_weight_bytes(model),
        activation_bytes=run.tokens.numel() * _bytes_per_token(activations, run),
        cache_bytes=run.budget.ratio * stock,
        stock_bytes=stock,
    )


def _estimate_of_fisher(
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    config: CompressionConfig,
    recipe: BitRecipe | StoredRecipe,
) -> Estimate:
    run: PreparedBits | PreparedStored
    if isinstance(recipe, BitRecipe):
        run = prepare_bits(model, tokens, config, recipe)
    else:
        run = prepare_stored(model, tokens, config, recipe)
    layers = len(decoder_layers(model))
    rehearsed = _rehearse(model, run.tokens)
    activations, forward = rehearsed.activations, rehearsed.forward
    latents = torch.randn(SAMPLES, activations.kv_heads * activations.head_dim)
    if isinstance(run, PreparedBits):
        fitting, _ = _timed(partial(fit_quantizers, latents, run.recipe.widths))
    else:
        once, _ = _timed(partial(entropy_coding, latents))
        fitting = STEPS_TRIED * once
    given_back = 0
    if run.recipe.below is not None:
        given_back = 2 * (run.recipe.below + 1) * latents.shape[1] * latents.itemsize
    stock = _stock_bytes(model, activations)
    inputs = activations.inputs.shape[-1] * activations.inputs.itemsize
    return Estimate(
        {
            "capture": run.rounds * (forward + layers * rehearsed.per_layer),
            "bases": FORWARDS_OF_FISHER * len(run.tokens) * forward,
            "ranks": run.rounds * 2 * layers * fitting,
            "tuning": 0.0,
        },
        weight_bytes=_weight_bytes(model),
        activation_bytes=run.tokens.numel() * ((layers + 2) * inputs + given_back),
        cache_bytes=config.ratio * stock,
        stock_bytes=stock,
    )


def _estimate_of_commuting(
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    config: CompressionConfig,
    recipe: CommutingRecipe,
) -> Estimate:
    run = prepare_commuting(model, tokens, config, recipe)
    layers = len(decoder_layers(model))
    rehearsed = _rehearse(model, run.tokens)
    activations, forward = rehearsed.activations, rehearsed.forward
    bases = 0.0
    if recipe.objective == "fisher":
        bases = FORWARDS_OF_FISHER * len(run.tokens) * forward
    elif recipe.objective == "layer-output":
        bases = layers * _descending(activations, run)
    stock = _stock_bytes(model, activations)
    inputs = activations.inputs.shape[-1] * activations.inputs.itemsize
    return Estimate(
        {
            "capture": forward + layers * rehearsed.per_layer,
            "bases": bases,
            "ranks": 0.0,
            "tuning": _tuning(recipe.tuning_steps, forward),
        },
        weight_bytes=_weight_bytes(model),
        activation_bytes=run.tokens.numel() * (layers + 2) * inputs,
        cache_bytes=config.ratio * stock,
        stock_bytes=stock,
    )


@dataclass(frozen=True)
class _Rehearsed:
    """The first layer on a few sequences, and the seconds of a sequence and of a layer."""

    activations: LayerActivations
    forward: float
    per_layer: float


def _rehearse(model: PreTrainedModel, tokens: Tensor) -> _Rehearsed:
    LOG.info("rehearsing on %d sequences", min(REHEARSED_SEQUENCES, len(tokens)))
    few = tokens[:REHEARSED_SEQUENCES].to(model.device)
    with torch.no_grad():
        log_probabilities(model, few[:1])  # the first call is slower than all others
        forward, _ = _timed(lambda: log_probabilities(model, few[:1]))
    captured = capture(model, few, [0])  # keeps the layer's weights loaded as long as it is there
    first, activations = _timed(lambda: next(captured))
    per_layer = max(0.0, first - forward) * len(tokens) / len(few)
    return _Rehearsed(activations, forward, per_layer)


def _tuning(steps: int, forward: float) -> float:
    """Return the seconds of tuning, given those of a sequence."""
    return steps * SEQUENCES_PER_STEP * FORWARDS_OF_TUNING * forward


def _stock_bytes(model: PreTrainedModel, activations: LayerActivations) -> int:
    per_layer = 2 * activations.kv_heads * activations.head_dim * model.dtype.itemsize
    return len(decoder_layers(model)) * per_layer


def _solving(activations: LayerActivations, run: PreparedRanks) -> float:
    """Return the seconds for the bases of all layers; activations are of a few sequences."""
    recipe, share = run.recipe, activations.sequences / len(run.tokens)
    solver, longer = recipe.solver.rehearsal(share)
    total = 0.0
    for site, ranks_of in zip(SITES, zip(*run.candidates, strict=True), strict=True):
        grouping = HeadGrouping(recipe.grouping(site), activations.kv_heads)
        problem = recipe.objective.problem(activations, site, grouping, run.config.rotary)
        solved = [r for ranks in ranks_of for r in ranks if r < run.budget.head_dim]
        if solved:  # full rank is the identity
            seconds, _ = _timed(partial(solver.solve, problem, sorted(solved)[len(solved) // 2]))
            total += len(solved) * longer * seconds
    return total


def _descending(activations: LayerActivations, run: PreparedCommuting) -> float:
    """Return the seconds of a layer whose commuting bases are moved, by steps of others."""
    solver, longer = SOLVER.rehearsal(activations.sequences / len(run.tokens))
    total = 0.0
    for site in SITES:
        problem = LayerOutput().problem(activations, site, run.grouping, "post")
        rank = min(run.latents // run.grouping.width, activations.head_dim)
        seconds, _ = _timed(partial(solver.solve, problem, rank))
        total += longer * seconds
    return total


def _rehearsal(activations: LayerActivations, run: PreparedRanks, forward: float) -> Rehearsal:
    candidates = max(len(ranks) for of_layer in run.candidates for ranks in of_layer)
    return Rehearsal(activations, forward, len(run.tokens), run.budget.layers, candidates)


def _bytes_per_token(activations: LayerActivations, run: PreparedRanks) -> int:
    """Return bytes of inputs and outputs, then of keys, values and mixtures of grouped values."""
    nbytes = 2 * activations.inputs.shape[-1] * activations.inputs.itemsize
    if not isinstance(run.recipe.solver, ClosedForm):
        width = HeadGrouping(run.recipe.value_grouping, activations.kv_heads).width
        heads = 2 * activations.kv_heads + width * activations.query_heads
        nbytes += heads * activations.head_dim * activations.dtype.itemsize
    return nbytes


def _weight_bytes(model: PreTrainedModel) -> int:
    def nbytes(module: torch.nn.Module) -> int:
        return sum(p.numel() * p.itemsize for p in module.parameters())

    layers = [nbytes(layer) for layer in decoder_layers(model)]
    return nbytes(model) - (sum(layers) - max(layers) if is_offloaded(model) else 0)


def _timed(run: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    found = run()
    return time.perf_counter() - start, found
