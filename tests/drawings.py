"""What is on a figure: the numbers of its lines, and colour in the files that were written."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import image
from matplotlib.axes import Axes
from matplotlib.figure import Figure

LEAST_PIXELS = 200
"""In colour: axes, grids and words are black and grey."""


def lines_of(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    """Points of every line that has some, by its label."""
    found = {str(line.get_label()): points(line) for line in axes.get_lines()}
    return {label: drawn for label, drawn in found.items() if drawn}


def points(line: Any) -> list[tuple[float, float]]:
    """Places of a line that can be seen, as numbers."""
    pairs = np.column_stack([np.asarray(x, dtype=float) for x in line.get_data()])
    return [(float(x), float(y)) for x, y in pairs[np.isfinite(pairs).all(axis=1)]]


def assert_points_in_every_panel(figure: Figure) -> None:
    """Fail if a panel has no line, or one without a point that can be seen."""
    assert figure.axes
    for axes in figure.axes:
        assert lines_of(axes), axes.get_title()


def assert_written(stem: Path) -> None:
    """Fail unless a figure is there as PNG, with marks in colour."""
    pixels = image.imread(stem.with_suffix(".png"))[..., :3]
    coloured = np.ptp(pixels, axis=-1) > 0.1
    assert coloured.sum() > LEAST_PIXELS
