"""The figure and the tables of `benchmark.py storage`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import common
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from manifoldkv.evaluate.diagnostics.figures import legend_below, mark_of, palette
from manifoldkv.evaluate.diagnostics.figures.style import label_axes, reference, title_above

STOCK, ZSTD = "16-bit cache", "zstd"
COLOURS = (
    *(palette.BLUE, palette.VERMILLION, palette.GREEN),
    *(palette.PURPLE, palette.ORANGE, palette.SKY),
)
"""Of bars."""
LEVEL = 3
"""Compression level of zstd: its default."""


def summarized(
    windows: pd.DataFrame, answers: pd.DataFrame, predicted_nats: Mapping[str, float | None]
) -> pd.DataFrame:
    """Return a row for each cache: means over windows, answers found and standard errors.

    Parameters
    ----------
    windows, answers : DataFrame
        Rows for each cache and window, and for each cache and question.
    predicted_nats : mapping
        Added nats per token that each plan predicts, by the name of the cache.
    """
    stock = windows[windows["cache"] == STOCK].set_index("window")["nll"]
    scores = answers.pivot_table("score", "cache", "task", aggfunc="sum")
    rows = []
    for name, part in windows.groupby("cache", sort=False):
        added = part.set_index("window")["nll"] - stock
        rows.append(
            {
                "cache": name,
                "times_smaller": part["stock_bytes"].sum() / part["nbytes"].sum(),
                "nbytes": part["nbytes"].mean(),
                "added_nll": added.mean(),
                "nll_error": added.sem(),
                "predicted_nats": predicted_nats.get(str(name)),
                **scores.reindex([name]).iloc[0],
                "encode_mb_per_second": _speed(part, "encode_seconds"),
                "decode_mb_per_second": _speed(part, "decode_seconds"),
            }
        )
    return pd.DataFrame(rows).sort_values("times_smaller", ignore_index=True)


def _speed(windows: pd.DataFrame, column: str) -> float:
    """Return megabytes of the 16-bit cache per second."""
    return float(windows["stock_bytes"].sum() / windows[column].sum(min_count=1) / 1e6)


def draw(results: pd.DataFrame) -> dict[str, Figure]:
    """Return loss against size, answers found, and speeds."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    losses, recall, speeds = figure.subplots(1, 3)
    first, stored = results.iloc[0], results[~results["cache"].isin((STOCK, ZSTD))]
    losses.errorbar(
        stored["times_smaller"],
        stored["added_nll"],
        yerr=stored["nll_error"],
        capsize=3,
        label="recipe stored",
        **mark_of("stored").style,
    )
    reference(losses, 0, STOCK)
    label_axes(losses, "times smaller than in 16 bits", "added nats per token")
    tasks = first["tasks"].split()
    answered = results[results[tasks[0]].notna()]
    _bars(recall, answered, {task: task for task in tasks}, first_colour=0)
    recall.set_ylim(0, first["items"])
    recall.yaxis.set_major_locator(MaxNLocator(integer=True))
    label_axes(recall, "cache", f"answers found, of {first['items']}")
    coded = results[results["encode_mb_per_second"].notna()]
    ways = {way: f"{way}_mb_per_second" for way in ("encode", "decode")}
    for bars in _bars(speeds, coded, ways, first_colour=len(tasks)):
        speeds.bar_label(bars, fmt="%.0f", fontsize=7)
    label_axes(speeds, "cache", "MB of the 16-bit cache per second")
    legend_below(figure)
    smallest = stored.iloc[-1]
    title_above(
        figure,
        f"{first['model']}: caches stored and read back lose {smallest['added_nll']:.3f} nats per "
        f"token where they are {smallest['times_smaller']:.1f} times smaller; prompts of "
        f"{first['prompt']} tokens, {first['windows']} windows (standard errors), "
        f"{common.counted(first['threads'], 'thread')}, seed {first['seed']}",
    )
    return {"stored_caches": figure}


def _bars(
    axes: Axes, rows: pd.DataFrame, columns: Mapping[str, str], *, first_colour: int
) -> list[BarContainer]:
    """Draw a group of bars for each cache, one bar for each column, by its label."""
    width = 0.8 / len(columns)
    drawn = []
    for index, (label, column) in enumerate(columns.items()):
        shift = (index - (len(columns) - 1) / 2) * width
        at = [cache + shift for cache in range(len(rows))]
        colour = COLOURS[(first_colour + index) % len(COLOURS)]
        drawn.append(axes.bar(at, rows[column], width, color=colour, label=label))
    axes.set_xticks(range(len(rows)), list(rows["cache"]))
    return drawn


def summary(results: pd.DataFrame, given: argparse.Namespace) -> list[str]:
    """Return the lines of summary.md."""
    ways = ("encode_mb_per_second", "decode_mb_per_second")
    rows = [
        [
            row["cache"],
            f"{row['times_smaller']:.2f}",
            f"{row['nbytes'] / 1e6:.3f}",
            *(["", ""] if row["cache"] in (STOCK, ZSTD) else _losses(row)),
            *("" if pd.isna(row[task]) else f"{row[task]:g}" for task in given.tasks),
            *("" if pd.isna(row[way]) else f"{row[way]:.1f}" for way in ways),
        ]
        for _, row in results.iterrows()
    ]
    columns = ["cache", "times smaller", "MB", "added nats per token", "predicted"]
    columns += [f"{task}, of {given.items}" for task in given.tasks]
    columns += ["MB/s stored", "MB/s read"]
    return [
        f"# Loss of a stored cache of {Path(given.model).name}",
        "",
        f"Prompts of {given.prompt} held-out tokens of {common.short(given.text)} are read "
        "uncompressed, their caches stored by recipe `stored` and read back, and the "
        f"{given.continuation} tokens after them predicted from the reconstruction: "
        f"{given.held_out} windows, standard errors over these. Answers found are of {given.items} "
        "prompts of the same length for each task. Calibrated on "
        f"{given.sequences} × {given.sequence_length} other tokens of the text, seed "
        f"{given.seed}. Bytes are those of the whole blob; times smaller and megabytes per second "
        f"are of the cache in bfloat16, which zstd (level {LEVEL}) stores without loss, on "
        f"{common.counted(given.threads, 'thread')}, medians of 3 calls, in turns in one run.",
        "",
        *common.table(columns, rows),
    ]


def _losses(row: pd.Series) -> list[str]:
    error = "" if pd.isna(row["nll_error"]) else f" ± {row['nll_error']:.4f}"
    predicted = "" if pd.isna(row["predicted_nats"]) else f"{row['predicted_nats']:.4f}"
    return [f"{row['added_nll']:.4f}{error}", predicted]
