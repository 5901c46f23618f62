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
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from manifoldkv.diagnostics.figures.palette import mark_of
from manifoldkv.diagnostics.figures.style import (
    ERROR_LABELS,
    label_axes,
    legend_below,
    logarithmic,
    reference,
    title_above,
)

LABELS = {"eigen-attention": "EigenAttention", "layer-output": "StiefAttention"}
STOCK = "uncompressed"
EXACT_BITS = 16
CHANCE = {"hellaswag": 0.25, "mmlu": 0.25, "docstring-continuation": 0.25, "piqa": 0.5}
"""Accuracies of guessing: one of four answers, or of two."""
RATIO = "achieved cache ratio"


def accuracy(evaluations: pd.DataFrame, *, title: str) -> Figure:
    """Draw zero-shot accuracy against the achieved cache ratio, a panel per task."""
    part = _exact(evaluations, "accuracy")
    figure = _tradeoff(part, "accuracy")
    for axes, task in zip(figure.axes, dict.fromkeys(part["of"]), strict=True):
        if task in CHANCE:
            reference(axes, CHANCE[task], "chance", "-.")
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    legend_below(figure)
    title_above(figure, f"{title}\n{_at_smallest(part, 'method')}")
    return figure


def perplexities(evaluations: pd.DataFrame, *, title: str) -> Figure:
    """Draw perplexity against the achieved cache ratio, a panel per corpus, logarithmic."""
    part = _exact(evaluations, "perplexity")
    figure = _tradeoff(part, "perplexity")
    for axes in figure.axes:
        logarithmic(axes)
    legend_below(figure)
    title_above(figure, f"{title}\n{_at_smallest(part, 'method')}")
    return figure


def policies(evaluations: pd.DataFrame, *, title: str) -> Figure:
    """Draw perplexity of one method against the achieved ratio, a line per rank rule."""
    part = _exact(evaluations, "perplexity")
    corpora = list(dict.fromkeys(part["of"]))
    names = [str(name) for name in dict.fromkeys(part["policy"])]
    figure, panels = _panels(len(corpora))
    for axes, corpus in zip(panels, corpora, strict=True):
        of_corpus = part[part["of"] == corpus]
        for policy, line in _compressed(of_corpus).groupby("policy", sort=False):
            style = mark_of(str(policy), names).style
            _line(axes, line, "ratio", "point", str(policy), style)
        _level(axes, of_corpus)
        label_axes(axes, RATIO, "perplexity", corpus)
        logarithmic(axes)
    legend_below(figure)
    title_above(figure, f"{title}\n{_at_smallest(part, 'policy')}")
    return figure


def quantization(evaluations: pd.DataFrame, *, title: str) -> Figure:
    """Draw perplexity against bytes: a line per method, a point per number of bits.

    Exact latents have a point too. Bytes are those of the cache with its scales over those of an
    uncompressed 16-bit one. Where latents are rotated before they are rounded, which the paper
    does not do, lines are dashed and markers open.
    """
    part = evaluations[evaluations["measure"] == "perplexity"]
    corpora = list(dict.fromkeys(part["of"]))
    figure, panels = _panels(len(corpora))
    names = list(dict.fromkeys(part["method"]))
    for axes, corpus in zip(panels, corpora, strict=True):
        of_corpus = part[part["of"] == corpus]
        exact = of_corpus[of_corpus["bits"] == EXACT_BITS]
        for (method, rotation), line in of_corpus.groupby(["method", "rotation"], sort=False):
            name, label = str(method), LABELS.get(str(method), str(method))
            style = mark_of(name, names).style
            if rotation != "none":
                line = pd.concat([exact[exact["method"] == method], line])
                label = f"{label}, {rotation}"
                style |= {"linestyle": "--", "fillstyle": "none"}
            _line(axes, line, "bytes_ratio", "bits", label, style)
        label_axes(axes, "bytes / uncompressed 16-bit cache", "perplexity", corpus)
        logarithmic(axes)
        logarithmic(axes, x=True)
        bits_above(axes, of_corpus)
    legend_below(figure)
    title_above(figure, f"{title}\n{_at_fewest_bits(part)}")
    return figure


