"""Low-rank bases: an objective, a solver and a rank rule."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from manifoldkv.basis import Site, parse_grouping
from manifoldkv.errors import ArgumentError
from manifoldkv.models.decoder import Decoder
from manifoldkv.objectives import OBJECTIVES, Objective
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.site import SitePlan
from manifoldkv.ranks import RANK_RULES, Budget, RankProblem, RankRule, Ranks, Uniform
from manifoldkv.ranks.base import CandidateRanks
from manifoldkv.recipes.recipe import Recipe
from manifoldkv.recipes.run import Run, check_run, context_of
from manifoldkv.recipes.solve import BasisFinder, find_bases
from manifoldkv.registry import Registry
from manifoldkv.runs.checkpoints import Checkpoints
from manifoldkv.runs.executors import Executor, on_threads
from manifoldkv.runs.files import only_run
from manifoldkv.solvers import SOLVERS, Solver
from manifoldkv.text.sources import TextSource

if TYPE_CHECKING:
    from manifoldkv.recipes.config import CompressionConfig

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankRecipe(Recipe):
    """Bases of an objective by a solver, at the ranks of a rank rule.

    Registered names of objectives, solvers and rank rules stand for objects with default fields.

    Parameters
    ----------
    objective : Objective
        Loss of the bases.
    solver : Solver
        Solver of the objective.
    key_grouping, value_grouping : str or int
        Heads that share a basis of keys and of values; see `HeadGrouping`.
    ranks : RankRule
        Rank rule over all layers.
    tuning_steps : int
        Number of final steps of `tune`.

    Raises
    ------
    ArgumentError
        If a name or a grouping is unknown.
    """

    objective: Objective
    solver: Solver
    key_grouping: str | int = "shared"
    value_grouping: str | int = 1
    ranks: RankRule = field(default_factory=Uniform)
    tuning_steps: int = 0

    def __post_init__(self) -> None:
        for name, registry in REGISTRIES.items():
            object.__setattr__(self, name, registry.resolve(getattr(self, name)))
        for name in ("key_grouping", "value_grouping"):
            object.__setattr__(self, name, parse_grouping(getattr(self, name)))

    def grouping(self, site: Site) -> str | int:
        """Return the head grouping of a site."""
        return self.key_grouping if site == "key" else self.value_grouping

    def describe(self) -> dict[str, Any]:
        """Return all fields, methods by names and fields, for a plan's provenance."""
        methods = {
            name: registry.describe(getattr(self, name)) for name, registry in REGISTRIES.items()
        }
        return asdict(self) | methods

    def with_ranks(self, ranks: RankRule | str) -> Self:
        return replace(self, ranks=RANK_RULES.resolve(ranks))

    def check(
        self, decoder: Decoder, tokens: Tensor | TextSource | str, config: CompressionConfig
    ) -> None:
        check_run(decoder, config)
        BasisFinder(self, config.rotary, config.seed)  # raises if the solver does not accept
        self.ranks.candidate_ranks(_budget(decoder, config, context_of(decoder, tokens, config)))

    def fit(
        self, decoder: Decoder, run: Run, folder: str | Path | None, executor: Executor
    ) -> CompressionPlan:
        budget = _budget(decoder, run.config, run.context)
        candidates = self.ranks.candidate_ranks(budget)
        rotary, threads = run.config.rotary, torch.get_num_threads()
        lock = nullcontext() if folder is None else only_run(Path(folder))
        with lock, on_threads(threads):  # all of it, tasks or not
            checkpoints = run.checkpoints(decoder, folder)
            of_ranks = self._rank_checkpoints(checkpoints, run, candidates)
            finder = BasisFinder(self, rotary, run.config.seed)
            bases = find_bases(
                decoder.model, run.tokens, finder, candidates, executor, threads, checkpoints
            )
            ranks = self._chosen(
                RankProblem(decoder.model, run.tokens, bases, budget, rotary, executor, of_ranks)
            )
        layers = [
            LayerPlan(SitePlan(of_layer.keys[key]), SitePlan(of_layer.values[value]), window)
            for of_layer, (key, value), window in zip(bases, ranks, budget.windows, strict=True)
        ]
        return run.plan(decoder, layers)

    def _rank_checkpoints(
        self, checkpoints: Checkpoints, run: Run, candidates: list[CandidateRanks]
    ) -> Checkpoints:
        """Return the checkpoints of rank sensitivities, which depend on all bases."""
        described = self.describe()
        of_bases = ("objective", "solver", "key_grouping", "value_grouping")
        of_code = checkpoints.made_by(
            BasisFinder, type(self.objective), type(self.solver), type(self.ranks)
        )
        return of_code.keyed(
            recipe={name: described[name] for name in of_bases},
            rotary=run.config.rotary,
            seed=run.config.seed,
            candidates=candidates,
        )

    def _chosen(self, problem: RankProblem) -> list[Ranks]:
        """Return the ranks of all layers, or raise `ArgumentError` if they exceed the budget."""
        name, budget = self.describe()["ranks"]["name"], problem.budget
        LOG.info("choosing ranks by the %s rule", name)
        ranks = self.ranks.choose(problem)
        if budget.cost(ranks) > budget.latent_elements:
            raise ArgumentError(f"rank rule {name} exceeds the ratio {budget.ratio:g}")
        return ranks


def _budget(decoder: Decoder, config: CompressionConfig, context: int) -> Budget:
    return Budget(config.ratio, decoder.head_dim, decoder.windows, context)


REGISTRIES: dict[str, Registry[Any]] = {
    "objective": OBJECTIVES,
    "solver": SOLVERS,
    "ranks": RANK_RULES,
}
"""Registries of the methods of a `RankRecipe`, by field."""
