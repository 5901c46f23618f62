"""The figures and the tables of `benchmark.py loss`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from manifoldkv.evaluate.diagnostics.figures import legend_below, mark_of
from manifoldkv.evaluate.diagnostics.figures.style import label_axes, reference, title_above
from reports import frontier
from reports.axes import LINEAR_BELOW, linear_near_zero, mark_times

AT = (0.5, 0.25, 0.125)
"""Ratios at which the summary lists the cost of plans."""
ALIASES = {
    "kivi": "kivi (KIVI's layout)",
    "fp8": "fp8 (8-bit floats)",
    "sinks-recent": "sinks-recent (StreamingLLM)",
}
"""Names that methods have in the literature."""


def draw(results: pd.DataFrame) -> dict[str, Figure]:
    """Return figures of losses on texts, of answers if there are any, and of the frontier."""
    name = Path(results["model"].iloc[0]).name
    figures = {"loss_against_bytes": _draw(results, "text", "added_nll", name)}
    if (results["kind"] == "task").any():
        figures["answers_against_bytes"] = _draw(results, "task", "score", name)
    return figures | frontier.draw(results)


def _draw(results: pd.DataFrame, kind: str, measure: str, name: str) -> Figure:
    part = results[results["kind"] == kind]
    panels = list(dict.fromkeys(part["measured_on"]))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(5.6, 4.6 * columns), 4.3 * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    names = list(dict.fromkeys(results["composition"]))
    for panel, title in zip(axes.flat, panels, strict=False):
        on = part[part["measured_on"] == title]
        for method in names:
            _line(panel, on[on["composition"] == method], method, measure, names)
        y = ""
        if panel in axes[:, 0]:
            y = "added nats per token" if measure == "added_nll" else "share of answers found"
        label_axes(panel, "times smaller than in 16 bits", y, _title(on))
        if measure == "added_nll":
            linear_near_zero(panel, part["added_nll"].min(), part["added_nll"].max())
        else:
            reference(panel, float(on["stock_score"].iloc[0]), "uncompressed")
            panel.set_ylim(-0.03, 1.05)
        _sizes(panel, on)
    for unused in axes.flat[len(panels) :]:
        unused.remove()
    legend_below(figure)
    finding = _smallest(part) if measure == "added_nll" else _best(part)
    title_above(figure, f"{name}: {finding}")
    return figure


def _title(on: pd.DataFrame) -> str:
    first = on.iloc[0]
    title = common.short(first["measured_on"])
    if first["kind"] == "text":
        return f"held-out text: {title}"
    return title if first["counted"] else f"{title} (the uncompressed model fails it: not counted)"


def _line(axes: Axes, line: pd.DataFrame, method: str, measure: str, names: list[str]) -> None:
    line = line.dropna(subset=[measure]).sort_values("bytes_per_token", ascending=False)
    if line.empty:  # SnapKV has no loss on a text
        return
    error = "nll_error" if measure == "added_nll" else "score_error"
    container = axes.errorbar(
        1 / line["ratio"],
        line[measure],
        line[error],
        markersize=5,
        lw=1.4,
        elinewidth=0.8,
        label=ALIASES.get(method, method),
        **mark_of(method, names).style,
    )
    container.lines[2][0].set_alpha(0.5)


def _sizes(axes: Axes, on: pd.DataFrame) -> None:
    """Mark sizes along both horizontal axes: how many times smaller, and bytes per token."""
    ticks = mark_times(axes, 1 / on["ratio"])
    full = float((on["bytes_per_token"] / on["ratio"]).mean())
    above = axes.secondary_xaxis("top", functions=(partial(_times, full), partial(_times, full)))
    above.xaxis.set_major_locator(FixedLocator([full / times for times in ticks]))
    above.xaxis.set_minor_locator(NullLocator())
    above.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    above.set_xlabel("bytes per token", fontsize=8)
    above.tick_params(labelsize=8)


def _times(full: float, nbytes: Any) -> Any:
    with np.errstate(divide="ignore"):
        return full / np.asarray(nbytes, dtype=float)


def _smallest(part: pd.DataFrame) -> str:
    """Return the two smallest caches that add at most `LINEAR_BELOW` nats on every text."""
    losses = part.dropna(subset=["added_nll"])
    worst = losses.groupby(["composition", "ratio"])["added_nll"].max().reset_index()
    kept = worst[worst["added_nll"] <= LINEAR_BELOW].groupby("composition")["ratio"].min()
    texts = "on all texts" if len(set(part["measured_on"])) > 1 else "on held-out text"
    limit = f"at most {LINEAR_BELOW:g} nats per token {texts}"
    if kept.empty:
        return f"no cache measured adds {limit}"
    first, *others = [f"{name} {1 / ratio:.1f}" for name, ratio in kept.sort_values().items()]
    after = f", then {others[0]}" if others else ""
    return f"the smallest cache that adds {limit}: {first} times smaller{after}"


def _best(part: pd.DataFrame) -> str:
    """Return the method with the best score at the smallest ratio of the first task."""
    first = part[part["measured_on"] == part["measured_on"].iloc[0]]
    rows = first[first["ratio"] < 1.01 * first["ratio"].min()].sort_values("score")
    best, times = rows.iloc[-1], 1 / rows["ratio"].iloc[-1]
    return (
        f"{best['measured_on']}, {times:.0f} times smaller: {best['composition']} finds most, "
        f"{best['score']:.2f}; uncompressed {best['stock_score']:.2f}"
    )


def summary(results: pd.DataFrame, name: str, described: dict[str, str]) -> list[str]:
    """Return the lines of summary.md."""
    first = results.iloc[0]
    lines = [
        f"# Loss and recall against cache size on {name}",
        "",
        f"{first['sequences']} calibration sequences of {first['length']} tokens of "
        f"{common.short(first['calibration'])}, keys of plans {first['rotary']}-rotation, seed "
        f"{first['seed']}. Sizes are those of {first['window']} tokens with all scales, offsets "
        "and uncompressed tokens, against a cache in 16 bits; bases are stored once and listed "
        "separately.",
    ]
    if (results["kind"] == "decode").any():
        lines[-1] += (
            " A step after n tokens is the time of a decode step of one sequence over that of the "
            "stock cache, measured in turns: the median of three."
        )
    for kind in ("text", "task"):
        for title, part in results[results["kind"] == kind].groupby("measured_on", sort=False):
            shown = _table(part, kind, _decode_times(results))
            lines += ["", *_heading(str(title), kind, part.iloc[0]), *shown]
    lines += ["", *_cost(results), "", "Methods:", ""]
    return [*lines, *(f"- `{method}`: {text}" for method, text in described.items())]


def _heading(title: str, kind: str, first: Any) -> list[str]:
    if kind == "text":
        return [
            f"## {common.short(title)}",
            "",
            "Added NLL, nats per token (standard error), on "
            f"{common.counted(int(first['items']), 'held-out window')} of {first['window']} tokens "
            f"through the cache; uncompressed {first['stock_nll']:.3f}.",
            "",
        ]
    counted = "" if first["counted"] else " The uncompressed model fails it: not counted."
    return [
        f"## {title}",
        "",
        "Share of answers found (standard error), and nats per token added to the answer, of "
        f"{first['items']:.0f} uncompressed prompts of {first['task_length']:.0f} tokens; the "
        f"uncompressed model {first['stock_score']:.2f} and {first['stock_nll']:.3f}.{counted}",
        "",
    ]


def _decode_times(results: pd.DataFrame) -> pd.DataFrame:
    """Return times of decode steps by method and ratio, a column for each length."""
    if "decode_time" not in results:
        return pd.DataFrame()
    timed = results[results["kind"] == "decode"].astype({"measured_on": int})
    by = ["composition", "requested_ratio"]
    return timed.pivot_table(index=by, columns="measured_on", values="decode_time")


def _table(part: pd.DataFrame, kind: str, times: pd.DataFrame) -> list[str]:
    rows, windowed = [], "exact_bytes" in part and bool(part["exact_bytes"].notna().any())
    for method, line in part.groupby("composition", sort=False):
        for _, row in line.sort_values("ratio", ascending=False).iterrows():
            cells = [f"`{method}`", f"{1 / row['ratio']:.2f}", f"{row['bytes_per_token']:.0f}"]
            if windowed:
                cells.append(_without_exact(row))
            if kind == "task":
                cells.append(common.with_error(row["score"], row["score_error"], 2))
            cells.append(common.with_error(row["added_nll"], row["nll_error"], 4))
            point = (method, row["requested_ratio"])
            for tokens in times.columns:
                measured = point in times.index and not np.isnan(times.loc[point, tokens])
                cells.append(f"{times.loc[point, tokens]:.1f}" if measured else "-")
            rows.append(cells)
    score = ["found"] if kind == "task" else []
    steps = [f"step after {tokens:,}" for tokens in times.columns]
    beside = ["times smaller without exact tokens"] if windowed else []
    titles = ["method", "times smaller", "bytes per token", *beside, *score, "added", *steps]
    return common.table(titles, rows)


def _without_exact(row: Any) -> str:
    """Return how many times smaller the tokens are that a method does not hold uncompressed."""
    nbytes = row["bytes_per_token"] * row["window"]
    stock = nbytes / row["ratio"]
    if not row["exact_bytes"] < nbytes:  # or not a number
        return "-"
    return f"{(stock - row['exact_bytes']) / (nbytes - row['exact_bytes']):.2f}"


def _cost(results: pd.DataFrame) -> list[str]:
    threads = common.counted(int(results["threads"].iloc[0]), "thread")
    points = results.drop_duplicates(["composition", "requested_ratio"])
    rows = [
        (
            f"`{row['composition']}`",
            f"{1 / row['ratio']:.2f}",
            "-" if np.isnan(row["attention_work"]) else f"{row['attention_work']:.2f}",
            f"{row['basis_bytes'] / 1024:.0f}",
            f"{row['seconds']:.0f}",
        )
        for _, row in points[points["requested_ratio"].isin(AT)].iterrows()
    ]
    return [
        "## Cost",
        "",
        "Multiplications of a decode step per cached token against the "
        "uncompressed cache, bytes of the bases (stored once, 16-bit), and seconds of calibration "
        f"({threads}; a plan reuses bases solved for earlier plans).",
        "",
        *common.table(
            ["method", "times smaller", "attention work", "bases, KiB", "seconds"],
            rows,
        ),
    ]