def bits_above(axes: Axes, points: pd.DataFrame) -> None:
    """Write the widths of latents above a panel, each over its bytes, where no line strikes it.

    Parameters
    ----------
    axes : Axes
        Whose horizontal axis has ``bytes_ratio``.
    points : DataFrame
        ``bits, bytes_ratio``.
    """
    places = points.groupby("bits")["bytes_ratio"].mean()
    labels = ["exact" if bits == EXACT_BITS else str(bits) for bits in places.index]
    above = axes.secondary_xaxis("top")
    above.xaxis.set_major_locator(FixedLocator(list(places)))
    above.xaxis.set_minor_locator(NullLocator())
    above.set_xticks(list(places), labels)
    above.tick_params(labelsize=8)
    above.set_xlabel("bits of a latent", fontsize=8)


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
            style = mark_of(name, names).style
            _line(axes, numbers, "layer", "layer", LABELS.get(name, name), style)
        label_axes(axes, "layer", label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if column == "cosine_similarity":
            axes.set_ylabel(f"{label} (axis begins at {axes.get_ylim()[0]:.3f})", fontsize=8)
        else:
            axes.set_ylim(bottom=0)
    legend_below(figure)
    means = diagnostics.groupby("method", sort=False)["layer_output_error"].mean().sort_values()
    found = ", ".join(f"{LABELS.get(str(name), name)} {mean:.3f}" for name, mean in means.items())
    title_above(figure, f"{title}\nMean layer-output error: {found}")
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
    figure = Figure(figsize=(4.8, 3.4), layout="constrained")
    axes = figure.subplots()
    for site in ("key", "value"):
        by_layer = ranks[ranks["site"] == site].groupby("layer")["rank_ratio"]
        mean, mark = by_layer.mean(), mark_of(site)
        axes.plot(mean.index, mean, ms=4.5, label=f"{site}s", **mark.style)
        axes.fill_between(
            mean.index, by_layer.min(), by_layer.max(), color=mark.colour, alpha=0.15, linewidth=0
        )
    label_axes(axes, "layer", "retained rank r / head_dim")
    axes.set_ylim(0, 1.05)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_below(figure)
    means = ranks.groupby("site")["rank_ratio"].mean()
    found = f"On average keys keep {means['key']:.2f} of head_dim, values {means['value']:.2f}"
    title_above(figure, f"{title}\n{found}")
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
    """Return a figure of panels in a row, each legible in a column of text."""
    figure = Figure(figsize=(max(4.8, 3.3 * count), 3.6), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _exact(evaluations: pd.DataFrame, measure: str) -> pd.DataFrame:
    chosen = (evaluations["measure"] == measure) & (evaluations["bits"] == EXACT_BITS)
    return evaluations[chosen]


def _compressed(part: pd.DataFrame) -> pd.DataFrame:
    return part[part["method"] != STOCK]


def _tradeoff(part: pd.DataFrame, label: str) -> Figure:
    """Draw a panel per corpus or task: a line per method, the uncompressed model as a level."""
    titles = list(dict.fromkeys(part["of"]))
    names = list(dict.fromkeys(part["method"]))
    figure, panels = _panels(len(titles))
    for axes, panel in zip(panels, titles, strict=True):
        of_panel = part[part["of"] == panel]
        for method, line in _compressed(of_panel).groupby("method", sort=False):
            name = str(method)
            style = mark_of(name, names).style
            _line(axes, line, "ratio", "point", LABELS.get(name, name), style)
        _level(axes, of_panel)
        label_axes(axes, RATIO, label, panel)
    return figure


def _level(axes: Axes, part: pd.DataFrame) -> None:
    stock = part[part["method"] == STOCK]["value"]
    if len(stock):
        reference(axes, float(stock.mean()), STOCK)


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
    said = [f"{LABELS.get(name, name)} {value:{digits}}" for name, value in values.items()]
    if len(stock):
        said.append(f"{STOCK} {stock.mean():{digits}}")
    return f"{of}, ratio {' to '.join(sorted({min(ratios), max(ratios)}))}: {', '.join(said)}"


def _at_fewest_bits(part: pd.DataFrame) -> str:
    """Return the perplexity of every line at the fewest bits, on the first corpus."""
    first = part[part["of"] == part["of"].iloc[0]]
    bits = first["bits"].min()
    rows = first[first["bits"] == bits].groupby(["method", "rotation"])["value"].mean()
    found = [
        f"{LABELS.get(method, method)}{'' if rotation == 'none' else f', {rotation},'} {value:.1f}"
        for (method, rotation), value in rows.sort_values().items()
    ]
    return f"{bits} bits: {', '.join(found)}"


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
    axes.plot(points["x"], points["mean"], markersize=4.5, label=label, **style)
    band = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
    axes.fill_between(points["x"], points["low"], points["high"], **band)
    if len(points) == 1:  # a band of no width
        axes.vlines(points["x"], points["low"], points["high"], color=style["color"], lw=1)
