"""What all figures have in common: one colour per name, and how they are written."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with every kind of colour vision.
COLOURS = {
    "k-svd": "#999999",
    "eigen-attention": "#E69F00",
    "kq-svd": "#56B4E9",
    "layer-output": "#009E73",
    "grouped kq-svd": "#0072B2",
    "closed-form": "#0072B2",
    "predictor": "#D55E00",
    "riemannian-adam": "#CC79A7",
}
ERROR_LABELS = {
    "attention_output_error": "attention-output error",
    "layer_output_error": "layer-output error",
    "cosine_similarity": "cosine similarity",
}
TITLE_SIZE, CHARACTERS_PER_INCH = 9, 14
HANDLE_CHARACTERS = 7
"""The room that the line of a legend's entry takes, in characters."""
_SPARE_COLOURS = ("#F0E442", "#000000", "#882255", "#44AA99")


def colour_of(name: str, among: Sequence[str]) -> str:
    """Return the colour of an objective or solver: a fixed one for ours, a spare for others."""
    others = [n for n in among if n not in COLOURS]
    if name in COLOURS:
        return COLOURS[name]
    return _SPARE_COLOURS[others.index(name) % len(_SPARE_COLOURS)]


def save_figure(figure: Figure, stem: Path) -> None:
    """Write ``stem.png`` and ``stem.pdf``, without dates, so that equal data give equal files."""
    figure.savefig(stem.with_suffix(".png"), dpi=160, metadata={"Software": None})
    figure.savefig(stem.with_suffix(".pdf"), metadata={"CreationDate": None})


def title_above(figure: Figure, title: str) -> None:
    """Write a title as wide as the figure, on as many lines as it needs."""
    width = int(figure.get_figwidth() * CHARACTERS_PER_INCH)
    lines = [textwrap.fill(line, width) for line in title.splitlines()]
    figure.suptitle("\n".join(lines), fontsize=TITLE_SIZE)


def legend_below(figure: Figure, axes: Axes) -> None:
    """Draw the legend of one panel below all of them, in as many columns as there is room for."""
    handles, labels = axes.get_legend_handles_labels()
    column_width = (max(map(len, labels), default=0) + HANDLE_CHARACTERS) / CHARACTERS_PER_INCH
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=max(1, min(len(labels), int(figure.get_figwidth() / column_width))),
        fontsize=8,
        frameon=False,
    )
