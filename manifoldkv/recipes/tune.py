"""End-to-end tuning: all bases of a plan moved together, so that predictions change least."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import geoopt
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import PreTrainedModel

from manifoldkv.errors import PlanError, RunError
from manifoldkv.models.head import differentiate_divergence, last_outputs
from manifoldkv.models.offloading import resident
from manifoldkv.models.projected import projected
from manifoldkv.models.support import decoder_layers, unwrapped
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.recipes.moving import MovingBases
from manifoldkv.runs.checkpoints import Checkpoints
from manifoldkv.runs.executors import on_threads
from manifoldkv.seeds import check_seed
from manifoldkv.solvers.base import random_sequences
from manifoldkv.text.sources import TextSource
from manifoldkv.text.tokens import calibration_tokens

LOG = logging.getLogger(__name__)

BETAS = (0.9, 0.95)
STEPS_BETWEEN_WRITES = 10
SEQUENCES_PER_STEP = 4
RATE = 0.1
"""Learning rate."""


def tune(
    model: PreTrainedModel,
    plan: CompressionPlan,
    tokens: Tensor | TextSource | str,
    *,
    steps: int = 200,
    learning_rate: float = RATE,
    sequences_per_step: int = SEQUENCES_PER_STEP,
    seed: int = 0,
    checkpoints: Checkpoints | None = None,
) -> CompressionPlan:
    """Return the plan with bases tuned so that predictions diverge least from the model's own.

    A basis moves on manifolds: an orthonormal one as a point of a Stiefel manifold, an oblique one
    as the two subspaces that make its projector, each a point of one; one that commutes with the
    rotation of keys as such subspaces of ℂ^g for every frequency, so that it commutes still.
    Ranks, grouping and bytes do not change. The weights of the model get no gradient.

    Parameters
    ----------
    model, tokens
        As in `compress`.
    plan : CompressionPlan
        The start, of unquantised latents.
    steps : int
        Of Riemannian Adam under a cosine schedule; no step returns an equal plan.
    learning_rate : float
        At the start; nearly the length of a step on each manifold.
    sequences_per_step : int
        Calibration sequences in a step. Of every layer only its inputs are held; what is between
        is computed again for the gradient.
    seed : int
        Of the order of the sequences.
    checkpoints : Checkpoints, optional
        Where the state is stored every `STEPS_BETWEEN_WRITES` steps, keyed by all that the
        result depends on beside these arguments. Tuning resumes from it, to the same
        plan.

    Raises
    ------
    PlanError
        If latents are quantised, or the plan was made for another model.
    ArgumentError
        As in `compress`.
    RunError
        If the divergence is not finite.
    """
    if not plan.rank_only:
        raise PlanError(
            f"a plan of quantised latents ({plan.formats}) cannot be tuned: tune a plan of recipe "
            "low-rank, then quantise it"
        )
    check_seed(seed)
    model = unwrapped(model)
    plan.check_model(model)
    _, tokens = calibration_tokens(model, tokens)
    tokens = tokens.to(model.device)
    bases = MovingBases(plan, model.device)
    if not bases.parameters() or steps < 1:
        return plan
    generator = torch.Generator().manual_seed(seed)
    batches = [random_sequences(len(tokens), sequences_per_step, generator) for _ in range(steps)]
    optimizer = _optimizer(bases, learning_rate)
    checkpoints = (
        (checkpoints or Checkpoints())
        .made_by(tune)
        .keyed(
            plan=plan.digest(),
            tuning=[steps, learning_rate, sequences_per_step, seed],
        )
    )
    done = _restore(optimizer, checkpoints.read_tensors("tuning"))
    LOG.info("tuning from step %d to %d", done, steps)
    with (
        _frozen(model),
        on_threads(torch.get_num_threads()),
        tqdm(range(done, steps), "tuning", steps, initial=done, disable=None) as bar,
    ):
        for step in bar:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * cosine(step / steps)
            chosen = batches[step]
            optimizer.zero_grad(set_to_none=True)
            loss = differentiate(model, tokens[chosen.to(tokens.device)], plan, bases)
            if not math.isfinite(loss):
                raise RunError(
                    f"the divergence of the predictions is {loss} at step {step} of tuning; "
                    "try a smaller learning rate"
                )
            optimizer.step()
            bar.set_postfix_str(f"{loss:.4f} nats")
            due = (step + 1) % STEPS_BETWEEN_WRITES == 0 or step + 1 == steps
            if due:
                checkpoints.write_tensors("tuning", _state(optimizer))
    taken = plan.provenance.tuning_steps + steps
    return bases.plan(replace(plan, provenance=replace(plan.provenance, tuning_steps=taken)))


def _optimizer(bases: MovingBases, learning_rate: float) -> geoopt.optim.RiemannianAdam:
    group = {"params": bases.parameters(), "peak": learning_rate}
    return geoopt.optim.RiemannianAdam([group], betas=BETAS, stabilize=10)


def cosine(share: float) -> float:
    """Return a factor that falls from 1 to 0 as the share of the steps goes from 0 to 1."""
    return (1 + math.cos(math.pi * share)) / 2


def _state(optimizer: geoopt.optim.RiemannianAdam) -> dict[str, Tensor]:
    """Return the points, and all that the optimiser knows of them."""
    found = {}
    for index, point in enumerate(_moved(optimizer)):
        for name, value in ({"point": point.detach()} | optimizer.state[point]).items():
            found[f"{index}.{name}"] = torch.as_tensor(value).cpu().contiguous()
    return found


def _restore(optimizer: geoopt.optim.RiemannianAdam, known: dict[str, Tensor] | None) -> int:
    """Restore what `_state` returned, and return how many steps are done."""
    if known is None:
        return 0
    for index, point in enumerate(_moved(optimizer)):
        point.data.copy_(known[f"{index}.point"])
        # Strides like those of the point, as before: products may depend on them in the last bit.
        averages = {
            name: torch.zeros_like(point.data).copy_(known[f"{index}.{name}"])
            for name in ("exp_avg", "exp_avg_sq")
        }
        optimizer.state[point] = averages | {"step": int(known[f"{index}.step"])}
    return int(known["0.step"])


def _moved(optimizer: geoopt.optim.RiemannianAdam) -> list[nn.Parameter]:
    return [point for group in optimizer.param_groups for point in group["params"]]


def differentiate(
    model: PreTrainedModel, tokens: Tensor, plan: CompressionPlan, bases: MovingBases
) -> float:
    """Return the divergence of predictions on tokens (b, n); leave the gradient in bases."""
    with torch.no_grad():
        exact = last_outputs(model, tokens)
    seen = projected(model, bases.now(), rotary=plan.rotary, sinks=plan.sinks)
    with recomputed(model), seen:  # until gradients are there: layers are run again for them
        return differentiate_divergence(model, tokens, exact)


@contextmanager
def recomputed(model: PreTrainedModel) -> Iterator[None]:
    """Let layers store only inputs, and run again when a gradient passes, inside the block."""
    with ExitStack() as stack:
        for layer in decoder_layers(model):
            run = partial(_run_resident, layer, layer.forward)
            layer.forward = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
            stack.callback(delattr, layer, "forward")
        yield


def _run_resident(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with resident(layer):  # hooks that load weights do not see the second run
        return forward(*args, **kwargs)


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
