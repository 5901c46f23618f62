"""Tasks of compare_objectives: bases of a layer with their errors, and losses of coded caches."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from io import StringIO
from itertools import product
from math import nan
from multiprocessing import get_context
from pathlib import Path

import common
import pandas as pd
from reports.objectives import CAPS
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv import fit
from manifoldkv.core.basis import SITES, Basis, HeadGrouping, Site, rank_from_ratio
from manifoldkv.core.errors import ManifoldKVError, RunError
from manifoldkv.evaluate import Comparison, Perplexity, perplexity
from manifoldkv.evaluate.diagnostics import layer_errors
from manifoldkv.learn.objectives import OBJECTIVES
from manifoldkv.learn.solvers import SOLVERS, Predictor, RiemannianAdam, RiemannianLBFGS, Solver
from manifoldkv.runs.executors import set_threads
from manifoldkv.statistics.capture import capture
from manifoldkv.statistics.layer import LayerActivations
from manifoldkv.statistics.statistics import Statistics
from manifoldkv.text.docstrings import Split

SPLITS: tuple[Split, ...] = ("calibration", "held-out")
CODED_RATIO = 1 / 8
"""Bytes of coded caches, over those of a cache in 16 bits."""
EXACT = "exact"
"""Grouping in the results of a site that is not projected."""


@dataclass(frozen=True)
class Pair:
    """An objective and a solver that can solve it, with the head groupings of sites."""

    objective: str
    solver: str
    groupings: dict[Site, str | int]


@dataclass(frozen=True)
class Task:
    """Bases of a pair in a layer; without a pair, the coded cache of an objective."""

    objective: str
    pair: Pair | None = None
    layer: int | None = None

    @property
    def name(self) -> str:
        if self.pair is None:
            return f"coded-{self.objective}"
        return f"layer-{self.layer}-{self.objective}-{self.pair.solver}"

    @property
    def needs_statistics(self) -> bool:
        objective = OBJECTIVES.get(self.objective)
        return objective.needs_statistics if self.pair else objective.has_metric


@dataclass
class Inputs:
    """What tasks are measured on, in every process: the activations are those of one layer."""

    given: argparse.Namespace
    model: PreTrainedModel
    tokens: dict[Split, Tensor]
    layers: list[int]
    statistics_file: Path
    _layer: tuple[LayerActivations, LayerActivations] | None = field(default=None, init=False)

    @cached_property
    def statistics(self) -> Statistics:
        return Statistics.load(self.statistics_file)

    @cached_property
    def uncompressed(self) -> Perplexity:
        return perplexity(self.model, self.tokens["held-out"])

    @cached_property
    def _captured(self) -> Iterator[tuple[LayerActivations, LayerActivations]]:
        return zip(*(capture(self.model, self.tokens[x], self.layers) for x in SPLITS), strict=True)

    def activations(self, layer: int) -> tuple[LayerActivations, LayerActivations]:
        """Return those of both texts; layers are asked for in ascending order."""
        while self._layer is None or self._layer[0].layer != layer:
            self._layer = None  # frees its memory first
            self._layer = next(self._captured)
        return self._layer

    def measure(self, task: Task) -> pd.DataFrame:
        with redirect_stderr(StringIO()):  # the bars of parts: the run has one
            if task.pair is None:
                return pd.DataFrame([self._coded(task.objective)])
            assert task.layer is not None
            return pd.DataFrame(self._errors(task.pair, task.layer))

    def _coded(self, name: str) -> dict[str, object]:
        """Return the row of coded.csv of an objective."""
        held_out = self.tokens["held-out"]
        row: dict[str, object] = {"model": Path(self.given.model).name, "objective": name}
        row |= {"ratio": CODED_RATIO, "added_nll": nan, "nll_error": nan}
        row |= {"sequences": len(held_out), "sequence_length": held_out.shape[1], "reason": ""}
        if not OBJECTIVES.get(name).has_metric:
            return row | {"reason": "it has no metric"}
        try:
            plan = fit(self.statistics, ratio=CODED_RATIO, objective=name)
        except ManifoldKVError as error:
            return row | {"reason": str(error)}
        compressed = perplexity(self.model, held_out, plan)
        compared = Comparison(self.uncompressed, compressed)
        return row | {"added_nll": compared.added_nll, "nll_error": compared.standard_error}

    def _errors(self, pair: Pair, layer: int) -> Iterator[dict[str, object]]:
        """Yield the rows of results.csv of a layer."""
        given = self.given
        _, held_out = self.activations(layer)
        of_run = {name: getattr(given, name) for name in CAPS}
        for seed in given.seeds[:1] if pair.solver == "closed-form" else given.seeds:
            solved = {site: self._solve(pair, site, layer, seed) for site in pair.groupings}
            for rank, site in product(self._ranks(layer), given.sites):
                sites = SITES if site == "both" else (site,)
                if not solved.keys() >= set(sites):
                    continue
                basis = {x: solved[x][rank][0] for x in sites}
                errors = layer_errors(
                    held_out, basis.get("key"), basis.get("value"), rotary=given.rotary
                )
                yield {
                    "model": Path(given.model).name,
                    "layer": layer,
                    "site": site,
                    "objective": pair.objective,
                    "solver": pair.solver,
                    **{f"{x}_grouping": pair.groupings[x] if x in sites else EXACT for x in SITES},
                    "rotary": given.rotary,
                    "rank": rank,
                    "rank_ratio": rank / held_out.head_dim,
                    **asdict(errors),
                    "seconds": sum(solved[x][rank][1] for x in sites),
                    "seed": seed,
                } | of_run

    def _ranks(self, layer: int) -> list[int]:
        head_dim = self.activations(layer)[0].head_dim
        return sorted({rank_from_ratio(ratio, head_dim) for ratio in self.given.rank_ratios})

    def _solve(
        self, pair: Pair, site: Site, layer: int, seed: int
    ) -> dict[int, tuple[Basis, float]]:
        """Return basis and seconds by rank; seconds are of all ranks if they are solved at once."""
        calibration, _ = self.activations(layer)
        grouping = HeadGrouping(pair.groupings[site], calibration.kv_heads)
        objective = OBJECTIVES.get(pair.objective)()
        metric = None
        if objective.needs_statistics:
            metric = objective.metric(self.statistics, layer, site)
        solver, ranks = solver_named(pair.solver, self.given), self._ranks(layer)
        solved: dict[int, tuple[Basis, float]] = {}
        for together in [ranks] if solver.joint else [[rank] for rank in ranks]:
            began = time.perf_counter()
            problem = objective.problem(calibration, site, grouping, self.given.rotary, metric)
            solutions = dict(solver.solve_ranks(problem, together, seed))
            seconds = time.perf_counter() - began
            solved |= {rank: (solution.basis, seconds) for rank, solution in solutions.items()}
        return solved


def solver_named(name: str, given: argparse.Namespace) -> Solver:
    """Return a solver with the epochs or steps of this run."""
    if name == "predictor":
        return Predictor(epochs=given.epochs)
    solver = SOLVERS.get(name)()
    if isinstance(solver, RiemannianAdam | RiemannianLBFGS):
        return replace(solver, steps=min(solver.steps, given.steps))
    return solver


# Processes


def run(inputs: Inputs, tasks: list[Task], processes: int) -> Iterator[tuple[Task, pd.DataFrame]]:
    """Yield tasks and their rows as they are done, in processes of one thread each.

    One process is this one; others load the model themselves.

    Raises
    ------
    RunError
        If a process ends before its task.
    """
    if min(processes, len(tasks)) < 2:
        for task in tasks:
            yield task, inputs.measure(task)
        return
    shared = (inputs.given, inputs.tokens, inputs.layers, inputs.statistics_file)
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin, shared)
    try:
        waiting = {pool.submit(_measure, task): task for task in tasks}
        for done in as_completed(waiting):
            yield waiting[done], done.result()
    except BrokenProcessPool as error:
        raise RunError("a process ended early, out of memory perhaps: try --threads 1") from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


_inputs: list[Inputs] = []
"""Those of a process of the pool."""


def _begin(
    given: argparse.Namespace, tokens: dict[Split, Tensor], layers: list[int], statistics_file: Path
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first process says that it is interrupted
    set_threads(1)
    common.import_methods(given.imported)
    with redirect_stderr(StringIO()):
        model, _ = common.load(given.model)
    _inputs.append(Inputs(given, model, tokens, layers, statistics_file))


def _measure(task: Task) -> pd.DataFrame:
    return _inputs[0].measure(task)
