"""The figure of loss against work of `benchmark.py loss`."""

from __future__ import annotations

import common
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from manifoldkv.evaluate.diagnostics.figures.palette import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
)
from manifoldkv.evaluate.diagnostics.figures.style import finished, label_axes, panels
from reports.axes import linear_near_zero

LIMITED, UNLIMITED = "work-", "best"
"""Beginning of the names of methods with a limit of work, and the name of that without one."""
COLOURS = (VERMILLION, BLUE, GREEN, ORANGE, PURPLE, SKY)
"""Of lines, by ratio."""
MARKERS = "os^Dvp"


def draw(results: pd.DataFrame) -> dict[str, Figure]:
    """Return added loss against work, a line for each ratio; nothing without such methods."""
    limited = results["composition"].str.startswith(LIMITED)
    if not limited.any():
        return {}
    part = results[(limited | (results["composition"] == UNLIMITED)) & (results["kind"] == "text")]
    texts = list(dict.fromkeys(part["measured_on"]))
    ratios = sorted(part["requested_ratio"].unique(), reverse=True)
    figure, axes = panels(len(texts), width=4.2)
    for panel, text in zip(axes, texts, strict=True):
        on = part[part["measured_on"] == text]
        for index, ratio in enumerate(ratios):
            _line(panel, on[on["requested_ratio"] == ratio], index, ratio)
        y = "added nats per token" if panel is axes[0] else ""
        label_axes(panel, "multiplications over those of stock attention", y, common.short(text))
        linear_near_zero(panel, part["added_nll"].min(), part["added_nll"].max())
        _works(panel, on)
    first = part.iloc[0]
    windows = common.counted(int(first["items"]), "window")
    unlimited = (part["composition"] == UNLIMITED).any()
    further = ", and without one (at the right of each line)" if unlimited else ""
    return {
        "loss_against_work": finished(
            figure,
            f"{first['model']}: least loss within a limit of work{further}; {windows} of "
            f"{first['window']} tokens of each text (standard errors)",
        )
    }


def _line(axes: Axes, line: pd.DataFrame, index: int, ratio: float) -> None:
    line = line.sort_values("attention_work")
    axes.errorbar(
        line["attention_work"],
        line["added_nll"],
        line["nll_error"],
        color=COLOURS[index % len(COLOURS)],
        marker=MARKERS[index % len(MARKERS)],
        markersize=5,
        label=f"{1 / ratio:.3g} times smaller",
    )


def _works(axes: Axes, on: pd.DataFrame) -> None:
    """Mark powers of two along the logarithmic axis of work."""
    axes.set_xscale("log", base=2)
    low, high = on["attention_work"].min(), on["attention_work"].max()
    ticks = [2**power for power in range(12) if low / 2 <= 2**power <= 2 * high]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(f"{axes.get_xlabel()} (logarithmic)")
