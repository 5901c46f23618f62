"""End-to-end tuning: all bases of a plan trained together on the divergence of the model."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from manifoldkv.errors import PlanError
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.head import differentiate_divergence, last_outputs
from manifoldkv.models.projected import projected
from manifoldkv.models.replacing import replace_attribute
from manifoldkv.models.support import decoder_layers
from manifoldkv.models.weights import differentiable
from manifoldkv.modes import in_own_modes
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.recipes.trainable import TrainableBases
from manifoldkv.runs.checkpoints import Checkpoints
from manifoldkv.runs.executors import on_threads
from manifoldkv.seeds import check_seed
from manifoldkv.solvers.driver import descend
from manifoldkv.solvers.riemannian_adam import riemannian_adam
from manifoldkv.solvers.samples import random_sequences
from manifoldkv.text.sources import TextSource
from manifoldkv.text.tokens import calibration_tokens

LOG = logging.getLogger(__name__)

SEQUENCES_PER_STEP = 4
LEARNING_RATE = 0.1


@in_own_modes
def tune(
    model: PreTrainedModel,
    plan: CompressionPlan,
    tokens: Tensor | TextSource | str,
    *,
    steps: int = 200,
    learning_rate: float = LEARNING_RATE,
    seed: int = 0,
    checkpoints: Checkpoints | None = None,
) -> CompressionPlan:
    """Return the plan with bases trained for the least divergence from the uncompressed model.

    An orthonormal basis is a point of a Stiefel manifold, an oblique one the two subspaces of its
    projector, each a point of one. Ranks, grouping and bytes do not change. The weights of the
    model get no gradient.

    Parameters
    ----------
    model, tokens
        As in `compress`.
    plan : CompressionPlan
        Start, of unquantised latents.
    steps : int
        Number of steps of Riemannian Adam under a cosine schedule; with 0 the plan is returned.
    learning_rate : float
        Learning rate at the start; nearly the length of a step on each manifold.
    seed : int
        Seed of the order of the sequences.
    checkpoints : Checkpoints, optional
        Store of the state, keyed by all that the result depends on beside these arguments. Tuning
        resumes from it, to the same plan.

    Raises
    ------
    PlanError
        If latents are quantised, or the plan was made for another model.
    ArgumentError
        As in `compress`.
    RunError
        If a divergence is not finite.
    """
    if not plan.rank_only:
        raise PlanError(
            f"a plan of quantised latents ({plan.formats}) cannot be tuned: tune a plan of recipe "
            "low-rank, then quantise it"
        )
    check_seed(seed)
    decoder = Decoder.of(model)
    plan.check_model(decoder)
    model = decoder.model
    _, tokens = calibration_tokens(model, tokens)
    tokens = tokens.to(model.device)
    bases = TrainableBases(plan, model.device)
    if not bases.parameters() or steps < 1:
        return plan
    generator = torch.Generator().manual_seed(seed)
    batches = [random_sequences(len(tokens), SEQUENCES_PER_STEP, generator) for _ in range(steps)]
    optimizer = riemannian_adam(bases.parameters(), learning_rate)
    schedule = LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * (step / steps))) / 2)
    keyed = (
        (checkpoints or Checkpoints())
        .made_by(tune)
        .keyed(plan=plan.digest(), tuning=[steps, learning_rate, seed])
    )

    def closure(step: int) -> float:
        return differentiate(model, tokens[batches[step].to(tokens.device)], plan, bases)

    LOG.info("tuning for %d steps", steps)
    with differentiable(model), _frozen(model), on_threads(torch.get_num_threads()):
        descend(closure, optimizer, schedule, steps, label="tuning", checkpoints=keyed)
    taken = plan.provenance.tuning_steps + steps
    return bases.plan(replace(plan, provenance=replace(plan.provenance, tuning_steps=taken)))


def differentiate(
    model: PreTrainedModel, tokens: Tensor, plan: CompressionPlan, bases: TrainableBases
) -> float:
    """Return the divergence on tokens (b, n), in nats, and leave its gradient in the bases."""
    with torch.no_grad():
        exact = last_outputs(model, tokens)
    compressed = projected(model, bases.now(), rotary=plan.rotary, sinks=plan.sinks)
    with recomputed(model), compressed:  # backward too: it runs layers again
        return differentiate_divergence(model, tokens, exact)


@contextmanager
def recomputed(model: PreTrainedModel) -> Iterator[None]:
    """Checkpoint activations inside the block: layers hold inputs only and run again backward."""
    with ExitStack() as stack:
        for layer in decoder_layers(model):
            again = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )
            replace_attribute(stack, layer, "forward", again)
        yield


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Let no weight get a gradient inside the block."""
    learning = [p for p in model.parameters() if p.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
