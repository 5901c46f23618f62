"""What compression costs each layer: error surfaces, and the ranks they lead to."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from manifoldkv.activations import Batch, LayerActivations, Rotary, capture
from manifoldkv.basis import Basis, HeadGrouping, identity_basis
from manifoldkv.decoder import (
    compressed_output,
    layer_output,
    mixed_values,
    project_mixed_values,
    whole,
)
from manifoldkv.errors import RankError
from manifoldkv.executors import LOCAL, Executor, Task
from manifoldkv.objectives.eigen_attention import singular_values
from manifoldkv.projection import Bases, divergence, log_probabilities, projected
from manifoldkv.rank_selection import ErrorSurface, Ranks, Sequential, threshold
from manifoldkv.steps import NOWHERE, Kept

SEQUENCES = 16
ROWS = 64
"""How much of the calibration data error surfaces are measured on."""
DIVERGENCE_SEQUENCES = 8
"""How much of it the model's predictions are compared on."""


@dataclass(frozen=True)
class LayerBases:
    """Bases of one layer at several ranks.

    Parameters
    ----------
    keys, values : dict
        Rank to Basis.
    """

    keys: dict[int, Basis]
    values: dict[int, Basis]

    def named(self) -> dict[str, Basis]:
        """All of them in one mapping."""
        of_keys = {f"key-{rank}": basis for rank, basis in self.keys.items()}
        return of_keys | {f"value-{rank}": basis for rank, basis in self.values.items()}

    @classmethod
    def from_named(cls, named: Mapping[str, Basis]) -> LayerBases:
        """Inverse of `named`."""
        found: dict[str, dict[int, Basis]] = {"key": {}, "value": {}}
        for name, basis in named.items():
            site, rank = name.split("-")
            found[site][int(rank)] = basis
        return cls(dict(sorted(found["key"].items())), dict(sorted(found["value"].items())))


@torch.no_grad()
def error_surface(
    activations: LayerActivations,
    key_bases: Mapping[int, Basis | None],
    value_bases: Mapping[int, Basis | None],
    *,
    rotary: Rotary = "pre",
    rows: Tensor | None = None,
) -> ErrorSurface:
    """Δ(r_K, r_V) of one layer on its own inputs, for all pairs of bases.

    Parameters
    ----------
    activations : LayerActivations
        Of inputs that have passed the compressed layers below (the paper), or of clean ones.
    key_bases, value_bases : mapping
        Rank to basis; None leaves keys or values exact, at rank head_dim.
    rotary : {"pre", "post"}
        Where keys are projected.
    rows : Tensor, optional
        Query positions to look at; all if omitted. The norms are those of the same rows.
    """
    keys, values = tuple(sorted(key_bases)), tuple(sorted(value_bases))
    shared = HeadGrouping("shared", activations.kv_heads)
    identity = identity_basis(shared, activations.head_dim).like(activations.cos)
    bases = [identity if basis is None else basis for _, basis in sorted(value_bases.items())]
    errors = torch.zeros(len(keys), len(values), dtype=torch.float64)
    batches = whole(activations).sequences.split(1)
    for sequences in batches:
        batch = Batch(sequences, rows)
        exact = activations.outputs_of(batch)
        for i, key in enumerate(keys):
            mixed: dict[HeadGrouping, Tensor] = {}
            for j, basis in enumerate(bases):
                if basis.grouping not in mixed:
                    mixed[basis.grouping] = mixed_values(
                        activations, basis.grouping, batch, key_bases[key], rotary=rotary
                    )
                attention = project_mixed_values(mixed[basis.grouping], basis)
                lost = layer_output(activations, attention, batch) - exact
                ratio = torch.linalg.vector_norm(lost) / torch.linalg.vector_norm(exact)
                errors[i, j] += float(ratio) / len(batches)
    if key_bases[keys[-1]] is None and value_bases[values[-1]] is None:
        errors[-1, -1] = 0  # by definition, but for rounding
    return ErrorSurface(keys, values, errors)


