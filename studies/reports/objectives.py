"""The verdict, tables, figure and captions of compare_objectives, from its results."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import common
import pandas as pd
from matplotlib.figure import Figure

from manifoldkv.evaluate.diagnostics.figures import mark_of
from manifoldkv.evaluate.diagnostics.figures.style import (
    ERROR_LABELS,
    finished,
    label_axes,
    panels,
)
from manifoldkv.evaluate.perplexity import with_error

SITE_TITLES = {"key": "keys", "value": "values", "both": "keys and values"}
ERRORS = tuple(ERROR_LABELS)
CAPS = ("epochs", "steps", "sequences", "sequence_length")
"""Columns of results.csv, the same in every row, which captions are written from."""
LONG_RUN = (
    "The long run, --full, adds two more seeds (the spread over them), twice the tokens, all "
    "epochs and steps, oblique and nested bases, keys and values by themselves, and error against "
    "solving time, in about an hour and a half."
)
BASELINE = "eigen-attention"
ERROR = "layer_output_error"
MOST_ROWS = 8
"""Of the verdict."""


def verdict(results: pd.DataFrame, coded: pd.DataFrame) -> list[str]:
    """Return the table of objectives, each with its best solver, and two sentences about it."""
    errors, solvers = best_errors(results)
    losses = coded.set_index("objective")
    names = [*errors.index, *(name for name in losses.index if name not in errors.index)]
    rows = []
    for name in names[:MOST_ROWS]:
        found = errors.loc[name] if name in errors.index else [float("nan")] * len(errors.columns)
        cells = ["-" if pd.isna(error) else f"{error:.4f}" for error in found]
        rows.append([name, solvers.get(name, "-"), *cells, _loss(losses.loc[name])])
    of_ranks = [f"error at rank ratio {ratio:.3g}" for ratio in errors.columns]
    columns = ["objective", "best solver", *of_ranks, "coded at 1/8, nats"]
    return [*common.table(columns, rows), "", in_words(errors), in_words_coded(coded)]


def best_errors(results: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, str]]:
    """Return layer-output errors by objective and rank ratio, best first, and their solvers.

    Errors are of keys and values together, or of the last site that was measured, means over layers
    and seeds. Bases are shared by as many heads as most are.
    """
    rows = results[results["site"] == [x for x in SITE_TITLES if x in set(results["site"])][-1]]
    for column in ("key_grouping", "value_grouping"):
        rows = rows[rows[column] == rows[column].mode()[0]]
    pairs = ["objective", "solver"]
    means = rows.pivot_table(ERROR, index=pairs, columns="rank_ratio", sort=False)
    best = means.mean(axis=1).groupby("objective").idxmin()
    errors = means.loc[list(best)].droplevel("solver")
    return errors.loc[errors[_half(errors)].sort_values().index], dict(best.str[1])


def in_words(errors: pd.DataFrame) -> str:
    """Return what the errors at half the rank say."""
    ratio = _half(errors)
    (first, least), *others = errors[ratio].items()
    where = "half the rank" if ratio == 0.5 else f"{ratio:.3g} of the rank"
    text = f"At {where} {first} has the least error at the layer's output ({least:.3f})"
    if others:
        text += f", {others[0][0]} next ({others[0][1]:.3f})"
    further = dict(others[1:])
    if further:
        name = BASELINE if BASELINE in further else list(further)[-1]
        text += f"; {name} {further[name]:.3f}"
    return text + "."


def in_words_coded(coded: pd.DataFrame) -> str:
    """Return what the added losses say."""
    measured = _by_loss(coded)
    if measured.empty:
        return "No objective has a metric, so that none makes coded caches."
    first, *others = [f"{row.objective} adds {_loss(row)}" for row in measured.itertuples()]
    further = "".join(f", {text.replace(' adds', '')}" for text in others)
    return (
        f"Coded at an eighth of the bytes, {first} nats per token{further} (± the standard error "
        f"over {common.counted(int(measured['sequences'].iloc[0]), 'sequence')})."
    )


def _half(errors: pd.DataFrame) -> float:
    return min(map(float, errors.columns), key=lambda ratio: abs(ratio - 0.5))


def _by_loss(coded: pd.DataFrame) -> pd.DataFrame:
    return coded.dropna(subset="added_nll").sort_values("added_nll")


def _loss(row: Any) -> str:
    """Return an added loss with its standard error, or a dash."""
    return "-" if pd.isna(row.added_nll) else with_error(row.added_nll, row.nll_error)


def figures(results: pd.DataFrame, coded: pd.DataFrame | None) -> dict[str, Figure]:
    return {"overview": overview(results, coded)}


def caption(results: pd.DataFrame) -> str:
    """Return the settings that differ from the paper's defaults."""
    epochs, steps, sequences, length = results[list(CAPS)].iloc[0]
    return (
        f"predictor: {epochs} epochs at most (paper: 50); descents: {steps} steps at most (not in "
        f"the paper); {sequences} calibration sequences of {length} tokens (paper: 512 of "
        f"2,048); {common.counted(results['seed'].nunique(), 'seed')}"
    )


