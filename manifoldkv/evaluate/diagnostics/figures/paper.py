"""The figures of the paper, from one DataFrame of evaluations.

An evaluation is one value measured on one model under one plan:

``model, method, policy, requested_ratio, point, ratio, bits, bytes_ratio, measure, of, value,
standard_error, seed``

``point`` is the same for one point of a line over seeds (the requested ratio, or an error budget);
``method`` is "uncompressed", "eigen-attention", "layer-output" or any other; ``policy`` the rank
rule; ``measure`` "perplexity" or "accuracy"; ``of`` the corpus or task; ``bits`` the width of
integer latents, 16 if they are not rounded.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from manifoldkv.evaluate.diagnostics.figures.palette import mark_of
from manifoldkv.evaluate.diagnostics.figures.style import (
    ERROR_LABELS,
    finished,
    label_axes,
    logarithmic,
    panels,
    reference,
)

LABELS = {"eigen-attention": "EigenAttention", "layer-output": "StiefAttention"}
STOCK = "uncompressed"
UNROUNDED_BITS = 16
CHANCE = {"hellaswag": 0.25, "mmlu": 0.25, "docstring-continuation": 0.25, "piqa": 0.5}
"""Accuracies of guessing among four answers, or two."""
RATIO = "achieved cache ratio"


def accuracy(evaluations: pd.DataFrame, *, title: str) -> Figure:
    """Draw zero-shot accuracy against the achieved cache ratio, a panel per task."""
    part = _unrounded(evaluations, "accuracy")
    figure = _tradeoff(part, "accuracy", "method")
    for axes, task in zip(figure.axes, dict.fromkeys(part["of"]), strict=True):
        if task in CHANCE:
            reference(axes, CHANCE[task], "chance", "-.")
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    return finished(figure, f"{title}\n{_at_smallest(part, 'method')}")


def perplexities(evaluations: pd.DataFrame, *, title: str, by: str = "method") -> Figure:
    """Draw perplexity against the achieved cache ratio, a panel per corpus, a line per method."""
    part = _unrounded(evaluations, "perplexity")
    figure = _tradeoff(part, "perplexity", by)
    for axes in figure.axes:
        logarithmic(axes)
    return finished(figure, f"{title}\n{_at_smallest(part, by)}")


def policies(evaluations: pd.DataFrame, *, title: str) -> Figure:
    """Draw perplexity of one method against the achieved ratio, a line per rank rule."""
    return perplexities(evaluations, title=title, by="policy")


def quantization(evaluations: pd.DataFrame, *, title: str) -> Figure:
    """Draw perplexity against bytes: a line per method, a point per number of bits.

    Latents that are not rounded have a point too. Bytes are those of the cache with its scales
    over those of an uncompressed 16-bit one. Where latents are rotated before they are rounded,
    which the paper does not do, lines are dashed and markers open.
    """
    part = evaluations[evaluations["measure"] == "perplexity"]
    figure, row, corpora = _panel_each(part)
    names = list(dict.fromkeys(part["method"]))
    for axes, corpus in zip(row, corpora, strict=True):
        of_corpus = part[part["of"] == corpus]
        unrounded = of_corpus[of_corpus["bits"] == UNROUNDED_BITS]
        for (method, rotation), line in of_corpus.groupby(["method", "rotation"], sort=False):
            name, label = str(method), LABELS.get(str(method), str(method))
            style = mark_of(name, names).style
            if rotation != "none":
                line = pd.concat([unrounded[unrounded["method"] == method], line])
                label = f"{label}, {rotation}"
                style |= {"linestyle": "--", "fillstyle": "none"}
            _line(axes, line, "bytes_ratio", "bits", label, style)
        label_axes(axes, "bytes / uncompressed 16-bit cache", "perplexity", corpus)
        logarithmic(axes)
        logarithmic(axes, x=True)
        bits_above(axes, of_corpus)
    return finished(figure, f"{title}\n{_at_fewest_bits(part)}")


def bits_above(axes: Axes, points: pd.DataFrame) -> None:
    """Write the widths of latents above a panel, each over its bytes, clear of all lines.

    Parameters
    ----------
    axes : Axes
        Axes with ``bytes_ratio`` as horizontal axis.
    points : DataFrame
        Columns ``bits, bytes_ratio``.
    """
    ratios = points.groupby("bits")["bytes_ratio"].mean()
    labels = ["exact" if bits == UNROUNDED_BITS else str(bits) for bits in ratios.index]
    above = axes.secondary_xaxis("top")
    above.xaxis.set_major_locator(FixedLocator(list(ratios)))
    above.xaxis.set_minor_locator(NullLocator())
    above.set_xticks(list(ratios), labels)
    above.tick_params(labelsize=8)
    above.set_xlabel("bits of a latent", fontsize=8)


def bases_comparison(diagnostics: pd.DataFrame, *, title: str) -> Figure:
    """Draw attention-output error, layer-output error and cosine similarity of every layer.

    Parameters
    ----------
    diagnostics : DataFrame
        Table of `diagnose`, with a column ``method`` and one ``seed``.
    title : str
        Title over the panels.
    """
    names = list(dict.fromkeys(diagnostics["method"]))
    figure, row = panels(len(ERROR_LABELS))
    for axes, (column, label) in zip(row, ERROR_LABELS.items(), strict=True):
        for method, line in diagnostics.groupby("method", sort=False):
            name = str(method)
            numbers = line.assign(value=line[column])
            style = mark_of(name, names).style
            _line(axes, numbers, "layer", "layer", LABELS.get(name, name), style)
        label_axes(axes, "layer", label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if column == "cosine_similarity":
            axes.set_ylabel(f"{label} (axis begins at {axes.get_ylim()[0]:.3f})", fontsize=8)
        else:
            axes.set_ylim(bottom=0)
    means = diagnostics.groupby("method", sort=False)["layer_output_error"].mean().sort_values()
    errors = ", ".join(f"{LABELS.get(str(name), name)} {mean:.3f}" for name, mean in means.items())
    return finished(figure, f"{title}\nMean layer-output error: {errors}")


def rank_profile(ranks: pd.DataFrame, *, title: str) -> Figure:
    """Draw retained rank r / head_dim of every layer, mean over budgets; the band spans them.

    Parameters
    ----------
    ranks : DataFrame
        Columns ``layer, site, rank_ratio``, a row per budget.
    title : str
        Title over the panel.
    """
    figure, (axes,) = panels(1, height=3.4)
    for site in ("key", "value"):
        of_site = ranks[ranks["site"] == site].assign(value=ranks["rank_ratio"])
        _line(axes, of_site, "layer", "layer", f"{site}s", mark_of(site).style)
    label_axes(axes, "layer", "retained rank r / head_dim")
    axes.set_ylim(0, 1.05)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    means = ranks.groupby("site")["rank_ratio"].mean()
    kept = f"On average keys keep {means['key']:.2f} of head_dim, values {means['value']:.2f}"
    return finished(figure, f"{title}\n{kept}")


def _panel_each(part: pd.DataFrame) -> tuple[Figure, list[Axes], list[str]]:
    """Return a figure with a panel per corpus or task, and their names."""
    names = list(dict.fromkeys(part["of"]))
    return *panels(len(names)), names


def _unrounded(evaluations: pd.DataFrame, measure: str) -> pd.DataFrame:
    chosen = (evaluations["measure"] == measure) & (evaluations["bits"] == UNROUNDED_BITS)
    return evaluations[chosen]


def _compressed(part: pd.DataFrame) -> pd.DataFrame:
    return part[part["method"] != STOCK]


def _tradeoff(part: pd.DataFrame, label: str, by: str) -> Figure:
    """Draw a panel per corpus or task: a line per method or rule, the uncompressed as a level."""
    figure, row, titles = _panel_each(part)
    names = list(dict.fromkeys(part[by]))
    for axes, panel in zip(row, titles, strict=True):
        of_panel = part[part["of"] == panel]
        for name, line in _compressed(of_panel).groupby(by, sort=False):
            style = mark_of(str(name), names).style
            _line(axes, line, "ratio", "point", LABELS.get(str(name), str(name)), style)
        stock = of_panel[of_panel["method"] == STOCK]["value"]
        if len(stock):
            reference(axes, float(stock.mean()), STOCK)
        label_axes(axes, RATIO, label, panel)
    return figure


def _at_smallest(part: pd.DataFrame, column: str) -> str:
    """Return the value of every line at its smallest ratio, on the first corpus or task."""
    of = part["of"].iloc[0]
    first = part[part["of"] == of]
    stock = first[first["method"] == STOCK]["value"]
    digits = ".3f" if (first["measure"] == "accuracy").all() else ".1f"
    values, ratios = {}, set()
    for name, line in _compressed(first).groupby(column, sort=False):
        smallest = line[line["point"] == line.groupby("point")["ratio"].mean().idxmin()]
        values[str(name)] = smallest["value"].mean()
        ratios.add(f"{smallest['ratio'].mean():.2f}")
    parts = [f"{LABELS.get(name, name)} {value:{digits}}" for name, value in values.items()]
    if len(stock):
        parts.append(f"{STOCK} {stock.mean():{digits}}")
    return f"{of}, ratio {' to '.join(sorted({min(ratios), max(ratios)}))}: {', '.join(parts)}"


def _at_fewest_bits(part: pd.DataFrame) -> str:
    """Return the perplexity of every line at the fewest bits, on the first corpus."""
    first = part[part["of"] == part["of"].iloc[0]]
    bits = first["bits"].min()
    rows = first[first["bits"] == bits].groupby(["method", "rotation"])["value"].mean()
    parts = [
        f"{LABELS.get(method, method)}{'' if rotation == 'none' else f', {rotation},'} {value:.1f}"
        for (method, rotation), value in rows.sort_values().items()
    ]
    return f"{bits} bits: {', '.join(parts)}"


def _line(
    axes: Axes, frame: pd.DataFrame, x: str, by: str, label: str, style: dict[str, Any]
) -> None:
    """Draw a point for each value of `by`: the mean, in a band over seeds or budgets.

    With a single seed the band is the standard error.
    """
    columns = {"mean": "mean", "low": "min", "high": "max"}
    points = frame.groupby(by).agg(x=(x, "mean"), **{k: ("value", f) for k, f in columns.items()})
    if "standard_error" in frame and len(set(frame["seed"])) == 1:
        error = frame.groupby(by)["standard_error"].mean()
        points = points.assign(low=points["mean"] - error, high=points["mean"] + error)
    points = points.sort_values("x")
    axes.plot(points["x"], points["mean"], markersize=4.5, label=label, **style)
    band = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
    axes.fill_between(points["x"], points["low"], points["high"], **band)
    if len(points) == 1:  # a band of no width
        axes.vlines(points["x"], points["low"], points["high"], color=style["color"], lw=1)
