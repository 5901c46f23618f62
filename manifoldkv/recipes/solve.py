"""The bases of all layers at all candidate ranks: found by an executor, stored as they come."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from manifoldkv.activations.capture import capture
from manifoldkv.activations.layer import LayerActivations
from manifoldkv.basis import SITES, Basis, HeadGrouping, Rotary, Site, detached, identity_basis
from manifoldkv.errors import ArgumentError
from manifoldkv.ranks.base import CandidateRanks, LayerBases
from manifoldkv.runs.checkpoints import Checkpoints
from manifoldkv.runs.executors import Executor, Task

if TYPE_CHECKING:
    from manifoldkv.recipes.low_rank import RankRecipe

LOG = logging.getLogger(__name__)

Place = tuple[int, Site]
"""Layer and site."""


class BasisFinder:
    """Finds the bases of a site of a layer at some ranks, as a plan stores them.

    Parameters
    ----------
    recipe : RankRecipe
        Its objective, solver and groupings.
    rotary : {"pre", "post"}
        Whether keys are projected before or after rotation.
    seed : int
        Of the solver.

    Raises
    ------
    ArgumentError
        If the objective and the solver do not go together.
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
        self, activations: LayerActivations, site: Site, ranks: Sequence[int]
    ) -> Iterator[tuple[int, Basis]]:
        """Yield every rank with its basis."""
        grouping = HeadGrouping(self._recipe.grouping(site), activations.kv_heads)
        problem = self._recipe.objective.problem(activations, site, grouping, self._rotary)
        for rank in ranks:
            if rank == activations.head_dim:
                like = torch.empty(0, dtype=activations.dtype)
                yield rank, identity_basis(grouping, rank).like(like)
                continue
            basis = self._recipe.solver.solve(problem, rank, self._seed).basis
            down = detached(basis.down)
            yield rank, Basis(down, down if basis.orthonormal else detached(basis.up), grouping)

    def checkpoints(self, checkpoints: Checkpoints, site: Site) -> Checkpoints:
        """Return the checkpoints for what the bases of a site depend on: all fields, and code."""
        recipe = self._recipe
        made = checkpoints.made_by(type(self), type(recipe.objective), type(recipe.solver))
        return made.keyed(
            objective=recipe.describe()["objective"],
            solver=recipe.describe()["solver"],
            grouping=recipe.grouping(site),
            rotary=self._rotary,
            seed=self._seed,
        )


def find_bases(
    model: PreTrainedModel,
    tokens: Tensor,
    finder: BasisFinder,
    candidates: Sequence[CandidateRanks],
    executor: Executor,
    threads: int,
    checkpoints: Checkpoints,
) -> list[LayerBases]:
    """Return the bases of all layers at their candidate ranks, stored ones and new ones.

    Every new one is stored before the next is waited for.

    Parameters
    ----------
    model, tokens
        As in `capture`.
    finder : BasisFinder
        Finds the missing ones.
    candidates : sequence of CandidateRanks
        Of every layer.
    executor, threads
        Where bases are found, and on how many threads each.
    checkpoints : Checkpoints
        For the model, the tokens and the number of threads.
    """
    heads = model.config.get_text_config().num_key_value_heads
    stored = {site: finder.checkpoints(checkpoints, site) for site in SITES}
    found: list[LayerBases] = []
    missing: dict[Place, list[int]] = {}
    for layer, of_layer in enumerate(candidates):
        found.append(LayerBases({}, {}))
        for site, ranks in zip(SITES, of_layer, strict=True):
            for rank in ranks:
                known = stored[site].read_basis(_name(layer, site, rank), heads)
                if known is None:
                    missing.setdefault((layer, site), []).append(rank)
                else:
                    found[layer].of(site)[rank] = known

    def tasks() -> Iterator[Task[Place]]:
        layers = sorted({layer for layer, _ in missing})
        if not layers:
            return
        for activations in capture(model, tokens, layers, folder=checkpoints.folder):
            for site in SITES:
                place = (activations.layer, site)
                if place in missing:
                    yield Task(place, activations, (site, missing[place]))
            del activations  # before those of the next layer come

    total = sum(map(len, missing.values()))
    LOG.info("finding %d bases in %d layers", total, len(candidates))
    with tqdm(total=total, desc="bases", disable=None, leave=False) as bar:
        for (layer, site), (rank, basis) in executor.run(finder, tasks(), threads):
            stored[site].write_basis(_name(layer, site, rank), basis)
            found[layer].of(site)[rank] = basis
            bar.update()
    return [LayerBases(*(dict(sorted(b.of(site).items())) for site in SITES)) for b in found]


def _name(layer: int, site: Site, rank: int) -> str:
    return f"layer-{layer}-{site}-{rank}"
