"""How much sooner does Riemannian Adam on sampled query rows reach the predictor's error?

    python studies/solver_efficiency.py
    python studies/solver_efficiency.py --model reference-qwen3 --layers 0 3

For every layer and site, on the layer-output problem at one rank: the paper's predictor (MLP+QR,
whole sequences) for several numbers of epochs, each with a schedule of its own, and RiemannianAdam
with growing budgets of steps. Each run gives the layer-output error on held-out text, the seconds,
and the layer-token evaluations (query rows whose loss was computed and differentiated). What is
compared is time at equal error: the cheapest run of either solver that comes within a tolerance of
the lowest error the predictor reaches at any number of epochs. Written into --out: results.csv (a
row for each run), summary.md and a figure. Every run is a checkpoint: an interrupted study resumes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import common
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from manifoldkv import ManifoldKVError, Solver
from manifoldkv.activations.capture import capture
from manifoldkv.activations.layer import Batch, LayerActivations
from manifoldkv.basis import Basis, HeadGrouping, Site, rank_from_ratio
from manifoldkv.diagnostics import layer_errors
from manifoldkv.diagnostics.figures import legend_below, mark_of
from manifoldkv.diagnostics.figures.style import label_axes, logarithmic, reference, title_above
from manifoldkv.models.support import attention_of, decoder_layers
from manifoldkv.objectives import LayerOutput, Problem
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_model, digest_of_tokens
from manifoldkv.solvers import Predictor, RiemannianAdam

SITES: tuple[Site, ...] = ("key", "value")
GROUPINGS: dict[Site, str | int] = {"key": "shared", "value": 1}  # the paper's
EPOCHS = (3, 6, 12, 25, 50)
BUDGETS = (75, 150, 300, 450, 600)
TOLERANCES = (0.0, 0.002, 0.005, 0.01)


def main() -> int:
    parser = common.Parser(__doc__)
    parser.add_model()
    parser.add_text()
    add = parser.add_argument
    add("--layers", type=int, nargs="+", help="(all)")
    add("--rank-ratio", type=float, default=0.5, help="(%(default)s)")
    add("--sequences", type=int, default=64, help="for calibration (%(default)s)")
    add("--sequence-length", type=int, default=512, help="(%(default)s)")
    add("--held-out", type=int, default=16, help="sequences to measure on (%(default)s)")
    add("--epochs", type=int, nargs="+", default=EPOCHS, help="of the predictor (%(default)s)")
    add("--budgets", type=int, nargs="+", default=BUDGETS, help="steps (%(default)s)")
    parser.add_threads()
    parser.add_out("figures/solver_efficiency/<model>")
    return common.run_study(parser, study)


def study(given: argparse.Namespace) -> None:
    if min(*given.budgets, *given.epochs) < 1:
        raise ManifoldKVError("budgets and epochs must be >= 1")
    name = Path(given.model).name
    out = common.output_folder(given, "solver_efficiency", name)
    if given.redraw:
        common.draw(out, draw)
        return
    results = measure(given, common.stored_in(out, given))
    results.to_csv(out / "results.csv", index=False)
    common.draw(out, draw)
    common.write_summary(out, summary(results, name, given))


# Measurements


def measure(given: argparse.Namespace, checkpoints: Checkpoints) -> pd.DataFrame:
    """Return a row per layer, site and run of a solver."""
    model, tokenizer = common.load(given.model)
    longest = model.config.get_text_config().max_position_embeddings
    length = min(given.sequence_length, longest)
    fit = common.tokens_of(given.text, tokenizer, "calibration", given.sequences, length)
    test = common.tokens_of(given.text, tokenizer, "held-out", given.held_out, length)
    count = len(decoder_layers(model))
    layers = given.layers or list(range(count))
    unknown = [layer for layer in layers if not 0 <= layer < count]
    if unknown:
        raise ManifoldKVError(f"--layers {unknown[0]}: the model has layers 0 to {count - 1}")
    rank = rank_from_ratio(given.rank_ratio, attention_of(decoder_layers(model)[0]).head_dim)
    labels = {"model": given.model, "text": given.text, "sequences": given.sequences}
    labels |= {"length": length, "rank": rank, "threads": given.threads}
    stored = checkpoints.made_by(LayerOutput, Predictor, RiemannianAdam).keyed(
        weights=digest_of_model(model),
        tokens=digest_of_tokens(fit),
        held_out=digest_of_tokens(test),
        rank=rank,
        threads=given.threads,
    )
    frames = []
    pairs = zip(capture(model, fit, layers), capture(model, test, layers), strict=True)
    for calibration, held_out in tqdm(pairs, total=len(layers), desc="layers", disable=None):
        for site in SITES:
            problem = _Counting(calibration, site)
            for solver, label in _solvers(given):
                of_run: dict[str, Any] = {"layer": calibration.layer, "site": site}
                of_run |= {"solver": label[0], "size": label[1]}
                run = partial(_solved, problem, solver, rank, held_out, site)
                row = stored.keyed(**of_run).frame("solve", run)
                frames.append(row.assign(**labels, **of_run))
    return pd.concat(frames, ignore_index=True)


def _solvers(given: argparse.Namespace) -> Iterator[tuple[Solver, tuple[str, int]]]:
    for budget in given.budgets:
        yield RiemannianAdam(steps=budget), ("riemannian-adam", budget)
    for epochs in given.epochs:
        yield Predictor(epochs=epochs), ("predictor", epochs)


class _Counting(Problem):
    """The layer-output problem with a count of the query rows it evaluates."""

    def __init__(self, activations: LayerActivations, site: Site) -> None:
        grouping = HeadGrouping(GROUPINGS[site], activations.kv_heads)
        super().__init__(LayerOutput(), activations, site, grouping)
        super().loss(self.initial(1), Batch(torch.arange(1)))  # computes the terms that are cached
        self.rows = 0

    def loss(self, basis: Basis, batch: Batch | None = None) -> Tensor:
        length, sequences = self.activations.length, self.activations.sequences
        if batch is None:
            self.rows += length * sequences
        else:
            self.rows += len(batch.sequences) * (length if batch.rows is None else len(batch.rows))
        return super().loss(basis, batch)


def _solved(
    problem: _Counting, solver: Solver, rank: int, held_out: LayerActivations, site: Site
) -> pd.DataFrame:
    problem.rows = 0
    start = time.perf_counter()
    solution = solver.solve(problem, rank)
    seconds = time.perf_counter() - start
    basis = solution.basis
    errors = layer_errors(
        held_out, basis if site == "key" else None, basis if site == "value" else None
    )
    return pd.DataFrame(
        {
            "seconds": [seconds],
            "layer_tokens": problem.rows,
            "entries": len(solution.history),
            "held_out_error": errors.layer_output_error,
        }
    )


# Report


def relative(results: pd.DataFrame) -> pd.DataFrame:
    """Return the results with errors relative to the predictor's lowest of the same problem."""
    keys = ["layer", "site"]
    of_predictor = results[results["solver"] == "predictor"]
    lowest = of_predictor.groupby(keys)["held_out_error"].min().rename("lowest").reset_index()
    joined = results.merge(lowest, on=keys)
    return joined.assign(error=joined["held_out_error"] / joined["lowest"] - 1)


