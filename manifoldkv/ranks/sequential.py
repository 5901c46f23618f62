"""The paper's rank rule: layer by layer, on inputs from compressed lower layers."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

from torch import Tensor

from manifoldkv.activations.capture import capture
from manifoldkv.activations.layer import LayerActivations
from manifoldkv.activations.outputs import compressed_output
from manifoldkv.errors import ArgumentError
from manifoldkv.ranks.base import RankProblem, RankRule, register_rank_rule
from manifoldkv.ranks.budget import Budget, Ranks
from manifoldkv.ranks.surfaces import (
    ROWS,
    SEQUENCES,
    ErrorSurface,
    layer_surface,
)
from manifoldkv.runs.progress import follow

LOG = logging.getLogger(__name__)


@register_rank_rule("sequential")
@dataclass(frozen=True)
class Sequential(RankRule):
    """The paper's greedy rule (Alg. error_surface), one layer after the other.

    Each layer gets the pair with the lowest layer-output error among those that cost at most the
    average remaining budget, τ = B / (tokens of the remaining layers); the unused part remains for
    later layers. Errors are measured on inputs from the compressed lower layers. A warning reports
    surfaces on which a larger rank has a larger error.

    Parameters
    ----------
    candidates, multiple
        As in `RankRule`.
    sequences : int or None
        Number of first calibration sequences that errors are measured on; None for all (the paper).
    rows : int or None
        Number of evenly spaced query rows of each; None for all (the paper).
    """

    sequences: int | None = SEQUENCES
    rows: int | None = ROWS

    def choose(self, problem: RankProblem) -> list[Ranks]:
        return sequential_ranks(problem, self.sequences, self.rows)[0]


def sequential_ranks(
    problem: RankProblem, sequences: int | None = None, rows: int | None = None
) -> tuple[list[Ranks], list[ErrorSurface]]:
    """Return the ranks of the paper's rule, and the error surfaces (Alg. error_surface).

    Sequences and rows are as in `Sequential`.
    """
    tokens = problem.tokens[:sequences]
    checkpoints = problem.checkpoints.keyed(
        ranks="sequential", budget=asdict(problem.budget), sequences=len(tokens), rows=rows
    )
    selection = Selection(problem.budget)
    surfaces: list[ErrorSurface] = []

    def take(surface: ErrorSurface) -> None:
        rising = surface.rising_steps()
        if rising:
            index = len(surfaces)
            LOG.warning("layer %d: %d steps to a larger rank raise the error", index, rising)
        surfaces.append(surface)
        selection.select(surface)

    stored = [checkpoints.read_tensors(f"surface-{i}") for i in range(len(problem.bases))]
    complete = [tensors for tensors in stored if tensors is not None]
    if len(complete) == len(stored):
        for of_layer in complete:
            take(ErrorSurface.restored(of_layer))
        return selection.ranks, surfaces

    def propagate(activations: LayerActivations) -> Tensor:
        bases, (key, value) = problem.bases[activations.layer], selection.ranks[activations.layer]
        x = activations.cos
        key_basis, value_basis = bases.keys[key].like(x), bases.values[value].like(x)
        return compressed_output(activations, key_basis, value_basis, rotary=problem.rotary)

    layers = capture(problem.model, tokens, propagate=propagate)
    for activations in follow(layers, len(problem.bases)):
        index = activations.layer
        tensors = stored[index]
        if tensors is None:
            surface = layer_surface(activations, problem.bases[index], problem.rotary, rows)
            checkpoints.write_tensors(f"surface-{index}", surface.tensors())
        else:
            surface = ErrorSurface.restored(tensors)
        take(surface)
    return selection.ranks, surfaces


class Selection:
    """State of the greedy choice under a budget."""

    def __init__(self, budget: Budget) -> None:
        self._tokens = budget.latent_tokens
        self._elements_left = budget.latent_elements
        self.ranks: list[Ranks] = []

    @property
    def share(self) -> float:
        """Return the largest r_K + r_V of the next layer, the average remaining budget."""
        tokens_left = sum(self._tokens[len(self.ranks) :])
        return self._elements_left / tokens_left if tokens_left else float("inf")

    def select(self, surface: ErrorSurface) -> Ranks:
        """Return the ranks of the next layer, or raise `ArgumentError` if no candidate fits."""
        pair = surface.best(self.share)
        if pair is None:
            raise ArgumentError(
                f"no candidate pair of layer {len(self.ranks)} fits its share of the budget, "
                f"r_K + r_V = {self.share:.4g}; the cheapest is "
                f"{min(surface.key_ranks) + min(surface.value_ranks)}"
            )
        self._elements_left -= self._tokens[len(self.ranks)] * sum(pair)
        self.ranks.append(pair)
        return pair
