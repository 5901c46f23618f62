"""Style of all figures: panels, titles, legends, axes with their scale in the label, and files."""

from __future__ import annotations

import textwrap
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from manifoldkv.evaluate.diagnostics.figures.palette import BLACK

ERROR_LABELS = {
    "attention_output_error": "attention-output error",
    "layer_output_error": "layer-output error",
    "cosine_similarity": "cosine similarity",
}
TITLE_SIZE, CHARACTERS_PER_INCH = 9, 14
HANDLE_CHARACTERS = 7
"""Width of the line in a legend's entry, in characters."""


def save_figure(figure: Figure, stem: Path) -> None:
    """Write ``stem.png`` without a date: equal data give equal files."""
    figure.savefig(stem.with_suffix(".png"), dpi=160, metadata={"Software": None})


def panels(count: int, width: float = 3.3, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels in a row, each legible in a column of text; sizes in inches."""
    figure = Figure(figsize=(max(4.8, width * count), height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def finished(figure: Figure, title: str) -> Figure:
    """Return a figure with a legend below it and a title above it."""
    legend_below(figure)
    title_above(figure, title)
    return figure


def title_above(figure: Figure, title: str) -> None:
    """Write a title as wide as the figure, on as many lines as it needs."""
    width = int(figure.get_figwidth() * CHARACTERS_PER_INCH)
    lines = [textwrap.fill(line, width, break_on_hyphens=False) for line in title.splitlines()]
    figure.suptitle("\n".join(lines), fontsize=TITLE_SIZE)


def legend_below(figure: Figure) -> None:
    """Draw one legend of all panels below them, in as many columns as fit."""
    entries: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    column_width = (max(map(len, entries), default=0) + HANDLE_CHARACTERS) / CHARACTERS_PER_INCH
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower center",
        ncols=max(1, min(len(entries), int(figure.get_figwidth() / column_width))),
        fontsize=8,
        frameon=False,
    )


def label_axes(axes: Axes, x: str, y: str, title: str = "") -> None:
    """Write the labels and the title of axes, over a faint grid."""
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=8, which="both")
    axes.grid(visible=True, alpha=0.2)


def logarithmic(axes: Axes, *, x: bool = False) -> None:
    """Make the vertical axis (or `x`, the horizontal one) logarithmic, once its lines are drawn.

    Its label says so; tick labels are plain numbers.
    """
    axis = axes.xaxis if x else axes.yaxis
    (axes.set_xscale if x else axes.set_yscale)("log")
    low, high = axis.get_view_interval()
    if high < 10 * low:
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_label_text(f"{axis.get_label_text()} (logarithmic)")


def reference(axes: Axes, level: float, name: str, line: str = ":") -> None:
    """Draw a reference level, named in the legend."""
    axes.axhline(level, color=BLACK, linestyle=line, linewidth=1, label=name)
