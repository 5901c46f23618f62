"""The figures and the table of the paper, from one DataFrame of evaluations.

An evaluation is one value measured on one model under one plan:

``model, method, policy, requested_ratio, point, ratio, bits, bytes_ratio, measure, of, value,
standard_error, seed``

``point`` tells the points of a line apart over seeds (the requested ratio, or an error budget);
``method`` is "uncompressed", "eigen-attention", "layer-output" or any other; ``policy`` how ranks
were chosen; ``measure`` "perplexity" or "accuracy"; ``of`` the corpus or task; ``bits`` those of
integer latents, 16 for exact ones.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from manifoldkv.figures.style import ERROR_LABELS, colour_of, legend_below, title_above

METHODS = {
    "uncompressed": "uncompressed",
    "eigen-attention": "EigenAttention",
    "layer-output": "StiefAttention",
}
POLICY_STYLES = {"sequential": "-", "uniform": "--", "optimal": ":", "threshold": "-."}
EXACT_BITS = 16


def accuracy(evaluations: pd.DataFrame, *, title: str) -> Figure:
    """Draw zero-shot accuracy against the achieved cache ratio, a panel per task."""
    part = _exact(evaluations, "accuracy")
    figure = _tradeoff(part, "accuracy, with standard errors")
    title_above(figure, title)
    return figure


def perplexities(evaluations: pd.DataFrame, *, title: str) -> Figure:
    """Draw perplexity against the achieved cache ratio, a panel per corpus, logarithmic."""
    figure = _tradeoff(_exact(evaluations, "perplexity"), "perplexity")
    for axes in figure.axes:
        _logarithmic(axes)
    title_above(figure, title)
    return figure


def policies(evaluations: pd.DataFrame, *, title: str) -> Figure:
    """Draw perplexity of one method against the achieved ratio, a line per rank rule."""
    part = _exact(evaluations, "perplexity")
    corpora = list(dict.fromkeys(part["of"]))
    figure, panels = _panels(len(corpora))
    for axes, corpus in zip(panels, corpora, strict=True):
        of_corpus = part[(part["of"] == corpus) & (part["method"] != "uncompressed")]
        for policy, line in of_corpus.groupby("policy", sort=False):
            style = {"linestyle": POLICY_STYLES.get(str(policy), "-"), "color": "#009E73"}
            _line(axes, line, "ratio", "point", str(policy), style)
        _finish(axes, corpus, "perplexity")
        _logarithmic(axes)
    legend_below(figure, figure.axes[0])
    title_above(figure, title)
    return figure


def quantization(evaluations: pd.DataFrame, *, title: str) -> Figure:
    """Draw perplexity against bytes: a line per method, a point per number of bits.

    Exact latents have a point too. Bytes are those of the cache with its scales over those of an
    uncompressed 16-bit one. Where latents are rotated before they are rounded, which the paper
    does not do, lines are dashed.
    """
    part = evaluations[evaluations["measure"] == "perplexity"]
    corpora = list(dict.fromkeys(part["of"]))
    figure, panels = _panels(len(corpora))
    names = list(dict.fromkeys(part["method"]))
    for axes, corpus in zip(panels, corpora, strict=True):
        of_corpus = part[part["of"] == corpus]
        exact = of_corpus[of_corpus["bits"] == EXACT_BITS]
        for (method, rotation), line in of_corpus.groupby(["method", "rotation"], sort=False):
            name, label = str(method), METHODS.get(str(method), str(method))
            style = _style(name, names)
            if rotation != "none":
                line = pd.concat([exact[exact["method"] == method], line])
                label, style = f"{label}, rotated ({rotation})", style | {"linestyle": "--"}
            _line(axes, line, "bytes_ratio", "bits", label, style)
            if (name, rotation) != (names[0], "none"):  # other labels would lie over each other
                continue
            means = line.groupby("bits")[["bytes_ratio", "value"]].mean()
            for bits, (x, y) in means.iterrows():
                label = "exact" if bits == EXACT_BITS else f"{bits} bit"
                axes.annotate(label, (x, y), fontsize=6, xytext=(3, 3), textcoords="offset points")
        _finish(axes, corpus, "perplexity")
        axes.set_xlabel("bytes / uncompressed 16-bit cache", fontsize=8)
        _logarithmic(axes)
    legend_below(figure, figure.axes[0])
    title_above(figure, title)
    return figure


def bases_comparison(diagnostics: pd.DataFrame, *, title: str) -> Figure:
    """Draw attention-output error, layer-output error and cosine similarity of every layer.

    Parameters
    ----------
    diagnostics : DataFrame
        As `diagnose` returns it, with a column ``method`` and one ``seed``.
    title : str
        Over the panels.
    """
    names = list(dict.fromkeys(diagnostics["method"]))
    figure, panels = _panels(len(ERROR_LABELS))
    for axes, (column, label) in zip(panels, ERROR_LABELS.items(), strict=True):
        for method, line in diagnostics.groupby("method", sort=False):
            name = str(method)
            numbers = line.assign(value=line[column])
            _line(axes, numbers, "layer", "layer", METHODS.get(name, name), _style(name, names))
        axes.set_xlabel("layer", fontsize=8)
        axes.set_ylabel(label, fontsize=8)
        axes.tick_params(labelsize=7)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_below(figure, figure.axes[0])
    title_above(figure, title)
    return figure


def rank_profile(ranks: pd.DataFrame, *, title: str) -> Figure:
    """Draw retained rank r / head_dim of every layer, mean over budgets; the band spans them.

    Parameters
    ----------
    ranks : DataFrame
        ``layer, site, rank_ratio`` and whatever tells budgets apart.
    title : str
        Over the panel.
    """
    figure = Figure(figsize=(4.6, 3.2), layout="constrained")
    axes = figure.subplots()
    for site, label, colour in (("key", "keys", "#0072B2"), ("value", "values", "#D55E00")):
        by_layer = ranks[ranks["site"] == site].groupby("layer")["rank_ratio"]
        mean = by_layer.mean()
        axes.plot(mean.index, mean, "o-", ms=3.5, color=colour, label=label)
        axes.fill_between(
            mean.index, by_layer.min(), by_layer.max(), color=colour, alpha=0.15, linewidth=0
        )
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("layer", fontsize=8)
    axes.set_ylabel("retained rank r / head_dim", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=8, frameon=False)
    title_above(figure, title)
    return figure


def table_of_results(evaluations: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's main table: a row per model, method and requested ratio.

    Every corpus or task has two columns, means over seeds: of its values and, with " SE" after its
    name, of their standard errors. The uncompressed model has no requested ratio.
    """
    part = evaluations[evaluations["bits"] == EXACT_BITS]
    points = part.groupby(["model", "method", "point"], sort=False)
    ratios = points.agg(requested_ratio=("requested_ratio", "first"), ratio=("ratio", "mean"))
    index = ["model", "method", "point"]
    values = part.pivot_table("value", index, "of", sort=False)
    errors = part.pivot_table("standard_error", index, "of", sort=False).add_suffix(" SE")
    columns = [c for of in dict.fromkeys(part["of"]) for c in (of, f"{of} SE")]
    return ratios.join(values.join(errors)[columns]).reset_index().drop(columns="point")


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure of so many panels in a row, each legible in a column of text."""
    figure = Figure(figsize=(max(4.6, 3.2 * count), 3.2), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _exact(evaluations: pd.DataFrame, measure: str) -> pd.DataFrame:
    chosen = (evaluations["measure"] == measure) & (evaluations["bits"] == EXACT_BITS)
    return evaluations[chosen]


def _tradeoff(part: pd.DataFrame, label: str) -> Figure:
    """Draw a panel per corpus or task: a line per method, the uncompressed model as a level."""
    titles = list(dict.fromkeys(part["of"]))
    names = list(dict.fromkeys(part["method"]))
    figure, panels = _panels(len(titles))
    for axes, panel in zip(panels, titles, strict=True):
        of_panel = part[part["of"] == panel]
        for method, line in of_panel.groupby("method", sort=False):
            name = str(method)
            if name == "uncompressed":
                axes.axhline(
                    line["value"].mean(), color="#000000", linestyle=":", linewidth=1, label=name
                )
            else:
                _line(axes, line, "ratio", "point", METHODS.get(name, name), _style(name, names))
        _finish(axes, panel, label)
    legend_below(figure, figure.axes[0])
    return figure


def _line(
    axes: Axes, frame: pd.DataFrame, x: str, by: str, label: str, style: dict[str, Any]
) -> None:
    """Draw a point for each value of `by`: means over seeds, with their spread.

    With a single seed the band is the standard error.
    """
    points = frame.groupby(by).agg(
        x=(x, "mean"),
        mean=("value", "mean"),
        low=("value", "min"),
        high=("value", "max"),
    )
    if len(set(frame["seed"])) == 1 and "standard_error" in frame:
        error = frame.groupby(by)["standard_error"].mean()
        points = points.assign(low=points["mean"] - error, high=points["mean"] + error)
    points = points.sort_values("x")
    axes.plot(points["x"], points["mean"], marker="o", markersize=3.5, label=label, **style)
    band = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
    axes.fill_between(points["x"], points["low"], points["high"], **band)


def _logarithmic(axes: Axes) -> None:
    """Make the vertical axis logarithmic, with plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def _style(name: str, names: list[str]) -> dict[str, Any]:
    return {"color": colour_of(name, names)}


def _finish(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("achieved cache ratio", fontsize=8)
    axes.set_ylabel(label, fontsize=8)
    axes.tick_params(labelsize=7, which="both")
