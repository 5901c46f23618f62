"""Healing: the folded projections of a checkpoint trained to predict what the original does."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from manifoldkv.errors import DivergenceError
from manifoldkv.export.fold import PROJECTIONS
from manifoldkv.models.head import differentiate_divergence, last_outputs
from manifoldkv.models.support import attention_of, decoder_layers
from manifoldkv.pipeline.tune import (
    BETAS,
    SEQUENCES_PER_STEP,
    STEPS_BETWEEN_WRITES,
    cosine,
    recomputed,
)
from manifoldkv.runs.checkpoints import Checkpoints
from manifoldkv.runs.executors import on_threads
from manifoldkv.solvers.base import check_seed

LOG = logging.getLogger(__name__)

RATE = 3e-4
"""Learning rate of the projections, relative to the root mean square of 1 / √hidden that they
have."""


def heal(
    original: PreTrainedModel,
    made: PreTrainedModel,
    tokens: Tensor,
    *,
    steps: int,
    learning_rate: float = RATE,
    sequences_per_step: int = SEQUENCES_PER_STEP,
    seed: int = 0,
    checkpoints: Checkpoints | None = None,
) -> float:
    """Train the projections of a folded model in place, and return the last steps' divergence.

    The loss is the Kullback-Leibler divergence of its predictions from the original's, in nats per
    token. All of W_Q', W_K', W_V' and W_O' move, under Adam with a cosine schedule; nothing else
    does. They are float32 while they do, and in the dtype of the model afterwards.

    Parameters
    ----------
    original : PreTrainedModel
        It gets no gradient.
    made : PreTrainedModel
        From `folded`.
    tokens : Tensor
        Calibration token ids, (sequences, length), int64. Their order is shuffled, and each comes
        once before any comes again.
    steps : int
        Of Adam.
    learning_rate : float
        At the start.
    sequences_per_step : int
        Of the tokens; at most all of them.
    seed : int
        Of the order.
    checkpoints : Checkpoints, optional
        Where the state is stored every `STEPS_BETWEEN_WRITES` steps, keyed by all that the result
        depends on beside these arguments. Healing goes on from what is there.

    Returns
    -------
    float
        Mean of the last tenth of the steps, on the sequences of each step before it is taken.

    Raises
    ------
    SeedError
        If the seed is not an integer of 64 bits.
    DivergenceError
        If the divergence is not finite.
    """
    check_seed(seed)
    parameters = list(_projections(made))
    dtype = made.dtype
    made.float()
    optimizer = torch.optim.Adam(parameters, lr=learning_rate, betas=BETAS)
    checkpoints = (
        (checkpoints or Checkpoints())
        .made_by(heal)
        .keyed(healing=[steps, learning_rate, sequences_per_step, seed])
    )
    losses = _restore(optimizer, checkpoints.read_tensors("healing"))
    batches = _batches(len(tokens), sequences_per_step, steps, seed)
    done = len(losses)
    LOG.info("healing from step %d to %d", done, steps)
    made.requires_grad_(False)
    with (
        on_threads(torch.get_num_threads()),
        recomputed(made),
        tqdm(range(done, steps), "healing", steps, initial=done, disable=None) as bar,
    ):
        for parameter in parameters:
            parameter.requires_grad_()
        for step in bar:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * cosine(step / steps)
            batch = tokens[batches[step]].to(made.device)
            optimizer.zero_grad(set_to_none=True)
            losses.append(_differentiate(original, made, batch))
            if not math.isfinite(losses[-1]):
                raise DivergenceError(
                    f"the divergence of the predictions is {losses[-1]} at step {step} of healing; "
                    "try a smaller learning rate"
                )
            optimizer.step()
            bar.set_postfix_str(f"{losses[-1]:.4f} nats")
            if (step + 1) % STEPS_BETWEEN_WRITES == 0 or step + 1 == steps:
                checkpoints.write_tensors("healing", _state(optimizer, losses))
    made.requires_grad_(False).to(dtype)
    late = losses[-max(1, steps // 10) :]
    return math.fsum(late) / len(late)


def _projections(model: PreTrainedModel) -> Iterator[nn.Parameter]:
    for layer in decoder_layers(model):
        for name in PROJECTIONS:
            yield from getattr(attention_of(layer), name).parameters()


def _batches(sequences: int, at_once: int, steps: int, seed: int) -> list[Tensor]:
    """Return the indices of every step's sequences: all of them once, then all of them again."""
    generator = torch.Generator().manual_seed(seed)
    at_once = min(at_once, sequences)
    rounds = -(-steps * at_once // sequences)
    order = torch.cat([torch.randperm(sequences, generator=generator) for _ in range(rounds)])
    return list(order[: steps * at_once].split(at_once))


def _differentiate(original: PreTrainedModel, made: PreTrainedModel, tokens: Tensor) -> float:
    """Return the divergence on tokens (b, n), and leave the gradient in the projections."""
    with torch.no_grad():
        exact = last_outputs(original, tokens)
    return differentiate_divergence(original, made, tokens, exact)


def _state(optimizer: torch.optim.Adam, losses: list[float]) -> dict[str, Tensor]:
    """Return the projections, all that the optimiser knows of them, and the losses so far."""
    found = {"losses": torch.tensor(losses, dtype=torch.float64)}
    for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
        for name, value in ({"point": parameter.detach()} | optimizer.state[parameter]).items():
            found[f"{index}.{name}"] = torch.as_tensor(value).cpu().contiguous()
    return found


def _restore(optimizer: torch.optim.Adam, known: dict[str, Tensor] | None) -> list[float]:
    """Restore what `_state` returned, and return the losses."""
    if known is None:
        return []
    for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
        parameter.data.copy_(known[f"{index}.point"])
        averages = {
            name: known[f"{index}.{name}"].to(parameter.device)
            for name in ("exp_avg", "exp_avg_sq")
        }
        optimizer.state[parameter] = averages | {"step": known[f"{index}.step"].clone()}
    return known["losses"].tolist()
