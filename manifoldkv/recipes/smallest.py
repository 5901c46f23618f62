"""The smallest plan whose measured loss stays below a limit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from math import log

import torch
from torch import Tensor

from manifoldkv.core.errors import ArgumentError
from manifoldkv.core.progress import follow
from manifoldkv.models.decoder import Decoder
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.predictor import PredictorContext
from manifoldkv.statistics.projected import divergence, log_probabilities, reconstructed

LOG = logging.getLogger(__name__)

FIRST_RATIO, SMALLEST_RATIO, LARGEST_RATIO = 1 / 8, 1 / 64, 0.75
SLOPE = -25.0
"""Change of the logarithm of the loss with the ratio: four bits of every latent are a quarter of a
cache in 16 bits, and every bit divides the loss by about four."""
TRIES = 5
CLOSE = 0.85
"""Share of the limit that a loss must reach for a plan to be the smallest."""


def smallest_plan(
    plan_at: Callable[[float], CompressionPlan], nats: float, least: float = 0.0
) -> CompressionPlan:
    """Return the plan of the smallest ratio among those tried whose loss is below a limit.

    The logarithm of the loss is nearly linear in the ratio: the next ratio is where a line through
    the last two, or of slope `SLOPE`, reaches the limit.

    Parameters
    ----------
    plan_at : callable
        Function of a ratio that returns a plan with a measured loss.
    nats : float
        Limit of the measured loss, per token.
    least : float
        Ratio of the smallest possible plan.

    Raises
    ------
    ArgumentError
        If no plan stays below.
    """
    tried: dict[float, float] = {}
    best: CompressionPlan | None = None
    smallest = max(least, SMALLEST_RATIO)
    ratio = max(smallest, FIRST_RATIO)
    while ratio not in tried and len(tried) < TRIES:
        plan = plan_at(ratio)
        loss = plan.provenance.measured_nats
        assert loss is not None
        LOG.info("ratio %.4f loses %.4f nats per token", ratio, loss)
        tried[ratio] = max(loss, 1e-9)
        if loss <= nats and (best is None or plan.ratio < best.ratio):
            best = plan
        if CLOSE * nats <= loss <= nats:
            break
        ratio = min(max(_next_ratio(tried, nats), smallest), LARGEST_RATIO)
    if best is None:
        raise ArgumentError(
            f"nats must be >= {min(tried.values()):.3g} for this model and text, got {nats:g}: the "
            f"largest cache tried, of ratio {max(tried):.3g}, loses that much"
        )
    return best


def _next_ratio(tried: dict[float, float], nats: float) -> float:
    """Return the ratio where the loss is expected to be a little below the limit."""
    aim = log(nats * (1 + CLOSE) / 2)
    by_distance = sorted(tried, key=lambda ratio: abs(log(tried[ratio]) - aim))
    nearest, slope = by_distance[0], SLOPE
    if len(by_distance) > 1:
        other = by_distance[1]
        measured = (log(tried[nearest]) - log(tried[other])) / (nearest - other)
        slope = min(measured, SLOPE / 5)  # noise must not turn the line
    return nearest + (aim - log(tried[nearest])) / slope


@torch.no_grad()
def measured(decoder: Decoder, plan: CompressionPlan, tokens: Tensor) -> CompressionPlan:
    """Return the plan with its measured divergence in its provenance.

    Keys and values of the whole model are reconstructed as the cache reads them.

    Parameters
    ----------
    decoder : Decoder
        View of the model.
    plan : CompressionPlan
        Plan of coded latents.
    tokens : Tensor
        Token ids of held-out sequences, (S, n), int64.
    """
    losses = []
    for text in follow(tokens.split(1), len(tokens), "measuring the loss"):
        text = text.to(decoder.device)
        exact = log_probabilities(decoder.model, text)
        context = plan.predictor_context()

        def reconstruct(
            index: int, keys: Tensor, values: Tensor, context: PredictorContext = context
        ) -> tuple[Tensor, Tensor]:
            context.begin(index)
            both = []
            for (_, planned), x in zip(plan.layers[index].sites, (keys, values), strict=True):
                rows = x.transpose(1, 2).flatten(2).flatten(0, 1)  # (n, D)
                flat = planned.reconstruct(rows.cpu().float(), context)
                context.add(flat)
                by_head = planned.grouping.merge(flat.unflatten(0, (1, 1, -1)))
                both.append(by_head.to(x))
            return both[0], both[1]

        layers = range(len(plan.layers))
        with reconstructed(decoder.model, reconstruct, layers=layers, sinks=plan.sinks):
            losses.append(float(divergence(exact, log_probabilities(decoder.model, text))))
    sample = torch.tensor(losses, dtype=torch.float64)
    error = float(sample.std()) / len(losses) ** 0.5 if len(losses) > 1 else None
    provenance = replace(plan.provenance, measured_nats=float(sample.mean()), measured_error=error)
    return replace(plan, provenance=provenance)
