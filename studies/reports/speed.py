"""The figure and the table of `benchmark.py speed`."""

from __future__ import annotations

from typing import Any

import common
import pandas as pd
from matplotlib.figure import Figure

from manifoldkv.evaluate.diagnostics.figures.palette import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
)
from manifoldkv.evaluate.diagnostics.figures.style import (
    finished,
    label_axes,
    logarithmic,
    reference,
)

COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
MARKERS = "os^Dvp"
"""Of measurements, in order."""
KINDS = ["measurement", "tokens", "batch"]
PLAN = ["composition", "requested_ratio"]


def title(measurement: str, tokens: int, batch: int) -> str:
    """Return a measurement in words."""
    if measurement == "prefill":
        return f"prompt of {tokens:,}"
    of_batch = f" of {common.counted(batch, 'sequence')}" if measurement == "batch" else ""
    return f"step{of_batch} after {tokens:,}"


def draw(results: pd.DataFrame) -> dict[str, Figure]:
    """Return times over those of the stock cache against work, a mark for each measurement."""
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    for index, kind in enumerate(kinds_of(results)):
        part = rows_of(results, kind)
        axes.plot(
            part["work"],
            part["time_ratio"],
            linestyle="",
            marker=MARKERS[index % len(MARKERS)],
            color=COLOURS[index % len(COLOURS)],
            label=title(*kind),
        )
    for name, part in results.groupby("composition", sort=False):
        highest = part["work"].mean(), part["time_ratio"].max()
        sizes = dict.fromkeys(f"{1 / ratio:.3g}x" for ratio in part["requested_ratio"])
        style: dict[str, Any] = {"fontsize": 7, "ha": "center"}
        label = f"{name}\n{', '.join(sizes)}"
        axes.annotate(label, highest, (0, 6), textcoords="offset points", **style)
    reference(axes, 1, "stock cache")
    x = "multiplications over those of stock attention"
    label_axes(axes, x, "time over that of the stock cache")
    axes.margins(0.15, 0.2)
    logarithmic(axes, x=True)
    logarithmic(axes)
    return {"time_against_work": finished(figure, f"{_finding(results)}\n{caption(results)}")}


def kinds_of(results: pd.DataFrame) -> list[tuple[str, int, int]]:
    """Return the different measurements, in order."""
    return list(dict.fromkeys(results[KINDS].itertuples(index=False, name=None)))


def rows_of(results: pd.DataFrame, kind: tuple[str, int, int]) -> pd.DataFrame:
    """Return the rows of a measurement."""
    return results[(results[KINDS] == pd.Series(kind, index=KINDS)).all(axis=1)]


def _finding(results: pd.DataFrame) -> str:
    steps = results[results["measurement"] == "decode"]
    fastest = steps.sort_values("time_ratio").iloc[0]
    return (
        f"{fastest['model']}: with {fastest['composition']}, {1 / fastest['ratio']:.1f} times "
        f"smaller, a decode step after {fastest['tokens']:,} tokens takes "
        f"{fastest['time_ratio']:.2f} of the time of the stock cache"
    )


def caption(results: pd.DataFrame) -> str:
    """Return how all rows were measured."""
    first = results.iloc[0]
    return (
        f"both caches in turns, medians of {common.counted(int(first['rounds']), 'round')}, "
        f"{common.counted(int(first['threads']), 'thread')}; {first['device']}; "
        f"{first['versions']}"
    )


def summary(results: pd.DataFrame) -> list[str]:
    """Return the lines of summary.md."""
    first = results.iloc[0]
    kinds = kinds_of(results)
    rows = []
    for (plan, _), part in results.groupby(PLAN, sort=False):
        by_kind = {tuple(row[name] for name in KINDS): row for _, row in part.iterrows()}
        one = part.iloc[0]
        cells = [f"`{plan}`", f"{1 / one['ratio']:.2f}", f"{one['work']:.2f}"]
        rows.append(cells + [_cell(by_kind[kind]) for kind in kinds])
    titles = ["plan", "times smaller", "work", *(title(*kind) for kind in kinds)]
    return [
        f"# Speed of compressed caches of {first['model']}",
        "",
        "Time over that of the stock cache (stock and compressed, ms; of a batch also tokens per "
        "second), then working memory of one more step beyond the cache, in percent of the "
        f"uncompressed cache: {caption(results)}. Times smaller are those of "
        f"{first['tokens']:,} tokens, against a cache in 16 bits. Work is the multiplications of "
        "a decode step per cached token over those of stock attention.",
        "",
        *common.table(titles, rows),
    ]


def _cell(row: Any) -> str:
    times = [f"{1e3 * row[f'{cache}_seconds']:.1f}" for cache in ("stock", "compressed")]
    cell = f"{row['time_ratio']:.2f} ({times[0]}, {times[1]}"
    if row["measurement"] == "batch":
        stock, compressed = row["batch"] / row[["stock_seconds", "compressed_seconds"]]
        cell += f"; {stock:.1f}, {compressed:.1f} per second"
    cell += ")"
    share = row["compressed_working_share"]
    return cell if pd.isna(share) else f"{cell}, {100 * share:.1f} %"
