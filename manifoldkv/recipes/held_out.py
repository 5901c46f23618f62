"""Predicted loss of a plan on text that it was not fitted to."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor

from manifoldkv.activations.capture import capture
from manifoldkv.activations.moments import SiteMoments
from manifoldkv.coding.predictor import PredictorContext
from manifoldkv.coding.transform import by_token
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.projected import divergence, log_probabilities, reconstructed
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.recipes.coded_run import CodedRun
from manifoldkv.runs.progress import follow

LOG = logging.getLogger(__name__)


def with_predicted_loss(decoder: Decoder, plan: CompressionPlan, run: CodedRun) -> CompressionPlan:
    """Return the plan with its predicted loss in its provenance.

    Errors in keys and values are those of held-out sequences, and their cost is read from the
    Fisher information of the same sequences: the plan was fitted to neither.
    """
    tokens = run.held_out
    if not len(tokens):
        LOG.info("fewer than 8 calibration sequences: none is held out to predict the loss on")
        return plan
    LOG.info("predicting the loss on %d held-out sequences", len(tokens))
    moments = run.moments(decoder, tokens, None)
    nats = 0.0
    context = plan.predictor_context()
    for activations in follow(capture(decoder.model, tokens), len(plan.layers)):
        index = activations.layer
        context.begin(index)
        of_layer = {"key": moments[index].key, "value": moments[index].value}
        exact = {"key": activations.keys_in("pre"), "value": activations.values_of()}
        for site, planned in plan.layers[index].sites:
            x = by_token(exact[site][:, :, run.first : run.prompt])
            reconstruction = planned.reconstruct(x, context)
            context.add(reconstruction)
            nats += _cost(x - reconstruction, of_layer[site])
    if run.prompt is not None:
        # The errors of a prompt cost the tokens after it.
        nats *= (run.prompt - run.first) / (tokens.shape[1] - run.prompt)
    provenance = replace(plan.provenance, predicted_nats=nats, predicted_tokens=tokens.numel())
    return replace(plan, provenance=provenance)


@torch.no_grad()
def with_measured_loss(decoder: Decoder, plan: CompressionPlan, run: CodedRun) -> CompressionPlan:
    """Return the plan with the measured divergence on held-out sequences in its provenance.

    Keys and values of the whole model are reconstructed as the cache reads them.
    """
    losses = []
    for tokens in follow(run.held_out.split(1), len(run.held_out), "measuring the loss"):
        tokens = tokens.to(decoder.device)
        exact = log_probabilities(decoder.model, tokens)
        context = plan.predictor_context()

        def reconstruct(
            index: int, keys: Tensor, values: Tensor, context: PredictorContext = context
        ) -> tuple[Tensor, Tensor]:
            context.begin(index)
            both = []
            for (_, planned), x in zip(plan.layers[index].sites, (keys, values), strict=True):
                flat = planned.reconstruct(by_token(x).float(), context)
                context.add(flat)
                by_head = planned.grouping.merge(flat.unflatten(0, (1, 1, -1)))
                both.append(by_head.to(x))
            return both[0], both[1]

        layers = range(len(plan.layers))
        with reconstructed(decoder.model, reconstruct, layers=layers, sinks=plan.sinks):
            losses.append(float(divergence(exact, log_probabilities(decoder.model, tokens))))
    sample = torch.tensor(losses, dtype=torch.float64)
    error = float(sample.std()) / len(losses) ** 0.5 if len(losses) > 1 else None
    measured = replace(plan.provenance, measured_nats=float(sample.mean()), measured_error=error)
    return replace(plan, provenance=measured)


def _cost(errors: Tensor, moments: SiteMoments) -> float:
    """Return what errors (tokens, D) cost per token, in nats to second order."""
    errors = errors.double()
    return float((errors.mT @ errors * moments.fisher).sum()) / len(errors) / 2
