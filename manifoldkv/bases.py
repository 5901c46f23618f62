"""The bases of all layers: found by an executor, kept in a folder as they come."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from importlib.metadata import version

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from manifoldkv.activations import LayerActivations, Rotary, Site, capture
from manifoldkv.basis import Basis, HeadGrouping, identity_basis
from manifoldkv.errors import UnsolvableError
from manifoldkv.executors import Executor, Task
from manifoldkv.models import decoder_layers
from manifoldkv.objectives import OBJECTIVES, Problem
from manifoldkv.plan import plain
from manifoldkv.recipes import Recipe
from manifoldkv.solvers import SOLVERS
from manifoldkv.steps import Kept
from manifoldkv.surfaces import LayerBases

LOG = logging.getLogger(__name__)

Place = tuple[int, Site, int]
"""Layer, site and rank."""


class Find:
    """Finds the basis for a site of a layer at a rank, as a plan keeps it.

    Parameters
    ----------
    recipe : Recipe
        Its objective, solver and groupings.
    rotary : {"pre", "post"}
        Where keys are projected.
    seed : int
        Of the solver.

    Raises
    ------
    UnknownNameError, UnsolvableError
        If the objective or solver does not exist, or the two do not go together.
    """

    def __init__(self, recipe: Recipe, rotary: Rotary, seed: int) -> None:
        self.settings = {
            "objective": recipe.objective,
            "solver": recipe.solver,
            "rotary": rotary,
            "seed": seed,
        }
        self.groupings: dict[Site, str | int] = {
            "key": recipe.key_grouping,
            "value": recipe.value_grouping,
        }
        self._objective = OBJECTIVES.get(recipe.objective)()
        self._solver = SOLVERS.get(recipe.solver)()
        self._rotary: Rotary = rotary
        self._seed = seed
        self._latest: tuple[LayerActivations, Site, Problem] | None = None
        for site, grouping in self.groupings.items():
            possible, reason = self._solver.accepts(self._objective, site, grouping)
            if not possible:
                raise UnsolvableError(reason)

    def __call__(self, activations: LayerActivations, site: Site, rank: int) -> Basis:
        grouping = HeadGrouping(self.groupings[site], activations.kv_heads)
        if rank == activations.head_dim:
            return identity_basis(grouping, rank).like(torch.empty(0, dtype=activations.dtype))
        basis = self._solver.solve(self._problem(activations, site), rank, self._seed).basis
        down = plain(basis.down)
        return Basis(down, down if basis.orthonormal else plain(basis.up), grouping)

    def forget(self) -> None:
        """Let go of the activations it has seen last."""
        self._latest = None

    def _problem(self, activations: LayerActivations, site: Site) -> Problem:
        """The same for all ranks in a row, with what it has computed once."""
        latest = self._latest
        if latest is None or latest[0] is not activations or latest[1] != site:
            grouping = HeadGrouping(self.groupings[site], activations.kv_heads)
            problem = self._objective.problem(activations, site, grouping, self._rotary)
            latest = self._latest = (activations, site, problem)
        return latest[2]


def find_bases(
    model: PreTrainedModel,
    tokens: Tensor,
    find: Find,
    ranks: tuple[Sequence[int], Sequence[int]],
    executor: Executor,
    threads: int,
    kept: Kept,
) -> list[LayerBases]:
    """Bases of all layers at all ranks for keys and for values, those that are kept and new ones.

    Every new one is kept before the next is waited for.
    """
    heads = model.config.get_text_config().num_key_value_heads
    layers = len(decoder_layers(model))
    found = [LayerBases({}, {}) for _ in range(layers)]
    total = layers * sum(map(len, ranks))
    LOG.info("finding %d bases in %d layers", total, layers)

    with tqdm(total=total, desc="bases", disable=None, leave=False) as bar:

        def settle(place: Place, basis: Basis) -> None:
            layer, site, rank = place
            of_site = found[layer].keys if site == "key" else found[layer].values
            of_site[rank] = basis
            bar.update()

        def kept_at(place: Place) -> tuple[Kept, str]:
            layer, site, rank = place
            settings = find.settings | {"grouping": find.groupings[site], "place": place}
            return kept.under(**settings), f"layer-{layer}-{site}-{rank}"

        def tasks() -> Iterator[Task[Place]]:
            for activations in capture(model, tokens, folder=kept.folder):
                sites: tuple[Site, Site] = ("key", "value")
                for site, of_site in zip(sites, ranks, strict=True):
                    for rank in of_site:
                        place = (activations.layer, site, rank)
                        of_place, name = kept_at(place)
                        known = of_place.read_basis(name, heads)
                        if known is None:
                            yield Task(place, activations, (site, rank))
                        else:
                            settle(place, known)
                find.forget()
                del activations  # before those of the next layer come

        for place, basis in executor.run(find, tasks(), threads):
            of_place, name = kept_at(place)
            of_place.write_basis(name, basis)
            settle(place, basis)
    return found


def versions() -> dict[str, str]:
    """Of the packages the numbers of a plan depend on."""
    return {name: version(name) for name in ("manifoldkv", "torch", "transformers", "geoopt")}
