"""Figures of objectives and solvers, drawn from the results of compare_objectives."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from manifoldkv.figures.style import ERROR_LABELS, colour_of, legend_below

MARKERS = {"closed-form": "o", "predictor": "s", "riemannian-adam": "^"}
SITE_TITLES = {"key": "keys", "value": "values", "both": "keys and values"}


def errors_per_layer(results: pd.DataFrame) -> Figure:
    """Draw held-out errors against layer: a line per objective, a panel per site and error.

    Parameters
    ----------
    results : DataFrame
        ``results.csv`` of compare_objectives. Each objective is drawn at the smallest rank, with
        the solver that has its lowest mean layer-output error; the band spans the seeds.
    """
    held_out = results[results["split"] == "held-out"]
    held_out = held_out[held_out["rank"] == held_out["rank"].min()]
    sites = _in_order(held_out["site"], SITE_TITLES)
    figure = Figure(figsize=(9.0, 2.6 * len(sites)), layout="constrained")
    panels = figure.subplots(len(sites), len(ERROR_LABELS), squeeze=False, sharex=True)
    for row, site in zip(panels, sites, strict=True):
        series = _series(held_out[held_out["site"] == site])
        for axes, (column, label) in zip(row, ERROR_LABELS.items(), strict=True):
            for name, style, frame in series:
                _line(axes, _best_solver(frame), "layer", column, name, style)
            axes.set_title(f"{SITE_TITLES[site]}", fontsize=9)
            axes.set_ylabel(label, fontsize=8)
            axes.tick_params(labelsize=7)
            axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in panels[-1]:
        axes.set_xlabel("layer", fontsize=8)
    legend_below(figure, panels[0][0])
    ratio = float(held_out["rank_ratio"].iloc[0])
    figure.suptitle(
        f"{_model(results)}: errors on held-out text, rank {int(held_out['rank'].iloc[0])} "
        f"(ratio {ratio:.3g}), best solver of each objective",
        fontsize=10,
    )
    return figure


def error_against_rank(results: pd.DataFrame) -> Figure:
    """Draw held-out layer-output error, mean over layers, against rank ratio."""
    held_out = results[results["split"] == "held-out"]
    sites = _in_order(held_out["site"], SITE_TITLES)
    figure = Figure(figsize=(3.2 * len(sites), 3.2), layout="constrained")
    for axes, site in zip(figure.subplots(1, len(sites), squeeze=False)[0], sites, strict=True):
        for name, style, frame in _series(held_out[held_out["site"] == site]):
            best = pd.concat(_best_solver(part) for _, part in frame.groupby("rank"))
            means = best.groupby(["rank_ratio", "seed"])["layer_output_error"].mean().reset_index()
            _line(axes, means, "rank_ratio", "layer_output_error", name, style)
        axes.set_title(SITE_TITLES[site], fontsize=9)
        axes.set_xlabel("achieved rank ratio r / d", fontsize=8)
        axes.set_ylabel("layer-output error, held out", fontsize=8)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=7)
    legend_below(figure, figure.axes[0])
    figure.suptitle(
        f"{_model(results)}: error against rank, mean over layers, best solver of each objective",
        fontsize=10,
    )
    return figure


def error_against_seconds(results: pd.DataFrame) -> Figure:
    """Draw held-out layer-output error against solving time: colour objective, marker solver."""
    held_out = results[(results["split"] == "held-out") & (results["site"] != "both")]
    held_out = held_out[held_out["rank"] == held_out["rank"].min()]
    sites = _in_order(held_out["site"], SITE_TITLES)
    figure = Figure(figsize=(4.2 * len(sites), 3.6), layout="constrained")
    for axes, site in zip(figure.subplots(1, len(sites), squeeze=False)[0], sites, strict=True):
        at_site = held_out[held_out["site"] == site]
        names = list(dict.fromkeys(at_site["objective"]))
        groups = at_site.groupby(["objective", "solver", "key_grouping", "value_grouping"])
        for (objective, solver, *_), group in groups:
            axes.plot(
                group["seconds"].mean(),
                group["layer_output_error"].mean(),
                linestyle="none",
                marker=MARKERS.get(solver, "D"),
                color=colour_of(objective, names),
                markersize=7,
            )
        for name in names:
            axes.plot(
                [],
                [],
                linestyle="none",
                marker="_",
                mew=4,
                label=name,
                color=colour_of(name, names),
            )
        for solver in dict.fromkeys(at_site["solver"]):
            axes.plot(
                [],
                [],
                linestyle="none",
                marker=MARKERS.get(solver, "D"),
                color="#444444",
                label=solver,
            )
        axes.set_title(SITE_TITLES[site], fontsize=9)
        axes.set_xscale("log")
        axes.set_xlabel("seconds per layer", fontsize=8)
        axes.set_ylabel("layer-output error, held out", fontsize=8)
        axes.tick_params(labelsize=7, which="both")
    legend_below(figure, figure.axes[0])
    figure.suptitle(
        f"{_model(results)}: error against solving time, mean over layers, rank "
        f"{int(held_out['rank'].iloc[0])}",
        fontsize=10,
    )
    return figure


def _series(at_site: pd.DataFrame) -> list[tuple[str, dict[str, Any], pd.DataFrame]]:
    """Return label, style and rows of every line: one per objective and grouping of its keys.

    The label does not name the grouping that most rows have.
    """
    usual = at_site["key_grouping"].mode()[0]
    names = list(dict.fromkeys(at_site["objective"]))
    series: list[tuple[str, dict[str, Any], pd.DataFrame]] = []
    for (objective, grouping), rows in at_site.groupby(["objective", "key_grouping"], sort=False):
        name = str(objective)
        style = {"color": colour_of(name, names), "linestyle": "-"}
        if grouping == usual:
            series.append((name, style, rows))
        else:
            label = f"{name}, key grouping {grouping}"
            series.append((label, style | {"linestyle": "--"}, rows))
    return series


def _line(
    axes: Axes, frame: pd.DataFrame, x: str, y: str, label: str, style: dict[str, Any]
) -> None:
    by_x = frame.groupby(x)[y]
    mean = by_x.mean()
    axes.plot(mean.index, mean, marker="o", markersize=3.5, label=label, **style)
    if len(set(frame["seed"])) > 1:
        low, high = by_x.min(), by_x.max()
        axes.fill_between(mean.index, low, high, color=style["color"], alpha=0.2, linewidth=0)


def _best_solver(frame: pd.DataFrame) -> pd.DataFrame:
    columns = ["solver", "key_grouping", "value_grouping"]
    parts = [part for _, part in frame.groupby(columns)]
    return min(parts, key=lambda part: float(part["layer_output_error"].mean()))


def _in_order(column: pd.Series, known: dict[str, str]) -> list[str]:
    present = set(column)
    return [name for name in known if name in present]


def _model(results: pd.DataFrame) -> str:
    return str(results["model"].iloc[0])
