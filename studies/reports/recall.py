"""The maps and the tables of `benchmark.py recall`."""

from __future__ import annotations

from typing import Any

import common
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from manifoldkv.evaluate.diagnostics.figures.style import title_above

DEPTHS = 5
"""Rows of the map."""
STOCK = "uncompressed"
LEAST_ADDED, MOST_ADDED = 0.01, 3.0
"""Ends of the colours of added nats."""


def draw(answers: pd.DataFrame) -> dict[str, Figure]:
    """Return a map of passkeys found, depth against length, for every cache."""
    caches = list(dict.fromkeys(answers["cache"]))
    columns = min(4, len(caches))
    rows = -(-len(caches) // columns)
    figure = Figure(figsize=(2.4 * columns + 0.8, 2.3 * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    lengths = sorted(answers["task_length"].unique())
    for panel, cache in zip(axes, caches, strict=False):
        panel.set_title(cache.replace(", ", ",\n"), fontsize=8)
        image = _map(panel, answers[answers["cache"] == cache], lengths)
    for unused in axes[len(caches) :]:
        unused.remove()
    axes[0].invert_yaxis()  # of all: they share it
    figure.supxlabel("tokens of the prompt", fontsize=9)
    figure.supylabel("depth of the passkey", fontsize=9)
    by_cache = answers.groupby("cache", sort=False)["score"].mean()
    scores = "; ".join(f"{cache} {share:.2f}" for cache, share in by_cache.items())
    title_above(figure, f"Share of passkeys found: {scores}")
    figure.colorbar(image, ax=list(axes[: len(caches)]), shrink=0.6, label="share found")
    return {"passkeys_by_depth_and_length": figure}


def draw_tasks(results: pd.DataFrame) -> dict[str, Figure]:
    """Return a map of the nats added to answers, task against cache, prompts read uncompressed."""
    stock = results[results["composition"] == STOCK]
    caches = results[results["prefill"] == "exact"]
    rows = list(dict.fromkeys(zip(stock["task_length"], stock["task"], strict=True)))
    labels = [f"{name}\n{1 / ratio:.1f}" for name, ratio in _caches(caches)]
    width, height = 0.75 * len(labels) + 3.2, 0.42 * len(rows) + 1.9
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    added, scores = (_grid(caches, rows, column) for column in ("added_nll", "score"))
    colours = LogNorm(LEAST_ADDED, MOST_ADDED, clip=True)
    image = axes.pcolormesh(np.maximum(added, LEAST_ADDED), norm=colours, cmap="cividis")
    for (row, column), nats in np.ndenumerate(added):
        if not np.isnan(nats):
            found = scores[row, column]
            text = f"{nats:+.2f}" + ("" if np.isnan(found) else f"\n{found:.0%}")
            colour = "black" if nats > 0.15 else "white"
            style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.5}
            axes.annotate(text, (column + 0.5, row + 0.5), color=colour, **style)
    axes.set_xticks(np.arange(len(labels)) + 0.5, labels, fontsize=7, rotation=45, ha="right")
    of_stock = stock.set_index(["task_length", "task"])["stock_score"]
    names = [f"{task}, {length} tokens ({of_stock[length, task]:.0%})" for length, task in rows]
    axes.set_yticks(np.arange(len(rows)) + 0.5, names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("cache, times smaller than in 16 bits", fontsize=8)
    label = "added nats per token\nof the answer"
    figure.colorbar(image, ax=axes, label=label, extend="both")
    title_above(figure, "Nats added to answers, and share found (uncompressed: in brackets)")
    return {"answers_by_task": figure}


def _caches(part: pd.DataFrame) -> list[tuple[str, float]]:
    return list(dict.fromkeys(zip(part["composition"], part["ratio"], strict=True)))


def _grid(caches: pd.DataFrame, rows: list[tuple[int, str]], column: str) -> Any:
    """Return a column by task and cache, NaN where nothing was asked."""
    table = caches.set_index(["task_length", "task", "composition", "ratio"])[column]
    wanted = [[(*row, *cache) for cache in _caches(caches)] for row in rows]
    return np.array([[table.get(one, np.nan) for one in line] for line in wanted], dtype=float)


def _map(panel: Axes, part: pd.DataFrame, lengths: list[int]) -> QuadMesh:
    """Draw the share found of one cache."""
    depth = (part["depth"] * DEPTHS).astype(int)
    table = part.assign(depth=depth).pivot_table(
        index="depth", columns="task_length", values="score", aggfunc="mean"
    )
    grid = table.reindex(index=range(DEPTHS), columns=lengths).to_numpy(dtype=float)
    image = panel.pcolormesh(grid, vmin=0, vmax=1, cmap="cividis")
    middles = np.arange(len(lengths)) + 0.5
    panel.set_xticks(middles, [str(length) for length in lengths], fontsize=7)
    middles = np.arange(DEPTHS) + 0.5
    panel.set_yticks(middles, [f"{middle / DEPTHS:.0%}" for middle in middles], fontsize=7)
    for (row, column), share in np.ndenumerate(grid):
        if not np.isnan(share):
            colour = "black" if share > 0.5 else "white"
            centre = (column + 0.5, row + 0.5)
            style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7}
            panel.annotate(f"{share:.1f}", centre, color=colour, **style)
    return image


def summary(results: pd.DataFrame, name: str, described: dict[str, str]) -> list[str]:
    """Return the lines of summary.md."""
    first = results.iloc[0]
    lines = [
        f"# Answers from a smaller cache of {name}",
        "",
        f"Share of answers found (standard error) and nats per token added to the answers, "
        f"{first['items']} questions of each task and length. {first['sequences']} calibration "
        f"sequences of {first['length']} tokens of {common.short(first['calibration'])}, keys of "
        f"plans {first['rotary']}-rotation, seed {first['seed']}; sizes against a cache in 16 "
        f"bits, with all uncompressed tokens, at {first['window']} tokens. Prompts are read "
        "uncompressed (exact) or through the compressed cache (compressed); answers are decoded "
        "from the compressed cache. Tasks in brackets are those of which the uncompressed model "
        "finds less than half: they are left out of the averages, and of their answers only the "
        "loss is measured.",
    ]
    for length, part in results.groupby("task_length"):
        lines += ["", f"## Prompts of {length} tokens", "", *_table(part)]
    lines += ["", "Methods:", ""]
    return [*lines, *(f"- `{method}`: {text}" for method, text in described.items())]


def _cell(row: pd.Series) -> str:
    return f"{common.with_error(row['score'], row['score_error'], 2)}, {row['added_nll']:+.2f}"


def _table(part: pd.DataFrame) -> list[str]:
    counted = part[part["composition"] == STOCK].set_index("task")["counted"]
    titles = [task if counted[task] else f"({task})" for task in counted.index]
    rows = []
    caches = part.fillna({"prefill": "-"}).groupby(["composition", "ratio", "prefill"], sort=False)
    for (method, _, prefill), line in caches:
        of_counted = line[line["counted"]]
        average = f"{of_counted['score'].mean():.2f}, {of_counted['added_nll'].mean():+.2f}"
        by_task = line.set_index("task")
        cells = [
            _cell(by_task.loc[task]) if task in by_task.index else "-" for task in counted.index
        ]
        times = f"{1 / line['ratio'].iloc[0]:.2f}"
        rows.append([f"`{method}`", times, prefill, average if len(of_counted) else "-", *cells])
    return common.table(["cache", "times smaller", "prompts", "average", *titles], rows)
