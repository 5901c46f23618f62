"""The figure and the tables of solving times, from their results."""

from __future__ import annotations

from itertools import product
from typing import Any

import common
import pandas as pd
from efficiency import NESTED, SEPARATE, SIZES
from matplotlib.figure import Figure

from manifoldkv.core.basis import SITES
from manifoldkv.evaluate.diagnostics.figures import legend_below, mark_of
from manifoldkv.evaluate.diagnostics.figures.style import (
    label_axes,
    logarithmic,
    reference,
    title_above,
)

PROBLEM = ["layer", "site"]
NESTED_COLUMNS = ["nested", "against", "site", "times sooner", "error above"]
TOLERANCES = (0.0, 0.005, 0.01)
"""Accepted errors above the predictor's lowest, relative to it."""


def curves(results: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of growing size, with errors relative to the predictor's lowest."""
    runs = results[results["size"] > 0]
    of_predictor = runs[runs["solver"] == "predictor"]
    lowest = of_predictor.groupby(PROBLEM)["held_out_error"].min().rename("lowest").reset_index()
    joined = runs.merge(lowest, on=PROBLEM)
    return joined.assign(error=joined["held_out_error"] / joined["lowest"] - 1)


def at_equal_error(runs: pd.DataFrame, solver: str, tolerance: float) -> pd.Series:
    """Return how many times sooner than the predictor a solver reaches a tolerance, by problem.

    Parameters
    ----------
    runs : DataFrame
        From `curves`.
    solver : str
        Name of a solver.
    tolerance : float
        Accepted error above the predictor's lowest held-out error, relative to it.

    Returns
    -------
    Series
        Seconds of the predictor's quickest run within the tolerance, over those of the solver's
        quickest; NaN where the solver does not reach it.
    """
    near = runs[runs["error"] <= tolerance]

    def quickest(name: str) -> pd.Series:
        return near[near["solver"] == name].groupby(PROBLEM)["seconds"].min()

    reached = quickest("predictor")
    return reached / quickest(solver).reindex(reached.index)


def nested_against_separate(results: pd.DataFrame) -> pd.DataFrame:
    """Return seconds and error of nested bases relative to separately solved ones.

    Returns
    -------
    DataFrame
        ``layer, site, nested, solver, rank``, ``times_sooner`` (seconds of all ranks, over those of
        the nested bases) and ``error`` (relative to that of the solver at this rank).
    """
    whole = results[results["size"] == 0]
    rows = []
    for name, solver in product(NESTED, SEPARATE):
        nested = whole[whole["solver"] == name].set_index([*PROBLEM, "rank"])
        own = whole[whole["solver"] == solver]
        if own.empty or nested.empty:
            continue
        total = own.groupby(PROBLEM)["seconds"].sum().rename("total").reset_index()
        joined = own.merge(total, on=PROBLEM).set_index([*PROBLEM, "rank"])
        rows.append(
            pd.DataFrame(
                {
                    "nested": name,
                    "solver": solver,
                    "times_sooner": joined["total"] / nested["seconds"],
                    "error": nested["held_out_error"] / joined["held_out_error"] - 1,
                }
            ).reset_index()
        )
    return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame()


def figures(results: pd.DataFrame) -> dict[str, Figure]:
    return {"error_against_seconds": error_against_seconds(results)}


def error_against_seconds(results: pd.DataFrame) -> Figure:
    """Draw held-out error above the predictor's lowest against seconds, a line for each solver."""
    figure = Figure(figsize=(8.0, 4.4), layout="constrained")
    runs = curves(results)
    for axes, site in zip(figure.subplots(1, 2, sharex=True, sharey=True), SITES, strict=True):
        of_site = runs[runs["site"] == site]
        for solver, of_solver in of_site.groupby("solver", sort=False):
            by_size = of_solver.groupby("size")[["seconds", "error"]]
            mean, low, high = by_size.mean(), by_size.min(), by_size.max()
            mark = mark_of(str(solver))
            label = f"{solver} ({', '.join(map(str, mean.index))} {SIZES[str(solver)][0]})"
            axes.plot(mean["seconds"], 100 * mean["error"], ms=4.5, label=label, **mark.style)
            band = (100 * low["error"], 100 * high["error"])
            axes.fill_between(mean["seconds"], *band, color=mark.colour, alpha=0.1, linewidth=0)
        reference(axes, 0, "the predictor's lowest")
        y = "held-out error above the predictor's lowest, %\n(linear to 1, logarithmic beyond)"
        label_axes(axes, "seconds per layer", y if site == SITES[0] else "", f"{site}s")
        axes.margins(y=0.12)
    for axes in figure.axes:
        logarithmic(axes, x=True)
        axes.set_yscale("symlog", linthresh=1.0)
        axes.yaxis.set_major_formatter("{x:g}")
    legend_below(figure)
    title_above(figure, _finding(results, runs))
    return figure


def _finding(results: pd.DataFrame, runs: pd.DataFrame) -> str:
    """Return the title: how much sooner the quickest solver reaches the predictor's error."""
    tolerance = TOLERANCES[1]
    model, problems = results["model"].iloc[0], runs.groupby(PROBLEM).ngroups
    of_solvers = {
        str(name): at_equal_error(runs, str(name), tolerance).dropna()
        for name in runs["solver"].unique()
        if name != "predictor"
    }
    reached = {name: times for name, times in of_solvers.items() if len(times)}
    if not reached:
        return f"{model}: layer-output error against solving time; bands span the layers"
    name, times = max(reached.items(), key=lambda item: (len(item[1]), item[1].median()))
    return (
        f"{model}: {name} comes within {tolerance:.1%} of the predictor's lowest layer-output "
        f"error {times.median():.1f} times sooner (median of the {len(times)} of {problems} "
        "problems where it does); bands span the layers"
    )


def summary(results: pd.DataFrame) -> list[str]:
    """Return the lines of the summary, from the results of `efficiency.measure`."""
    runs, first = curves(results), results.iloc[0]
    lines = [
        "",
        "## Solving times",
        "",
        f"The layer-output problem on {first['sequences']} calibration sequences of "
        f"{first['length']} tokens, keys shared and values per head, rank {results['rank'].min()} "
        f"unless other ranks are named; errors on {first['held_out']} held-out sequences. "
        f"{common.counted(first['threads'], 'thread').capitalize()}; seed 0.",
        "",
        "How many times sooner a solver comes within a tolerance of the lowest held-out error that "
        "the predictor reaches at any number of epochs here: the quickest runs of both, median "
        "(least to most) over layers and sites, and of how many of them the solver reaches it.",
        "",
        *common.table(["solver", *(f"within {t:.1%}" for t in TOLERANCES)], _sooner(runs)),
        "",
        "All runs, means over layers, errors above the predictor's lowest:",
        "",
        *common.table(["site", "solver", "error (worst layer)", "seconds", "rows"], _all(runs)),
    ]
    compared = nested_against_separate(results)
    if not compared.empty:
        ranks = ", ".join(map(str, sorted(compared["rank"].unique())))
        lines += [
            "",
            f"Nested bases of ranks {ranks} by one solve, against a solve for each rank: how many "
            "times sooner, median (least to most) over layers, and their held-out error above that "
            "of bases of their own, mean (worst of a layer and rank).",
            "",
            *common.table(NESTED_COLUMNS, _nested(compared)),
        ]
    return lines


def _sooner(runs: pd.DataFrame) -> list[list[str]]:
    rows = []
    for name in runs["solver"].unique():
        if name == "predictor":
            continue
        cells = []
        for tolerance in TOLERANCES:
            times = at_equal_error(runs, name, tolerance)
            reached = times.dropna()
            span = f"{reached.median():.1f} ({reached.min():.1f} to {reached.max():.1f}), "
            cells.append((span if len(reached) else "") + f"{len(reached)} of {len(times)}")
        rows.append([name, *cells])
    return rows


def _all(runs: pd.DataFrame) -> list[list[str]]:
    rows = []
    for (site, solver, size), part in runs.groupby(["site", "solver", "size"], sort=False):
        rows.append(
            [
                *(str(site), f"{solver}, {size} {SIZES[str(solver)][0]}"),
                f"{part['error'].mean():+.2%} ({part['error'].max():+.2%})",
                f"{part['seconds'].mean():.1f}",
                f"{part['layer_tokens'].mean():.3g}",
            ]
        )
    return rows


def _nested(compared: pd.DataFrame) -> list[list[Any]]:
    rows = []
    columns = ["nested", "solver", "site"]
    for (nested, solver, site), part in compared.groupby(columns, sort=False):
        times = part["times_sooner"]
        rows.append(
            [
                *(nested, solver, site),
                f"{times.median():.1f} ({times.min():.1f} to {times.max():.1f})",
                f"{part['error'].mean():+.2%} ({part['error'].max():+.2%})",
            ]
        )
    return rows
