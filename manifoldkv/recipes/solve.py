"""Bases of all layers at all candidate ranks, solved by an executor and stored one by one."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from manifoldkv.core.basis import SITES, Basis, HeadGrouping, Rotary, Site, detached, identity_basis
from manifoldkv.core.errors import ArgumentError
from manifoldkv.learn.ranks.base import CandidateRanks, LayerBases
from manifoldkv.runs.checkpoints import Checkpoints
from manifoldkv.runs.executors import Executor, Task
from manifoldkv.statistics.capture import capture
from manifoldkv.statistics.layer import LayerActivations

if TYPE_CHECKING:
    from manifoldkv.recipes.low_rank import RankRecipe

LOG = logging.getLogger(__name__)


class BasisFinder:
    """Solver of the bases of a site of a layer at several ranks.

    Raises `ArgumentError` if the recipe's solver does not accept its objective.
    """

    def __init__(self, recipe: RankRecipe, rotary: Rotary, seed: int) -> None:
        self._recipe = recipe
        self._rotary: Rotary = rotary
        self._seed = seed
        for site in SITES:
            accepted, reason = recipe.solver.accepts(recipe.objective, site, recipe.grouping(site))
            if not accepted:
                raise ArgumentError(reason)

    def __call__(
        self,
        activations: LayerActivations,
        site: Site,
        ranks: Sequence[int],
        metric: Tensor | None = None,
    ) -> Iterator[tuple[int, Basis]]:
        """Yield ranks and their bases; `metric` is as in `Problem`."""
        grouping = HeadGrouping(self._recipe.grouping(site), activations.kv_heads)
        objective, rotary = self._recipe.objective, self._rotary
        problem = objective.problem(activations, site, grouping, rotary, metric)
        full = activations.head_dim
        solver = self._recipe.solver
        if full in ranks and not solver.joint:
            like = torch.empty(0, dtype=activations.dtype)
            yield full, identity_basis(grouping, full).like(like)
            ranks = [rank for rank in ranks if rank != full]
        for rank, solution in solver.solve_ranks(problem, ranks, self._seed):
            basis = solution.basis
            down = detached(basis.down)
            yield rank, Basis(down, down if basis.orthonormal else detached(basis.up), grouping)

    @property
    def joint(self) -> bool:
        """Return whether the bases of a site depend on all its ranks together."""
        return self._recipe.solver.joint

    def restored(self, tensors: dict[str, Tensor], site: Site, heads: int) -> Basis:
        """Return a stored basis of a site with `heads` KV heads."""
        grouping = HeadGrouping(self._recipe.grouping(site), heads)
        return Basis(tensors["down"], tensors.get("up", tensors["down"]), grouping)

    def checkpoints(
        self, checkpoints: Checkpoints, site: Site, candidates: Sequence[CandidateRanks]
    ) -> Checkpoints:
        """Return checkpoints keyed by all that the bases of a site depend on."""
        recipe, description = self._recipe, self._recipe.describe()
        by_code = checkpoints.made_by(type(self), type(recipe.objective), type(recipe.solver))
        return by_code.keyed(
            objective=description["objective"],
            solver=description["solver"],
            grouping=recipe.grouping(site),
            rotary=self._rotary,
            seed=self._seed,
            **({"candidates": candidates} if self.joint else {}),
        )


def find_bases(
    model: PreTrainedModel,
    tokens: Tensor,
    finder: BasisFinder,
    candidates: Sequence[CandidateRanks],
    executor: Executor,
    threads: int,
    checkpoints: Checkpoints,
    metrics: Mapping[tuple[int, Site], Tensor],
) -> list[LayerBases]:
    """Return the bases of all layers at their candidate ranks, resumed or solved and stored.

    Parameters
    ----------
    model, tokens
        As in `capture`.
    finder : BasisFinder
        Solver of missing bases.
    candidates : sequence of CandidateRanks
        Candidate ranks of every layer.
    executor : Executor
        Executor of a task per layer and site.
    threads : int
        Number of threads of a task.
    checkpoints : Checkpoints
        Checkpoints keyed by model, tokens and number of threads.
    metrics : mapping
        Metrics by layer and tensor, of an objective that needs statistics; otherwise empty.
    """
    heads = model.config.get_text_config().num_key_value_heads
    stored = {site: finder.checkpoints(checkpoints, site, candidates) for site in SITES}
    bases = [LayerBases({}, {}) for _ in candidates]
    missing: dict[tuple[int, Site], list[int]] = defaultdict(list)
    for layer, of_layer in enumerate(candidates):
        for site, ranks in zip(SITES, of_layer, strict=True):
            for rank in ranks:
                tensors = stored[site].read_tensors(_name(layer, site, rank))
                if tensors is None:
                    missing[layer, site].append(rank)
                else:
                    bases[layer].of(site)[rank] = finder.restored(tensors, site, heads)
            if finder.joint and (layer, site) in missing:
                missing[layer, site] = list(ranks)

    def tasks() -> Iterator[Task[tuple[int, Site]]]:
        layers = sorted({layer for layer, _ in missing})
        for activations in capture(model, tokens, layers, folder=checkpoints.folder):
            for site in SITES:
                key = (activations.layer, site)
                if key in missing:
                    yield Task(key, activations, (site, missing[key], metrics.get(key)))
            del activations  # before those of the next layer are computed

    total = sum(map(len, missing.values()))
    LOG.info("finding %d bases in %d layers", total, len(candidates))
    with tqdm(total=total, desc="bases", disable=None, leave=False) as bar:
        running = executor.run(finder, tasks() if missing else (), threads)
        for (layer, site), (rank, basis) in running:
            tensors = {"down": basis.down} | ({} if basis.orthonormal else {"up": basis.up})
            stored[site].write_tensors(_name(layer, site, rank), tensors)
            bases[layer].of(site)[rank] = basis
            bar.update()
    return [LayerBases(dict(sorted(b.keys.items())), dict(sorted(b.values.items()))) for b in bases]


def _name(layer: int, site: Site, rank: int) -> str:
    return f"layer-{layer}-{site}-{rank}"