def at_equal_error(runs: pd.DataFrame, tolerance: float) -> pd.DataFrame:
    """Return, for every problem, how much cheaper riemannian-adam reaches a tolerance.

    Parameters
    ----------
    runs : DataFrame
        From `relative`.
    tolerance : float
        Accepted error above the predictor's lowest held-out error, relative to it.
    """
    near = runs[runs["error"] <= tolerance].sort_values("seconds")

    def cheapest(solver: str) -> pd.DataFrame:
        by_problem = near[near["solver"] == solver].groupby(["layer", "site"])
        return by_problem[["seconds", "layer_tokens"]].first()

    times = (cheapest("predictor") / cheapest("riemannian-adam")).dropna()  # where both reach it
    return times.rename(columns={"seconds": "times_faster", "layer_tokens": "times_fewer"})


def draw(results: pd.DataFrame) -> dict[str, Figure]:
    figure = Figure(figsize=(7.6, 4.0), layout="constrained")
    runs = relative(results)
    for axes, site in zip(figure.subplots(1, 2, sharex=True, sharey=True), SITES, strict=True):
        of_site = runs[runs["site"] == site]
        for solver, of_solver in of_site.groupby("solver", sort=False):
            by_size = of_solver.groupby("size")[["seconds", "error"]]
            mean, low, high = by_size.mean(), by_size.min(), by_size.max()
            mark = mark_of(str(solver))
            axes.plot(mean["seconds"], 100 * mean["error"], ms=4.5, label=solver, **mark.style)
            band = (100 * low["error"], 100 * high["error"])
            axes.fill_between(mean["seconds"], *band, color=mark.colour, alpha=0.15, linewidth=0)
            away = 8 if solver == "predictor" else -8
            for index, (size, (x, y)) in enumerate(mean.iterrows()):
                axes.annotate(
                    str(size),
                    (x, 100 * y),
                    xytext=(0, away * (1 + index % 2)),
                    textcoords="offset points",
                    **{"fontsize": 7, "color": mark.colour, "ha": "center", "va": "center"},
                )
        reference(axes, 0, "the predictor's lowest")
        y = "held-out error above the predictor's lowest, %" if site == SITES[0] else ""
        label_axes(axes, "seconds per layer", y, f"{site}s")
        axes.margins(y=0.12)
    for axes in figure.axes:
        logarithmic(axes, x=True)
    legend_below(figure)
    title_above(figure, f"{Path(results['model'].iloc[0]).name}: {_finding(runs)}")
    return {"error_against_seconds": figure}


