"""EigenAttention's rank rule: a threshold on the singular values of keys and values."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from manifoldkv.activations.capture import capture
from manifoldkv.activations.layer import LayerActivations
from manifoldkv.basis import SITES, Rotary
from manifoldkv.objectives.eigen_attention import singular_values
from manifoldkv.ranks.base import LayerBases, RankProblem, RankRule, register_rank_rule
from manifoldkv.ranks.budget import Ranks
from manifoldkv.ranks.surfaces import (
    ROWS,
    SEQUENCES,
    ErrorSurface,
    layer_surface,
)
from manifoldkv.runs.executors import Task
from manifoldkv.runs.progress import follow

STEP = 0.02
SMALLEST_SHARE = 0.45
"""Decrement of the threshold, and smallest share of head_dim, of the release of EigenAttention."""


@register_rank_rule("threshold")
@dataclass(frozen=True)
class Threshold(RankRule):
    """EigenAttention's rule, at the smallest error per layer within the budget.

    The threshold of every layer is lowered while its layer-output error on uncompressed inputs is
    below that error (`threshold_search`, without a smallest rank); ranks are rounded up to
    candidates.

    Parameters
    ----------
    candidates, multiple
        As in `RankRule`.
    sequences : int or None
        Number of first calibration sequences that errors are measured on; None for all.
    rows : int or None
        Number of evenly spaced query rows of each; None for all.
    """

    sequences: int | None = SEQUENCES
    rows: int | None = ROWS

    def choose(self, problem: RankProblem) -> list[Ranks]:
        searches = _searches(problem, self.sequences, self.rows)

        def chosen(error: float) -> list[Ranks]:
            return [_search_on_candidates(*search, error) for search in searches]

        budget = problem.budget
        errors = sorted({float(e) for surface, *_ in searches for e in surface.errors.flatten()})
        budget.check(chosen(math.inf))  # the smallest ranks of the rule
        smallest = bisect_left(
            errors, True, key=lambda error: budget.cost(chosen(error)) <= budget.latent_elements
        )
        return chosen([*errors, math.inf][smallest])


def threshold_rank(spectra: Tensor, threshold: float) -> int:
    """Return the number of singular values that reach a share of their sum (not of their energy).

    Singular values are by head, descending, (heads, d); the largest number of any head counts.
    """
    shares = spectra.cumsum(dim=-1) / spectra.sum(dim=-1, keepdim=True)
    return max(1, int((shares < threshold).sum(dim=-1).max()))


def threshold_search(
    key_spectra: Tensor,
    value_spectra: Tensor,
    error: Callable[[int, int], float],
    error_budget: float,
    *,
    smallest_share: float = SMALLEST_SHARE,
) -> Ranks:
    """Return EigenAttention's ranks of one layer, as in the release for Llama.

    Keys and values have one threshold. From 1 it decreases by `STEP` while the layer-output error
    is below its budget and *both* ranks are above `smallest_share` of head_dim, then increases by
    one step, whether error or rank ended the search. The size of the cache has no bound.

    Parameters
    ----------
    key_spectra, value_spectra : Tensor
        Singular values by head, descending, (heads, d).
    error : callable
        Function of (r_K, r_V) that returns the layer-output error.
    error_budget : float
        Largest error; 0.025 in the release.
    smallest_share : float
        Smallest share of head_dim; 0.45 in the release.
    """
    head_dim = key_spectra.shape[-1]
    previous = current = (head_dim, head_dim)
    level, value = 1.0, 0.0
    while value < error_budget and min(current) > smallest_share * head_dim and level > 0:
        ranks = threshold_rank(key_spectra, level), threshold_rank(value_spectra, level)
        previous, current = current, ranks
        value = error(*current)
        level -= STEP
    return previous


def _searches(
    problem: RankProblem, sequences: int | None, rows: int | None
) -> list[tuple[ErrorSurface, Tensor, Tensor]]:
    """Return the error surface and the singular values of keys and of values by layer."""
    tokens = problem.tokens[:sequences]
    checkpoints = problem.checkpoints.keyed(ranks="threshold", sequences=len(tokens), rows=rows)
    layers = range(len(problem.bases))
    stored = {layer: checkpoints.read_tensors(f"threshold-{layer}") for layer in layers}
    missing = [layer for layer in layers if stored[layer] is None]

    def tasks() -> Iterator[Task[int]]:
        for activations in capture(problem.model, tokens, missing) if missing else ():
            layer = activations.layer
            yield Task(layer, activations, (problem.bases[layer], problem.rotary, rows))
            del activations  # before those of the next layer are computed

    running = problem.executor.run(_measure, tasks(), torch.get_num_threads())
    for layer, tensors in follow(running, len(missing)):
        checkpoints.write_tensors(f"threshold-{layer}", tensors)
        stored[layer] = tensors
    return [
        (ErrorSurface.restored(tensors), tensors["keys"], tensors["values"])
        for tensors in stored.values()
        if tensors is not None
    ]


def _measure(
    activations: LayerActivations, bases: LayerBases, rotary: Rotary, rows: int | None
) -> Iterator[dict[str, Tensor]]:
    spectra = {}
    for site in SITES:
        grouping = next(iter(bases.of(site).values())).grouping
        spectra[f"{site}s"] = singular_values(activations, site, grouping, rotary)
    yield layer_surface(activations, bases, rotary, rows).tensors() | spectra


def _search_on_candidates(
    surface: ErrorSurface, keys: Tensor, values: Tensor, error_budget: float
) -> Ranks:
    """Return the rule's choice on a surface, with ranks rounded up to candidates."""

    def index(rank: int, candidates: tuple[int, ...]) -> int:
        return min(bisect_left(candidates, rank), len(candidates) - 1)

    def rounded(key: int, value: int) -> tuple[int, int]:
        return index(key, surface.key_ranks), index(value, surface.value_ranks)

    def error(key: int, value: int) -> float:
        return float(surface.errors[rounded(key, value)])

    pair = threshold_search(keys, values, error, error_budget, smallest_share=0.0)
    key, value = rounded(*pair)
    return surface.key_ranks[key], surface.value_ranks[value]
