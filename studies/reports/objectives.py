"""The figures, tables and captions of compare_objectives, from its results."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import common
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from manifoldkv.evaluate.diagnostics.figures import mark_of
from manifoldkv.evaluate.diagnostics.figures.style import (
    ERROR_LABELS,
    finished,
    label_axes,
    panels,
    reference,
    title_above,
)

SITE_TITLES = {"key": "keys", "value": "values", "both": "keys and values"}
ERRORS = tuple(ERROR_LABELS)
CAPS = ("epochs", "steps", "sequences", "sequence_length")
"""Columns of results.csv, the same in every row, which captions are written from."""
LONG_RUN = (
    "The long run, --full, adds rank ratio 0.75, two more seeds (the spread over them), twice the "
    "tokens, all epochs and steps of the solvers, and error against solving time, in about an hour "
    "and a half."
)
BASELINE = "eigen-attention"
COMPARED = ("layer_output_error", "attention_output_error")
ERROR = "layer_output_error"


def figures(results: pd.DataFrame) -> dict[str, Figure]:
    drawn = {
        "errors_per_layer": errors_per_layer(results),
        "error_against_rank": error_against_rank(results),
    }
    for figure in drawn.values():
        title_above(figure, f"{figure.get_suptitle()}\n{caption(results)}")
    return drawn


def caption(results: pd.DataFrame) -> str:
    """Return the settings that differ from the paper's defaults."""
    epochs, steps, sequences, length = results[list(CAPS)].iloc[0]
    return (
        f"predictor: {epochs} epochs at most (paper: 50); descents: {steps} steps at most (not in "
        f"the paper); {sequences} calibration sequences of {length} tokens (paper: 512 of "
        f"2,048); {common.counted(results['seed'].nunique(), 'seed')}"
    )


def summary(results: pd.DataFrame, given: argparse.Namespace, skipped: list[str]) -> list[str]:
    held_out = results[results["split"] == "held-out"]
    layers = sorted(set(held_out["layer"]))
    lines = [
        f"# Objectives and solvers on {Path(given.model).name}",
        "",
        f"Errors on held-out text, means over layers {', '.join(map(str, layers))} and seeds "
        f"{', '.join(map(str, given.seeds))}; best of each column in bold. Text: {given.text}, "
        + (f"evaluated on {given.eval_text}" if given.eval_text else "a fifth held out")
        + f"; {given.sequences} sequences of {given.sequence_length} tokens in each split. Keys "
        f"are projected {given.rotary}-rotation, the other site is exact unless the table says "
        f"both. Seconds are per layer, on {common.counted(given.threads, 'thread')}. "
        + ("± is the standard deviation over seeds. " if len(set(given.seeds)) > 1 else "")
        + f"Settings: {caption(results)}.",
    ]
    if given.rotary == "pre" and "kq-svd" in given.objectives:
        lines += ["", "kq-svd uses unrotated queries and keys here, as keys are stored unrotated."]
    for site, title in SITE_TITLES.items():
        for rank, part in held_out[held_out["site"] == site].groupby("rank"):
            ratio = part["rank_ratio"].iloc[0]
            lines += [
                "",
                f"## {title.capitalize()}, rank {rank} (ratio {ratio:.3g})",
                "",
                *table(part),
            ]
    if skipped:
        lines += ["", "## Not solved", "", *[f"- {line}" for line in skipped]]
    return lines if given.full else [*lines, "", LONG_RUN]


def table(part: pd.DataFrame) -> list[str]:
    keys = ["objective", "solver", "key_grouping", "value_grouping"]
    by_seed = part.groupby([*keys, "seed"], sort=False)[[*ERRORS, "seconds"]].mean()
    means = by_seed.groupby(level=keys, sort=False).mean()
    spread = by_seed.groupby(level=keys, sort=False).std()
    cells = pd.DataFrame(index=means.index)
    for column in ERRORS:
        best = means[column].max() if column == "cosine_similarity" else means[column].min()
        texts = [
            f"{mean:.4f}" + ("" if pd.isna(std) else f" ± {std:.4f}")
            for mean, std in zip(means[column], spread[column], strict=True)
        ]
        cells[column] = [
            f"**{text}**" if mean == best else text
            for text, mean in zip(texts, means[column], strict=True)
        ]
    cells["seconds"] = [f"{seconds:.2f}" for seconds in means["seconds"]]
    cells = cells.reset_index().rename(columns=lambda name: name.replace("_", " "))
    return common.table(list(cells.columns), cells.to_numpy().tolist())


