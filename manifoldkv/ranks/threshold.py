"""EigenAttention's rule: one threshold on the singular values of keys and values."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from manifoldkv.activations.capture import capture
from manifoldkv.activations.layer import LayerActivations
from manifoldkv.basis import Rotary
from manifoldkv.objectives.eigen_attention import singular_values
from manifoldkv.ranks.base import LayerBases, ProbeRun, RankProblem, RankRule, register_rank_rule
from manifoldkv.ranks.budget import Ranks
from manifoldkv.ranks.surfaces import (
    ROWS,
    SEQUENCES,
    ErrorSurface,
    layer_surface,
    seconds_of_an_error,
    surface_from_tensors,
    surface_to_tensors,
)
from manifoldkv.runs.executors import Task
from manifoldkv.runs.progress import follow

STEP = 0.02
SMALLEST_SHARE = 0.45
"""By how much the release of EigenAttention lowers the threshold, and where it stops."""


@register_rank_rule("threshold")
@dataclass(frozen=True)
class Threshold(RankRule):
    """EigenAttention's rule, at the smallest error per layer that keeps the budget.

    The threshold of every layer falls until its layer-output error on clean inputs would be above
    that error (`threshold_search`, without a smallest rank); ranks are rounded up to the
    candidates.

    Parameters
    ----------
    candidates, multiple
        As in `RankRule`.
    sequences : int or None
        Calibration sequences that errors are measured on, the first ones; None for all of them.
    rows : int or None
        Query rows of each, spread evenly; None for all of them.
    """

    sequences: int | None = SEQUENCES
    rows: int | None = ROWS

    def choose(self, problem: RankProblem) -> list[Ranks]:
        searches = _searches(problem, self.sequences, self.rows)

        def chosen(error: float) -> list[Ranks]:
            return [_search_on_candidates(*search, error) for search in searches]

        budget = problem.budget
        errors = sorted({float(e) for surface, *_ in searches for e in surface.errors.flatten()})
        budget.check(chosen(math.inf))  # the least it reaches
        smallest = bisect_left(
            errors, True, key=lambda error: budget.cost(chosen(error)) <= budget.latent_elements
        )
        return chosen([*errors, math.inf][smallest])

    def estimated_seconds(self, probe: ProbeRun) -> float:
        of_one = seconds_of_an_error(probe.activations, self.rows)
        sequences = min(self.sequences or probe.sequences, probe.sequences)
        return probe.layers * sequences * probe.candidates**2 * of_one


def threshold_rank(spectra: Tensor, threshold: float) -> int:
    """Return how many singular values reach a share of their sum (not of their energy).

    Parameters
    ----------
    spectra : Tensor
        Singular values by head, descending, (heads, d); the largest rank of any head counts.
    threshold : float
        In [0, 1].
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
    """Return EigenAttention's ranks of one layer, as the release for Llama searches them.

    One threshold serves keys and values. From 1 it falls in steps of `STEP` while the layer-output
    error is below its budget and *both* ranks are above `smallest_share` of head_dim; then the
    threshold is taken back by one step, whichever of the conditions has ended the search. There is
    no budget for the cache: its ratio is what comes out.

    Parameters
    ----------
    key_spectra, value_spectra : Tensor
        As in `threshold_rank`.
    error : callable
        Layer-output error of (r_K, r_V).
    error_budget : float
        What it may be; the release uses 0.025.
    smallest_share : float
        0.45 in the release.
    """
    head_dim = key_spectra.shape[-1]
    previous = current = (head_dim, head_dim)
    level, found = 1.0, 0.0
    while found < error_budget and min(current) > smallest_share * head_dim and level > 0:
        ranks = threshold_rank(key_spectra, level), threshold_rank(value_spectra, level)
        previous, current = current, ranks
        found = error(*current)
        level -= STEP
    return previous


def _searches(
    problem: RankProblem, sequences: int | None, rows: int | None
) -> list[tuple[ErrorSurface, Tensor, Tensor]]:
    """Return what the rule looks at in every layer: errors, and singular values of both sites."""
    tokens = problem.tokens[:sequences]
    checkpoints = problem.checkpoints.keyed(ranks="threshold", sequences=len(tokens), rows=rows)
    stored = {i: checkpoints.read_tensors(f"threshold-{i}") for i in range(len(problem.bases))}
    found = {layer: tensors for layer, tensors in stored.items() if tensors is not None}
    missing = [layer for layer in stored if layer not in found]

    def tasks() -> Iterator[Task[int]]:
        for activations in capture(problem.model, tokens, missing) if missing else ():
            layer = activations.layer
            yield Task(layer, activations, (problem.bases[layer], problem.rotary, rows))
            del activations  # before those of the next layer come

    running = problem.executor.run(_measure, tasks(), torch.get_num_threads())
    for layer, tensors in follow(running, len(missing)):
        checkpoints.write_tensors(f"threshold-{layer}", tensors)
        found[layer] = tensors
    return [
        (surface_from_tensors(tensors), tensors["keys"], tensors["values"])
        for _, tensors in sorted(found.items())
    ]


def _measure(
    activations: LayerActivations, bases: LayerBases, rotary: Rotary, rows: int | None
) -> Iterator[dict[str, Tensor]]:
    key_grouping, value_grouping = (
        next(iter(of_site.values())).grouping for of_site in (bases.keys, bases.values)
    )
    spectra = {
        "keys": singular_values(activations, "key", key_grouping, rotary),
        "values": singular_values(activations, "value", value_grouping, rotary),
    }
    yield surface_to_tensors(layer_surface(activations, bases, rotary, rows)) | spectra


def _search_on_candidates(
    surface: ErrorSurface, keys: Tensor, values: Tensor, error_budget: float
) -> Ranks:
    """Return the rule's choice on a surface, each rank rounded up to a candidate."""

    def rounded(key: int, value: int) -> tuple[int, int]:
        most = len(surface.key_ranks) - 1, len(surface.value_ranks) - 1
        return (
            min(bisect_left(surface.key_ranks, key), most[0]),
            min(bisect_left(surface.value_ranks, value), most[1]),
        )

    pair = threshold_search(
        keys,
        values,
        lambda *ranks: float(surface.errors[rounded(*ranks)]),
        error_budget,
        smallest_share=0.0,
    )
    key, value = rounded(*pair)
    return surface.key_ranks[key], surface.value_ranks[value]