def sequential_ranks(
    model: PreTrainedModel,
    tokens: Tensor,
    table: Sequence[LayerBases],
    budget: int,
    *,
    rotary: Rotary = "pre",
    kept: Kept = NOWHERE,
) -> tuple[list[Ranks], list[ErrorSurface]]:
    """Ranks by the paper's rule, and the surfaces it saw (Alg. error_surface).

    Errors are measured on the first `SEQUENCES` sequences at `ROWS` query positions
    spread evenly, on inputs that have passed the compressed layers below.

    Parameters
    ----------
    model, tokens
        As in `compress`, tokens as ids.
    table : sequence of LayerBases
        Of all layers.
    budget : int
        As in `rank_selection`.
    rotary : {"pre", "post"}
        What the bases are for.
    kept : Kept, optional
        Under all that the bases depend on: where the surface of every layer is kept.
    """
    tokens, kept = tokens[:SEQUENCES], kept.under(budget=budget)
    rule, surfaces = Sequential(len(table), budget), []

    def propagate(activations: LayerActivations) -> Tensor:
        bases, (key, value) = table[activations.layer], rule.ranks[activations.layer]
        x = activations.cos
        key_basis, value_basis = bases.keys[key].like(x), bases.values[value].like(x)
        return compressed_output(activations, key_basis, value_basis, rotary=rotary)

    layers = capture(model, tokens, propagate=propagate)
    for activations in follow(layers, len(table)):
        measure = partial(_surface_tensors, activations, table[activations.layer], rotary)
        surfaces.append(_surface_of(kept.tensors(f"surface-{activations.layer}", measure)))
        rule.select(surfaces[-1])
    return rule.ranks, surfaces


def threshold_ranks(
    model: PreTrainedModel,
    tokens: Tensor,
    table: Sequence[LayerBases],
    budget: int,
    *,
    rotary: Rotary = "pre",
    executor: Executor = LOCAL,
    kept: Kept = NOWHERE,
) -> list[Ranks]:
    """Ranks by EigenAttention's rule, at the smallest error per layer that keeps a budget.

    Each layer's threshold falls until its layer-output error on clean inputs would be above that
    error (`rank_selection.threshold`); ranks are rounded up to those there are bases for. Errors
    are measured as in `sequential_ranks`, whose parameters these are, and where `executor` runs.

    Raises
    ------
    RankError
        If no error is large enough.
    """
    found: dict[int, dict[str, Tensor]] = {}

    def tasks() -> Iterator[Task[int]]:
        for activations in capture(model, tokens[:SEQUENCES]):
            layer = activations.layer
            known = kept.read(f"threshold-{layer}")
            if known is None:
                yield Task(layer, activations, (table[layer], rotary))
            else:
                found[layer] = known
            del activations  # before those of the next layer come

    running = executor.run(_threshold_search, tasks(), torch.get_num_threads())
    for layer, tensors in tqdm(running, total=len(table), desc="layers", disable=None, leave=False):
        kept.write(f"threshold-{layer}", tensors)
        found[layer] = tensors
    searches = [
        (_surface_of(tensors), tensors["keys"], tensors["values"])
        for _, tensors in sorted(found.items())
    ]
    head_dim = next(iter(table[0].keys.values())).head_dim

    def chosen(error: float) -> list[Ranks]:
        return [_threshold_on(surface, keys, values, error) for surface, keys, values in searches]

    errors = sorted({float(e) for surface, *_ in searches for e in surface.errors.flatten()})
    smallest = bisect_left(errors, True, key=lambda error: sum(map(sum, chosen(error))) <= budget)
    if smallest == len(errors):
        least = sum(map(sum, chosen(errors[-1]))) / (2 * head_dim * len(table))
        raise RankError(
            f"the threshold rule cannot keep {budget / (2 * head_dim * len(table)):.3g} of the "
            f"cache; the smallest ratio it reaches is {least:.4g}"
        )
    return chosen(errors[smallest])


def _threshold_search(
    activations: LayerActivations, bases: LayerBases, rotary: Rotary
) -> dict[str, Tensor]:
    """What the rule looks at in a layer: errors, and singular values of keys and of values."""
    key_grouping, value_grouping = (
        next(iter(of_site.values())).grouping for of_site in (bases.keys, bases.values)
    )
    keys = singular_values(activations, "key", key_grouping, rotary)
    values = singular_values(activations, "value", value_grouping, rotary)
    return _surface_tensors(activations, bases, rotary) | {"keys": keys, "values": values}


def _threshold_on(surface: ErrorSurface, keys: Tensor, values: Tensor, error: float) -> Ranks:
    """The rule on the ranks of a surface, each threshold's rank rounded up to one of them."""

    def rounded(key: int, value: int) -> tuple[int, int]:
        return bisect_left(surface.key_ranks, key), bisect_left(surface.value_ranks, value)

    pair = threshold(
        keys, values, lambda *pair: float(surface.errors[rounded(*pair)]), error, smallest_share=0.0
    )
    key, value = rounded(*pair)
    return surface.key_ranks[key], surface.value_ranks[value]


