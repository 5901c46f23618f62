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

from manifoldkv.basis import Basis
from manifoldkv.errors import DivergenceError, PlanError
from manifoldkv.models.offloading import resident
from manifoldkv.models.projected import divergence, log_probabilities, projected
from manifoldkv.models.support import decoder_layers, unwrapped
from manifoldkv.plan.layer import detached
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.runs.checkpoints import Checkpoints
from manifoldkv.runs.executors import on_threads
from manifoldkv.solvers.base import check_seed, random_sequences
from manifoldkv.text.sources import TextSource
from manifoldkv.text.tokens import calibration_tokens

LOG = logging.getLogger(__name__)

BETAS = (0.9, 0.95)
STEPS_BETWEEN_WRITES = 10
SEQUENCES_PER_STEP = 4


def tune(
    model: PreTrainedModel,
    plan: CompressionPlan,
    tokens: Tensor | TextSource | str,
    *,
    steps: int = 200,
    learning_rate: float = 0.1,
    sequences_per_step: int = SEQUENCES_PER_STEP,
    seed: int = 0,
    checkpoints: Checkpoints | None = None,
) -> CompressionPlan:
    """Return the plan with bases tuned so that predictions diverge least from the model's own.

    A basis moves on manifolds: an orthonormal one as a point of a Stiefel manifold, an oblique one
    as the two subspaces that make its projector, each a point of one. Ranks, grouping and bytes
    stay what they are. The weights of the model get no gradient.

    Parameters
    ----------
    model, tokens
        As in `compress`.
    plan : CompressionPlan
        The start, without quantisation.
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
        result depends on beside these arguments. Tuning goes on from what is there, to the same
        plan.

    Raises
    ------
    PlanError
        If the plan is quantised or made for another model.
    SeedError, TextError
        As in `compress`.
    DivergenceError
        If the divergence is not finite.
    """
    if plan.quantization is not None:
        raise PlanError("a quantised plan cannot be tuned: tune first, then quantise")
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
    optimizer = geoopt.optim.RiemannianAdam(bases.parameters(), betas=BETAS, stabilize=10)
    checkpoints = (
        (checkpoints or Checkpoints())
        .made_by(MovingBases)
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
            optimizer.param_groups[0]["lr"] = learning_rate * _cosine(step / steps)
            chosen = batches[step]
            optimizer.zero_grad(set_to_none=True)
            loss = bases.differentiate(model, tokens[chosen.to(tokens.device)], plan)
            if not math.isfinite(loss):
                raise DivergenceError(
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


def _cosine(share: float) -> float:
    """Return a factor that falls from 1 to 0 as the share of the steps goes from 0 to 1."""
    return (1 + math.cos(math.pi * share)) / 2


def _state(optimizer: geoopt.optim.RiemannianAdam) -> dict[str, Tensor]:
    """Return the points, and all that the optimiser knows of them."""
    found = {}
    for index, point in enumerate(optimizer.param_groups[0]["params"]):
        for name, value in ({"point": point.detach()} | optimizer.state[point]).items():
            found[f"{index}.{name}"] = torch.as_tensor(value).cpu().contiguous()
    return found


def _restore(optimizer: geoopt.optim.RiemannianAdam, known: dict[str, Tensor] | None) -> int:
    """Restore what `_state` returned, and return how many steps are done."""
    if known is None:
        return 0
    for index, point in enumerate(optimizer.param_groups[0]["params"]):
        point.data.copy_(known[f"{index}.point"])
        # Strides like those of the point, as before: products may depend on them in the last bit.
        averages = {
            name: torch.zeros_like(point.data).copy_(known[f"{index}.{name}"])
            for name in ("exp_avg", "exp_avg_sq")
        }
        optimizer.state[point] = averages | {"step": int(known[f"{index}.step"])}
    return int(known["0.step"])


class MovingBases:
    """The bases of a plan as points of manifolds; those of full rank do not move."""

    def __init__(self, plan: CompressionPlan, device: torch.device) -> None:
        self._layers = [
            (_MovingBasis(layer.key, device), _MovingBasis(layer.value, device))
            for layer in plan.layers
        ]

    def parameters(self) -> list[nn.Parameter]:
        """Return the points that move."""
        return [p for layer in self._layers for basis in layer for p in basis.parameters()]

    def differentiate(self, model: PreTrainedModel, tokens: Tensor, plan: CompressionPlan) -> float:
        """Return the divergence of predictions on tokens (b, n); leave the gradient in bases."""
        with torch.no_grad():
            exact = log_probabilities(model, tokens)
        bases = {index: (key(), value()) for index, (key, value) in enumerate(self._layers)}
        seen = projected(model, bases, rotary=plan.rotary, recent=plan.recent, sinks=plan.sinks)
        with _recomputed(model), seen:
            loss = divergence(exact, log_probabilities(model, tokens))
            loss.backward()  # inside: layers are run again
        return loss.item()

    @torch.no_grad()
    def plan(self, start: CompressionPlan) -> CompressionPlan:
        """Return the plan with these bases."""
        layers = [
            replace(layer, key=key.as_basis(), value=value.as_basis())
            for layer, (key, value) in zip(start.layers, self._layers, strict=True)
        ]
        return replace(start, layers=tuple(layers))


class _MovingBasis(nn.Module):
    """One basis: `down` and, unless it is orthonormal, the subspace that is projected along.

    The projector of an oblique basis depends on the spans of `down` and `up` only, so that both
    stay orthonormal while they move.
    """

    def __init__(self, basis: Basis, device: torch.device) -> None:
        super().__init__()
        self._start = basis
        self._moves = basis.rank < basis.head_dim
        if self._moves:
            manifold = geoopt.Stiefel(canonical=True)
            self._down = geoopt.ManifoldParameter(_span(basis.down).to(device), manifold=manifold)
            if not basis.orthonormal:
                self._up = geoopt.ManifoldParameter(_span(basis.up).to(device), manifold=manifold)

    def forward(self) -> Basis | None:
        if not self._moves:
            return None
        if self._start.orthonormal:
            return Basis(self._down, self._down, self._start.grouping)
        return Basis(self._down, _dual(self._up, self._down), self._start.grouping)

    def as_basis(self) -> Basis:
        """Return the basis as a plan stores it."""
        if not self._moves:
            return self._start
        down = detached(_span(self._down.double()))
        up = down
        if not self._start.orthonormal:
            up = detached(_dual(detached(self._up.double()), down))
        return Basis(down, up, self._start.grouping).like(self._start.down)


def _dual(span: Tensor, down: Tensor) -> Tensor:
    """Return the columns in a span for which ``upᵀ down`` is the identity."""
    return torch.linalg.solve(span.mT @ down, span.mT).mT


def _span(columns: Tensor) -> Tensor:
    """Return orthonormal columns with the same span and the same signs."""
    q, r = torch.linalg.qr(columns.double())
    return (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).to(columns.dtype)


@contextmanager
def _recomputed(model: PreTrainedModel) -> Iterator[None]:
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
