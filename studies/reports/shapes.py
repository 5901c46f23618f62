"""The figure and the table of one layer of `benchmark.py speed --shapes`."""

from __future__ import annotations

from typing import Any

import common
import pandas as pd
from matplotlib.figure import Figure

from manifoldkv.evaluate.diagnostics.figures.palette import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
)
from manifoldkv.evaluate.diagnostics.figures.style import finished, label_axes
from reports.speed import caption

COLOURS = {
    "attention": GREY,
    "unpacking": BLUE,
    "scores of keys": BLUE,
    "rebuilding keys": VERMILLION,
    "rotating and scoring": ORANGE,
    "softmax": YELLOW,
    "mixing": GREEN,
    "new token": PURPLE,
    "rest": SKY,
}
"""Of parts, from the bottom of a bar."""
FLOORS = {"bytes over bandwidth": "_", "multiplications over peak": "x"}
"""Markers of floors."""
REFERENCES = {
    "stock bfloat16": "as models call it",
    "stock bfloat16, grouped": "on rows of queries of every KV head",
}
"""Caches that others are compared with, and how torch's kernel attends to them."""
SHAPE = "32 query heads, 8 KV heads of 128 features"
HOW = (
    "A part is the difference of the medians of two steps, one of which omits it; the rest is the "
    "whole step less its parts, in Python and torch."
)
HOW_ON_GPU = "Parts are timed alone; the rest is the whole step less its parts."


def draw(results: pd.DataFrame) -> dict[str, Figure]:
    """Return stacked bars of what a step is made of, with two floors."""
    caches = list(dict.fromkeys(results["cache"]))
    table = results.pivot_table("seconds", "cache", "part").reindex(caches) * 1e3
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.subplots()
    bottom = pd.Series(0.0, index=caches)
    for part, colour in COLOURS.items():
        if part in table:
            heights = table[part].fillna(0).clip(lower=0)  # differences of medians
            axes.bar(caches, heights, 0.6, bottom, color=colour, label=part)
            bottom += heights
    for floor, marker in FLOORS.items():
        style: dict[str, Any] = {"linestyle": "", "marker": marker, "markersize": 9, "color": BLACK}
        axes.plot(caches, table[floor], label=f"floor: {floor}", zorder=3, **style)
    works = results.groupby("cache", sort=False)["work"].first()
    labels = [f"{cache}\nwork {works[cache]:.3g}".replace(", ", ",\n") for cache in caches]
    label_axes(axes, "cache", "milliseconds of a decode step")
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xticks(range(len(caches)), labels)
    axes.grid(visible=False, axis="x")
    axes.set_ylim(0, 1.05 * bottom.max())
    return {"parts_of_a_step": finished(figure, f"{_finding(results)}\n{caption(results)}")}


def totals(results: pd.DataFrame) -> pd.Series:
    """Return the seconds of a step by cache."""
    parts = results[results["part"].isin(COLOURS)]
    return parts.groupby("cache", sort=False)["seconds"].sum()


def _finding(results: pd.DataFrame) -> str:
    seconds = totals(results)
    compressed = seconds[seconds.index.str.startswith("bands")]
    found = [
        f"{how}: " + ", ".join(f"{name} {x:.2f}" for name, x in (compressed / seconds[to]).items())
        for to, how in REFERENCES.items()
    ]
    return (
        f"Attention of one layer, {SHAPE}, {_texts(results)}, random plans 8 "
        f"times smaller, over the time of torch's kernel in bfloat16, {'; '.join(found)}"
    )


def _texts(results: pd.DataFrame) -> str:
    first = results.iloc[0]
    texts = "1 sequence" if first["batch"] == 1 else f"{first['batch']} sequences"
    return f"{texts} of {first['tokens']:,} tokens"


def summary(results: pd.DataFrame) -> list[str]:
    """Return the lines of summary.md."""
    first, seconds = results.iloc[0], totals(results)
    shown = [*COLOURS, *FLOORS]
    how = HOW_ON_GPU if "scores of keys" in set(results["part"]) else HOW
    rows = []
    for cache, part in results.groupby("cache", sort=False):
        by_part = part.set_index("part")["seconds"].reindex(shown) * 1e3
        one = part.iloc[0]
        name = f"{cache} ({one['way']})" if isinstance(one["way"], str) and one["way"] else cache
        rows.append(
            [
                name,
                f"{one['work']:.2f}",
                f"{one['nbytes'] / 1e6:.1f}",
                f"{1e3 * seconds[cache]:.2f}",
                *(f"{seconds[cache] / seconds[to]:.2f}" for to in REFERENCES),
                *("" if pd.isna(value) else f"{value:.2f}" for value in by_part),
            ]
        )
    return [
        f"# Attention of one layer: {SHAPE}, {_texts(results)}",
        "",
        f"Milliseconds of a decode step, {caption(results)}. {how} Plans are random, 8 times "
        "smaller than in 16 bits, in bands of frequencies; values are predicted from the keys of "
        "the layer, or coded alone. Stock caches are attended to by torch's kernel in the faster "
        "of two ways, enable_gqa and repeated heads; grouped ones as rows of queries of every KV "
        f"head, which models do not do. Of a copy {first['bandwidth'] / 1e9:.1f} GB per second, of "
        f"a product of matrices {first['peak'] / 1e9:.1f} billion multiplications per "
        "second.",
        "",
        *common.table(
            ["cache", "work", "MB", "step", *(f"over {to}" for to in REFERENCES), *shown], rows
        ),
    ]
