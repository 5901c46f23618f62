"""Error against solving time on the layer-output problem, for growing sizes of every solver."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from manifoldkv import Solver
from manifoldkv.activations.capture import capture
from manifoldkv.activations.layer import Batch, LayerActivations
from manifoldkv.basis import SITES, Basis, HeadGrouping, Site, rank_from_ratio
from manifoldkv.diagnostics import layer_errors
from manifoldkv.objectives import LayerOutput, Problem
from manifoldkv.ranks import PAPER_CANDIDATES
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_tokens
from manifoldkv.solvers import SOLVERS
from manifoldkv.text.docstrings import Split

SEQUENCES: dict[Split, int] = {"calibration": 64, "held-out": 16}
LENGTH = 512
"""Sequences of a split and their length in tokens."""
RATIOS = PAPER_CANDIDATES[:-1]
"""Ranks over head_dim."""
GROUPINGS: dict[Site, str | int] = {"key": "shared", "value": 1}  # the paper's
SIZES: dict[str, tuple[str, tuple[int, ...]]] = {
    "predictor": ("epochs", (3, 6, 12, 25)),
    "riemannian-adam": ("steps", (75, 150, 300, 600)),
    "riemannian-l-bfgs": ("steps", (16, 32, 64, 128, 256)),
    "oblique": ("steps", (16, 32, 64, 128)),
}
"""Field of a solver that sets its time, and the values of the runs."""
NESTED = ("flag", "oblique-flag")
SEPARATE = ("riemannian-adam", "riemannian-l-bfgs", "oblique")
"""Solvers of all ranks at once, and those that they are compared with."""


def measure(
    model: PreTrainedModel,
    layers: list[int],
    tokens_of: Callable[[Split, int, int], Tensor],
    solvers: Sequence[str],
    checkpoints: Checkpoints,
    threads: int,
) -> pd.DataFrame:
    """Return a row per layer, site, run of a solver and rank.

    Runs of growing size are at the smallest rank. With a solver of nested bases among them, all
    ranks are solved by it, and one by one by others with their own numbers of steps; these rows
    have size 0.

    Parameters
    ----------
    model : PreTrainedModel
        Model.
    layers : sequence of int
        Layers to measure.
    tokens_of : callable
        Token ids of a split, by the number of sequences and their length.
    solvers : sequence of str
        Names of solvers; those without an entry in `SIZES` have no runs of growing size.
    checkpoints : Checkpoints
        Checkpoints keyed by the model.
    threads : int
        Number of threads of torch.

    Returns
    -------
    DataFrame
        ``layer, site, solver, size, rank, seconds`` (of all ranks for nested bases),
        ``layer_tokens`` (query rows whose loss was computed and differentiated) and
        ``held_out_error`` (of the layer output), with ``sequences, length, held_out, threads``.
    """
    length = min(LENGTH, model.config.get_text_config().max_position_embeddings)
    calibration, held_out = (tokens_of(split, count, length) for split, count in SEQUENCES.items())
    stored = checkpoints.keyed(
        calibration=digest_of_tokens(calibration),
        held_out=digest_of_tokens(held_out),
        threads=threads,
    )
    both = (capture(model, tokens, layers) for tokens in (calibration, held_out))
    captured = zip(*both, strict=True)
    frames = []
    bar = tqdm(captured, total=len(layers), desc="solving times", unit="layer", disable=None)
    for fit, test in bar:
        ranks = sorted({rank_from_ratio(ratio, fit.head_dim) for ratio in RATIOS})
        for site in SITES:
            grouping = HeadGrouping(GROUPINGS[site], fit.kv_heads)
            terms = LayerOutput().problem(fit, site, grouping)
            terms.loss(terms.initial(1), Batch(torch.arange(1)))  # computes what all solvers share
            for name, size, solver, of_run in _runs(solvers, ranks):
                labels: dict[str, Any] = {"layer": fit.layer, "site": site}
                labels |= {"solver": name, "size": size}
                run = partial(_solved, terms, solver, of_run, test)
                of_code = stored.made_by(LayerOutput, type(solver))
                frame = of_code.keyed(ranks=of_run, **labels).frame("solve", run)
                frames.append(frame.assign(**labels))
    return pd.concat(frames, ignore_index=True).assign(
        sequences=len(calibration),
        length=length,
        held_out=len(held_out),
        threads=threads,
    )


def _runs(solvers: Sequence[str], ranks: list[int]) -> Iterator[tuple[str, int, Solver, list[int]]]:
    """Yield name, size and solver of every run, and the ranks that it solves."""
    for name in solvers:
        if name in SIZES:
            field, values = SIZES[name]
            for value in values:
                yield name, value, replace(SOLVERS.get(name)(), **{field: value}), ranks[:1]
    if set(NESTED) & set(solvers):
        for name in solvers:
            if name in NESTED:
                yield name, 0, SOLVERS.get(name)(), ranks
            elif name in SEPARATE:
                yield from ((name, 0, SOLVERS.get(name)(), [rank]) for rank in ranks)


class _Counting(Problem):
    """A problem that counts the query rows it evaluates."""

    def __init__(self, terms: Problem) -> None:
        super().__init__(terms.objective, terms.activations, terms.site, terms.grouping)
        self._computed |= terms._computed
        self.rows = 0

    def loss(self, basis: Basis, batch: Batch | None = None) -> Tensor:
        length, sequences = self.activations.length, self.activations.sequences
        if batch is None:
            self.rows += length * sequences
        else:
            self.rows += len(batch.sequences) * (length if batch.rows is None else len(batch.rows))
        return super().loss(basis, batch)


def _solved(
    terms: Problem, solver: Solver, ranks: list[int], held_out: LayerActivations
) -> pd.DataFrame:
    problem = _Counting(terms)
    start = time.perf_counter()
    solutions = dict(solver.solve_ranks(problem, ranks))
    seconds = time.perf_counter() - start
    rows = []
    for rank, solution in solutions.items():
        pair = (solution.basis, None) if terms.site == "key" else (None, solution.basis)
        error = layer_errors(held_out, *pair).layer_output_error
        rows.append({"rank": rank, "seconds": seconds, "held_out_error": error})
    return pd.DataFrame(rows).assign(layer_tokens=problem.rows)
