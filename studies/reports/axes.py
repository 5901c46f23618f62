"""The axes of losses and of sizes, which figures share."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

LINEAR_BELOW = 0.01
"""Nats per token below which the axis of losses is linear, to include zero and less."""
TIMES = (1, 4 / 3, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Of the marks on axes: no two sizes that are measured lie without one."""


def linear_near_zero(axes: Axes, lowest: float, highest: float) -> None:
    """Make the axis of losses logarithmic above `LINEAR_BELOW`, with the linear part in grey.

    Parameters
    ----------
    axes : Axes
        Axes whose vertical label is written.
    lowest, highest : float
        Range of the losses, nats per token.
    """
    axes.set_yscale("symlog", linthresh=LINEAR_BELOW, linscale=0.6)
    axes.set_ylim(min(-0.3 * LINEAR_BELOW, 1.3 * lowest), 1.8 * max(LINEAR_BELOW, highest))
    axes.yaxis.set_major_locator(FixedLocator([0, 0.01, 0.03, 0.1, 0.3, 1, 3, 10]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.axhspan(axes.get_ylim()[0], LINEAR_BELOW, color="#000000", alpha=0.05, linewidth=0)
    if axes.get_ylabel():
        axes.set_ylabel(f"{axes.get_ylabel()}\n(logarithmic; linear in the grey part)")


def mark_times(axes: Axes, times: pd.Series[float]) -> list[float]:
    """Make the horizontal axis one of how many times smaller, logarithmic; return its marks."""
    smallest, largest = times.min(), times.max()
    ticks = [one for one in TIMES if smallest / 1.25 <= one <= 1.25 * largest]
    axes.set_xscale("log")
    axes.set_xlim(min(smallest, ticks[0]) / 1.1, 1.1 * max(largest, ticks[-1]))
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
    axes.set_xlabel(f"{axes.get_xlabel()} (logarithmic)")
    return ticks
