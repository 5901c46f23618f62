"""What the errors of a plan are expected to cost on text that nothing of it was fitted to."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.activations.capture import capture
from manifoldkv.activations.moments import SiteMoments
from manifoldkv.basis import Basis
from manifoldkv.coding.entropy import EntropyCoding
from manifoldkv.coding.mixed import Coding, reconstructed
from manifoldkv.coding.predictor import Below
from manifoldkv.coding.transform import by_token
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.recipes.coded import CodedRun
from manifoldkv.runs.progress import follow

LOG = logging.getLogger(__name__)


def with_predicted_loss(
    model: PreTrainedModel, plan: CompressionPlan, run: CodedRun
) -> CompressionPlan:
    """Return the plan with its predicted loss in its provenance.

    Errors in keys and values are those of held-out sequences, and what they cost is read from the
    Fisher information of the same sequences: the plan was fitted to neither.
    """
    tokens = run.held_out
    if not len(tokens):
        LOG.info("fewer than 8 calibration sequences: none is held out to predict the loss on")
        return plan
    LOG.info("predicting the loss on %d held-out sequences", len(tokens))
    moments = run.moments(model, tokens, None)
    nats = 0.0
    below = Below(run.below)  # of tensors (tokens, D)
    for activations in follow(capture(model, tokens), len(plan.layers)):
        index = activations.layer
        if not plan.layers_below(index):
            below.forget()
        layer, of_layer = plan.layers[index], moments[index]
        keys, values = activations.keys_in("pre"), activations.values_of()
        both = (
            (layer.key, layer.key_coding, keys, of_layer.key),
            (
                layer.value,
                layer.value_coding,
                values,
                of_layer.value,
            ),
        )
        for basis, coding, x, of_site in both:
            x = by_token(x[:, :, run.first : run.prompt])
            found = _reconstructed(basis, coding, x, below.given)
            below.add(found)
            nats += _cost(x - found, of_site)
    if run.prompt is not None:
        # The errors of a prompt cost the tokens after it.
        nats *= (run.prompt - run.first) / (tokens.shape[1] - run.prompt)
    provenance = replace(plan.provenance, predicted_nats=nats, predicted_tokens=tokens.numel())
    return replace(plan, provenance=provenance)


def _reconstructed(
    basis: Basis, coding: Coding | EntropyCoding | None, x: Tensor, below: Sequence[Tensor]
) -> Tensor:
    """Return keys or values (tokens, D) as their codes give them back."""
    assert coding is not None  # of a recipe that codes every site
    inputs = None
    if coding.prediction is not None:
        inputs = torch.cat([*below], dim=1)[:, : len(coding.prediction)]
    if isinstance(coding, Coding):
        return reconstructed(basis, coding, x, inputs)
    expected = coding.mean.to(x)
    if inputs is not None and coding.prediction is not None:
        expected = expected + inputs @ coding.prediction.to(x)
    symbols = ((x - expected) @ basis.down[0].to(x)).round()
    return expected + symbols * coding.gain.to(x) @ basis.up[0].mT.to(x)


def _cost(errors: Tensor, moments: SiteMoments) -> float:
    """Return what errors (tokens, D) cost per token, in nats to second order."""
    errors = errors.double()
    return float((errors.mT @ errors * moments.fisher).sum()) / len(errors) / 2
