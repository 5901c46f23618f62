"""What a run of `compress` will take, foretold from a small part of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.activations import Batch, LayerActivations, Rotary, capture
from manifoldkv.basis import HeadGrouping
from manifoldkv.calibration import TextSource
from manifoldkv.compress import Settled, settle
from manifoldkv.models import decoder_layers
from manifoldkv.objectives import OBJECTIVES
from manifoldkv.offloading import is_offloaded
from manifoldkv.projection import log_probabilities
from manifoldkv.recipes import RankRule, Recipe
from manifoldkv.solvers import SOLVERS
from manifoldkv.surfaces import DIVERGENCE_SEQUENCES, ROWS, SEQUENCES
from manifoldkv.tuning import SEQUENCES_PER_STEP

LOG = logging.getLogger(__name__)

T = TypeVar("T")

REHEARSED_SEQUENCES = 4
FORWARDS_OF_TUNING = 5
"""What tuning costs for each sequence of a step, in forward passes: the exact one, the compressed
one, and the compressed one again with its gradient."""


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
        Of one layer, with what an iterative solver keeps of it at most; they go to files where
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
    settled = settle(
        model,
        tokens,
        ratio=ratio,
        recipe=recipe,
        ranks=ranks,
        rotary=rotary,
        quantization=None,
        seed=0,
        sequences=sequences,
        length=length,
    )
    tokens, layers, head_dim = settled.tokens, len(settled.windows), settled.head_dim
    LOG.info("rehearsing on %d sequences", min(REHEARSED_SEQUENCES, len(tokens)))
    few = tokens[:REHEARSED_SEQUENCES].to(model.device)
    with torch.no_grad():
        log_probabilities(model, few[:1])  # the first call is slower than all others
        forward, _ = _timed(lambda: log_probabilities(model, few[:1]))
    captured = capture(model, few, [0])  # keeps the layer's weights loaded as long as it is there
    first, activations = _timed(lambda: next(captured))
    per_layer = max(0.0, first - forward) * len(tokens) / len(few)
    stock = 2 * layers * activations.kv_heads * head_dim * model.dtype.itemsize
    seconds = {
        "capture": forward + layers * per_layer,
        "bases": layers * _solving(activations, settled),
        "ranks": _choosing(activations, settled, forward),
        "tuning": settled.recipe.tuning_steps * SEQUENCES_PER_STEP * FORWARDS_OF_TUNING * forward,
    }
    return Forecast(
        seconds,
        weight_bytes=_weight_bytes(model),
        activation_bytes=tokens.numel() * _bytes_per_token(activations, settled),
        cache_bytes=ratio * stock,
        stock_bytes=stock,
    )


def _solving(activations: LayerActivations, settled: Settled) -> float:
    """Seconds for all bases of a layer; activations are of a few sequences."""
    recipe, share = settled.recipe, activations.sequences / len(settled.tokens)
    objective = OBJECTIVES.get(recipe.objective)()
    solver, longer = SOLVERS.get(recipe.solver)().rehearsal(share)
    total = 0.0
    for (site, width), ranks in zip(settled.find.groupings.items(), settled.ranks, strict=True):
        grouping = HeadGrouping(width, activations.kv_heads)
        problem = objective.problem(activations, site, grouping, settled.rotary)
        solved = [rank for rank in ranks if rank < settled.head_dim]  # all numbers: nothing to do
        if solved:
            seconds, _ = _timed(partial(solver.solve, problem, solved[len(solved) // 2]))
            total += len(solved) * longer * seconds
    return total


def _bytes_per_token(activations: LayerActivations, settled: Settled) -> int:
    """Of inputs and outputs; then of keys, values, and what attention makes of grouped values."""
    nbytes = 2 * activations.inputs.shape[-1] * activations.inputs.itemsize
    if settled.recipe.solver != "closed-form":
        width = HeadGrouping(settled.recipe.value_grouping, activations.kv_heads).width
        heads = 2 * activations.kv_heads + width * activations.query_heads
        nbytes += heads * activations.head_dim * activations.dtype.itemsize
    return nbytes


def _choosing(activations: LayerActivations, settled: Settled, forward: float) -> float:
    """Seconds for the rank rule; a forward pass of a sequence takes `forward`."""
    candidates, layers = len(settled.ranks[0]), len(settled.windows)
    sequences = len(settled.tokens)
    if settled.recipe.ranks == "uniform":
        return 0.0
    if settled.recipe.ranks == "optimal":
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