def _finding(runs: pd.DataFrame) -> str:
    """Return the title: how much sooner riemannian-adam reaches the largest tolerance."""
    tolerance, problems = TOLERANCES[-1], runs.groupby(["layer", "site"]).ngroups
    times = at_equal_error(runs, tolerance)
    numbers = "numbers are epochs of the predictor and steps of riemannian-adam"
    if times.empty:
        return f"layer-output error against solving time; {numbers}"
    return (
        f"riemannian-adam comes within {tolerance:.0%} of the predictor's lowest layer-output "
        f"error {times['times_faster'].median():.1f} times sooner (median of the {len(times)} of "
        f"{problems} problems where both do); {numbers}"
    )


def summary(results: pd.DataFrame, name: str, given: argparse.Namespace) -> list[str]:
    runs, first = relative(results), results.iloc[0]
    layers = sorted(set(results["layer"]))
    lines = [
        f"# Solvers of the layer-output problem on {name}",
        "",
        f"Layers {', '.join(map(str, layers))}; {first['sequences']} calibration sequences of "
        f"{first['length']} tokens, rank {first['rank']}, keys shared and values per head. Errors "
        f"on {given.held_out} held-out sequences, against the lowest that the predictor reaches on "
        f"the same problem at any number of epochs. {common.counted(first['threads'], 'thread')}; "
        "seed 0. The band of the figure is the range over layers.",
        "",
        "How many times sooner riemannian-adam gets there: the cheapest run of each solver that "
        "comes within a tolerance of that error, median (least to most) over layers and sites "
        "where both do.",
        "",
    ]
    problems = runs.groupby(["layer", "site"]).ngroups
    rows = []
    for tolerance in TOLERANCES:
        times = at_equal_error(runs, tolerance)
        if times.empty:
            rows.append([f"{tolerance:.1%}", "-", "-", f"0 of {problems}"])
            continue
        faster, fewer = times["times_faster"], times["times_fewer"]
        rows.append(
            [
                f"{tolerance:.1%}",
                f"{faster.median():.1f} ({faster.min():.1f} to {faster.max():.1f})",
                f"{fewer.median():.0f}",
                f"{len(times)} of {problems}",
            ]
        )
    columns = ["tolerance", "times sooner", "times fewer layer-token evaluations", "reached"]
    lines += [*common.table(columns, rows), "", "All runs, means over layers:", ""]
    rows = []
    for (site, solver, size), part in runs.groupby(["site", "solver", "size"]):
        unit = "epochs" if solver == "predictor" else "steps"
        rows.append(
            [
                *(str(site), str(solver), f"{size} {unit}"),
                f"{part['error'].mean():+.2%} ({part['error'].max():+.2%})",
                f"{part['seconds'].mean():.1f}",
                f"{part['layer_tokens'].mean():.3g}",
            ]
        )
    columns = ["site", "solver", "size", "error (worst layer)", "seconds", "layer-tokens"]
    return [*lines, *common.table(columns, rows)]


if __name__ == "__main__":
    sys.exit(main())
