"""Commuting bases moved, layer by layer, to the least error at the output of the decoder layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import geoopt
import torch
from transformers import PreTrainedModel

from manifoldkv.activations.capture import capture
from manifoldkv.basis import Basis
from manifoldkv.objectives.base import Problem
from manifoldkv.objectives.layer_output import LayerOutput
from manifoldkv.recipes.moving import moving
from manifoldkv.recipes.run import Run
from manifoldkv.runs.progress import follow
from manifoldkv.solvers.base import checked, progress
from manifoldkv.solvers.riemannian_adam import BETAS, RiemannianAdam

SOLVER = RiemannianAdam(learning_rate=0.3)
"""Its steps and samples; a commuting basis moves on manifolds of its own."""


def descended(
    model: PreTrainedModel,
    run: Run,
    bases: Sequence[tuple[Basis, Basis]],
) -> Iterator[tuple[Basis, Basis]]:
    """Yield the bases of every layer, moved from these to the least loss of `LayerOutput`.

    Keys are moved with values exact and the other way round, as for any other basis (Eq.
    dkv_delta). Ranks stay what they are, and what commutes with the rotation commutes still.

    Parameters
    ----------
    model : PreTrainedModel
        Unwrapped.
    run : Prepared
        Calibration tokens and seed.
    bases : sequence of tuple of Basis
        Of the keys and the values of every layer.

    Raises
    ------
    RunError
        If a loss is not finite.
    """
    for activations in follow(capture(model, run.tokens), len(bases), "layers"):
        key, value = bases[activations.layer]
        grouping, objective = key.grouping, LayerOutput()
        keys = objective.problem(activations, "key", grouping, "post")
        values = objective.problem(activations, "value", grouping)
        seed = run.config.seed
        yield _descended(keys, key, seed), _descended(values, value, seed)


def _descended(problem: Problem, basis: Basis, seed: int) -> Basis:
    point = moving(basis, problem.activations.device)
    points = [*point.parameters()]
    if not points:  # nothing is cut
        return basis
    generator = torch.Generator().manual_seed(seed)
    optimizer = geoopt.optim.RiemannianAdam(
        points, lr=SOLVER.learning_rate, betas=BETAS, stabilize=10
    )
    steps = SOLVER.steps_on(problem)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for step in progress(range(steps), problem):
        now = point().like(problem.activations.cos)
        loss = problem.loss(now, SOLVER.batch(problem, generator))
        checked(loss, problem, step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward(inputs=points)
        optimizer.step()
        schedule.step()
    return point.stored()