def errors_per_layer(results: pd.DataFrame) -> Figure:
    """Draw the errors of every objective relative to EigenAttention's, by layer, site and error.

    Parameters
    ----------
    results : DataFrame
        ``results.csv`` of compare_objectives. Each objective is drawn at the smallest rank, with
        the solver that has its lowest mean layer-output error; the band spans the seeds. Without
        EigenAttention the first objective is the baseline.
    """
    held_out = _at_smallest_rank(results)
    sites = _in_order(held_out["site"])
    figure = Figure(figsize=(3.1 * len(sites), 5.6), layout="constrained")
    grid = figure.subplots(len(COMPARED), len(sites), squeeze=False, sharex=True, sharey="row")
    for column, site in enumerate(sites):
        series = _series(held_out[held_out["site"] == site])
        baseline = next((s for s in series if s[0] == BASELINE), series[0])
        level = _best_solver(baseline[2]).groupby("layer")[list(COMPARED)].mean()
        for axes, error in zip(grid[:, column], COMPARED, strict=True):
            reference(axes, 0, f"{baseline[0]} (0)")
            for name, style, frame in series:
                if name != baseline[0]:
                    rows = _best_solver(frame)
                    of_layer = rows["layer"].map(level[error])
                    above = rows.assign(above=100 * (rows[error] / of_layer - 1))
                    _line(axes, above, "layer", "above", name, style)
            label = f"{ERROR_LABELS[error]},\n% above {baseline[0]}'s" if column == 0 else ""
            label_axes(axes, "layer" if error == COMPARED[-1] else "", label)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        grid[0][column].set_title(SITE_TITLES[site], fontsize=9)
    rank, lowest = int(held_out["rank"].iloc[0]), _lowest(held_out, sites[-1])
    return finished(figure, f"{_model(results)}, rank {rank}, held-out text: {lowest}")


def error_against_rank(results: pd.DataFrame) -> Figure:
    """Draw held-out layer-output error, mean over layers, against rank ratio."""
    held_out = results[results["split"] == "held-out"]
    sites = _in_order(held_out["site"])
    figure, row = panels(len(sites), 3.2, 3.4)
    for axes, site in zip(row, sites, strict=True):
        for name, style, frame in _series(held_out[held_out["site"] == site]):
            best = pd.concat(_best_solver(part) for _, part in frame.groupby("rank"))
            means = best.groupby(["rank_ratio", "seed"])[ERROR].mean().reset_index()
            _line(axes, means, "rank_ratio", ERROR, name, style)
        y = "layer-output error, held out" if axes is row[0] else ""
        label_axes(axes, "rank r / head_dim", y, SITE_TITLES[site])
        axes.set_ylim(bottom=0)
    ranks = held_out.groupby("rank_ratio")
    lowest = "; ".join(f"at {ratio:.3g}, {_lowest(part, sites[-1])}" for ratio, part in ranks)
    return finished(figure, f"{_model(results)}, means over layers: {lowest}")


def _at_smallest_rank(results: pd.DataFrame) -> pd.DataFrame:
    held_out = results[results["split"] == "held-out"]
    return held_out[held_out["rank"] == held_out["rank"].min()]


def _series(at_site: pd.DataFrame) -> list[tuple[str, dict[str, Any], pd.DataFrame]]:
    """Return name, style and rows of every line: one per objective and grouping of its keys.

    The name leaves out the grouping of most rows.
    """
    usual = at_site["key_grouping"].mode()[0]
    groups = at_site.groupby(["objective", "key_grouping"], sort=False)
    named = {
        str(objective) if grouping == usual else f"{objective}, {_grouped(grouping)}": rows
        for (objective, grouping), rows in groups
    }
    return [
        (name, {**mark_of(name, list(named)).style, "markersize": 4.5}, rows)
        for name, rows in named.items()
    ]


def _grouped(grouping: object) -> str:
    return "a basis per head" if str(grouping) == "1" else f"key grouping {grouping}"


def _line(
    axes: Axes, frame: pd.DataFrame, x: str, y: str, label: str, style: dict[str, Any]
) -> None:
    by_x = frame.groupby(x)[y]
    mean = by_x.mean()
    axes.plot(mean.index, mean, label=label, **style)
    if len(set(frame["seed"])) > 1:
        low, high = by_x.min(), by_x.max()
        axes.fill_between(mean.index, low, high, color=style["color"], alpha=0.2, linewidth=0)


def _best_solver(frame: pd.DataFrame) -> pd.DataFrame:
    columns = ["solver", "key_grouping", "value_grouping"]
    parts = [part for _, part in frame.groupby(columns)]
    return min(parts, key=lambda part: float(part[ERROR].mean()))


def _lowest(held_out: pd.DataFrame, site: str) -> str:
    """Return the objectives with the lowest and the highest mean error at a site, as a clause."""
    series = _series(held_out[held_out["site"] == site])
    means = sorted((_best_solver(rows)[ERROR].mean(), name) for name, _, rows in series)
    (low, best), (high, worst) = means[0], means[-1]
    clause = f"of {SITE_TITLES[site]}, {best} has the lowest layer-output error ({low:.3f}"
    return clause + (")" if len(means) == 1 else f"; {worst} the highest, {high:.3f})")


def _in_order(column: pd.Series) -> list[str]:
    present = set(column)
    return [name for name in SITE_TITLES if name in present]


def _model(results: pd.DataFrame) -> str:
    return str(results["model"].iloc[0])