@torch.no_grad()
def divergences(
    model: PreTrainedModel,
    tokens: Tensor,
    table: Sequence[LayerBases],
    *,
    rotary: Rotary = "pre",
    recent: int = 0,
    executor: Executor = LOCAL,
    kept: Kept = NOWHERE,
) -> list[ErrorSurface]:
    """What every pair of ranks costs the model's predictions, to be summed over layers.

    The Kullback-Leibler divergence from the predictions of the uncompressed model, in nats per
    token, with one site of one layer compressed and all else exact; a pair costs the sum of its
    sites. Measured on the first `DIVERGENCE_SEQUENCES` sequences. Sums of these predict the damage
    to the model better than sums of layer-output errors or of their squares.

    Parameters as in `threshold_ranks`, and `recent`, the newest tokens that stay exact; what is
    measured on a sequence is kept.
    """
    variants = [
        (index, site, rank, (basis, None) if site == "key" else (None, basis))
        for index, bases in enumerate(table)
        for site, of_site in (("key", bases.keys), ("value", bases.values))
        for rank, basis in of_site.items()
        if rank < basis.head_dim
    ]
    sequences = tokens[:DIVERGENCE_SEQUENCES].to(model.device).split(1)

    measure = partial(_divergence_of, model, rotary, recent)
    kept = kept.under(recent=recent)
    nats: dict[int, Tensor] = {}  # by sequence, of all variants
    parts: dict[int, dict[int, float]] = defaultdict(dict)  # of sequences that are not finished

    with tqdm(total=len(sequences) * len(variants), desc="ranks", disable=None, leave=False) as bar:

        def tasks() -> Iterator[Task[tuple[int, int]]]:
            for number, sequence in enumerate(sequences):
                known = kept.read(f"divergences-{number}")
                if known is not None:
                    nats[number] = known["nats"]
                    bar.update(len(variants))
                    continue
                data = sequence, log_probabilities(model, sequence)
                for place, (index, _, _, bases) in enumerate(variants):
                    yield Task((number, place), data, ({index: bases},))

        for (number, place), lost in executor.run(measure, tasks(), torch.get_num_threads()):
            parts[number][place] = lost
            bar.update()
            if len(parts[number]) == len(variants):
                of_one = [lost for _, lost in sorted(parts.pop(number).items())]
                nats[number] = torch.tensor(of_one, dtype=torch.float64)
                kept.write(f"divergences-{number}", {"nats": nats[number]})
    # In one order, whatever was finished first: sums depend on it.
    nothing = torch.zeros(len(variants), dtype=torch.float64)
    mean = (sum((nats[number] for number in sorted(nats)), nothing) / len(sequences)).tolist()
    costs = {variant[:3]: lost for variant, lost in zip(variants, mean, strict=True)}
    return [_summed(costs, index, bases) for index, bases in enumerate(table)]


@torch.no_grad()
def _divergence_of(
    model: PreTrainedModel,
    rotary: Rotary,
    recent: int,
    data: tuple[Tensor, Tensor],
    bases: Bases,
) -> float:
    """Of the predictions with some bases from exact ones; data are token ids and the latter."""
    tokens, exact = data
    with projected(model, bases, rotary=rotary, recent=recent):
        return float(divergence(exact, log_probabilities(model, tokens)))


def _summed(
    costs: Mapping[tuple[int, str, int], float], index: int, bases: LayerBases
) -> ErrorSurface:
    keys, values = (tuple(sorted(of_site)) for of_site in (bases.keys, bases.values))
    key, value = (
        torch.tensor([costs.get((index, site, rank), 0.0) for rank in ranks], dtype=torch.float64)
        for site, ranks in (("key", keys), ("value", values))
    )
    return ErrorSurface(keys, values, key.unsqueeze(1) + value)


def _surface_tensors(
    activations: LayerActivations, bases: LayerBases, rotary: Rotary
) -> dict[str, Tensor]:
    rows = torch.linspace(0, activations.length - 1, min(ROWS, activations.length))
    x = activations.cos
    exact: dict[int, Basis | None] = {activations.head_dim: None}
    surface = error_surface(
        activations,
        {rank: basis.like(x) for rank, basis in bases.keys.items()} | exact,
        {rank: basis.like(x) for rank, basis in bases.values.items()} | exact,
        rotary=rotary,
        rows=rows.round().long(),
    )
    ranks = {"key_ranks": surface.key_ranks, "value_ranks": surface.value_ranks}
    return {"errors": surface.errors} | {k: torch.tensor(v) for k, v in ranks.items()}


def _surface_of(tensors: Mapping[str, Tensor]) -> ErrorSurface:
    """Inverse of `_surface_tensors`."""
    keys, values = (tuple(tensors[f"{site}_ranks"].tolist()) for site in ("key", "value"))
    return ErrorSurface(keys, values, tensors["errors"])


def follow(layers: Iterator[LayerActivations], total: int) -> Iterator[LayerActivations]:
    """Layers with a progress bar where a person is watching."""
    yield from tqdm(layers, total=total, desc="layers", disable=None, leave=False)