def summary(
    results: pd.DataFrame, coded: pd.DataFrame, given: argparse.Namespace, skipped: list[str]
) -> list[str]:
    layers = sorted(set(results["layer"]))
    lines = [
        f"# Objectives and solvers on {Path(given.model).name}",
        "",
        f"Errors on held-out text, means over layers {', '.join(map(str, layers))} and seeds "
        f"{', '.join(map(str, given.seeds))}; best of each column in bold. Text: {given.text}, "
        + (f"evaluated on {given.eval_text}" if given.eval_text else "a fifth held out")
        + f"; {given.sequences} sequences of {given.sequence_length} tokens in each split. Keys "
        f"are projected {given.rotary}-rotation, the other site is exact unless the table says "
        f"both. Seconds are per layer, on 1 thread. "
        + ("± is the standard deviation over seeds. " if len(set(given.seeds)) > 1 else "")
        + f"Settings: {caption(results)}.",
    ]
    if given.rotary == "pre" and "kq-svd" in given.objectives:
        lines += ["", "kq-svd uses unrotated queries and keys here, as keys are stored unrotated."]
    for site, title in SITE_TITLES.items():
        for rank, part in results[results["site"] == site].groupby("rank"):
            ratio = part["rank_ratio"].iloc[0]
            lines += [
                "",
                f"## {title.capitalize()}, rank {rank} (ratio {ratio:.3g})",
                "",
                *table(part),
            ]
    columns = ["objective", "added loss, nats per token", ""]
    reasons = coded["reason"].astype(object).fillna("")
    rows = [
        [x.objective, _loss(x), why] for x, why in zip(coded.itertuples(), reasons, strict=True)
    ]
    lines += ["", "## Coded at an eighth of the bytes", "", *common.table(columns, rows)]
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


def overview(results: pd.DataFrame, coded: pd.DataFrame | None) -> Figure:
    """Draw errors by rank relative to EigenAttention's, and losses of coded caches if measured.

    Parameters
    ----------
    results : DataFrame
        ``results.csv``. Without EigenAttention the worst objective is the baseline.
    coded : DataFrame, optional
        ``coded.csv``.
    """
    errors, _ = best_errors(results)
    baseline = BASELINE if BASELINE in errors.index else str(errors.index[-1])
    losses = pd.DataFrame() if coded is None else _by_loss(coded)
    figure, (left, *right) = panels(*((1, 7.0) if losses.empty else (2, 4.2)))
    names = [*dict.fromkeys([*errors.index, *losses.get("objective", [])])]
    for name, error in (100 * (errors / errors.loc[baseline] - 1)).iterrows():
        left.plot(error.index, error, label=name, ms=5, **mark_of(str(name), names).style)
    left.set_xticks(errors.columns)
    label_axes(
        *(left, "rank r / head_dim", f"layer-output error, held out,\n% above {baseline}'s"),
        "at equal rank",
    )
    for axes in right:
        for place, (_, row) in enumerate(losses.iterrows()):
            style = {**mark_of(str(row["objective"]), names).style, "linestyle": "none"}
            axes.errorbar(place, row["added_nll"], row["nll_error"], ms=7, capsize=3, **style)
        axes.set_xticks(range(len(losses)), losses["objective"])
        axes.margins(x=0.15)
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        label_axes(axes, "", "added loss, nats per token", "coded, at an eighth of the bytes")
    return finished(figure, f"{results['model'].iloc[0]}. {in_words(errors)}")
