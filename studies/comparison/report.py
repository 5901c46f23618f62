"""The figures and the tables of `frontier`."""

from __future__ import annotations

from functools import partial
from typing import Any

import common
import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

PALETTE = [colormaps["tab20"](i) for i in (*range(0, 20, 2), *range(1, 20, 2))]
RIVALS = ("integers", "kivi", "fp8", "sinks-recent", "snapkv")
"""Drawn as broken lines."""
AT = (0.5, 0.25, 0.125)
"""Ratios at which the summary says what plans take."""


def draw(results: pd.DataFrame, name: str) -> dict[str, Figure]:
    """Return a figure of losses on texts and, if questions were asked, one of answers."""
    figures = {"loss_against_bytes": _draw(results, "text", "added_nll", name)}
    if (results["kind"] == "task").any():
        figures["answers_against_bytes"] = _draw(results, "task", "score", name)
    return figures


def _draw(results: pd.DataFrame, kind: str, measure: str, name: str) -> Figure:
    part = results[results["kind"] == kind]
    panels = list(dict.fromkeys(part["measured_on"]))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns + 0.6, 4.0 * rows + 0.9), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    names = list(dict.fromkeys(results["composition"]))
    for panel, title in zip(axes, panels, strict=False):
        on = part[part["measured_on"] == title]
        for index, composition in enumerate(names):
            _line(panel, on[on["composition"] == composition], composition, measure, index)
        front = pareto(on, measure)
        panel.plot(
            front["bytes_per_token"],
            front[measure],
            color="black",
            lw=5,
            alpha=0.12,
            solid_capstyle="round",
            label="Pareto front",
        )
        _finish(panel, on, title, measure)
    for unused in axes[len(panels) :]:
        unused.remove()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    shown = "added NLL" if measure == "added_nll" else "answers found"
    figure.suptitle(f"{name}: {shown} against cache size", fontsize=10)
    return figure


def _line(axes: Axes, line: pd.DataFrame, composition: str, measure: str, index: int) -> None:
    line = line.dropna(subset=[measure]).sort_values("bytes_per_token")
    if line.empty:  # SnapKV has no loss on a text
        return
    error = "nll_error" if measure == "added_nll" else "score_error"
    rival = composition in RIVALS
    axes.errorbar(
        line["bytes_per_token"],
        line[measure],
        line[error],
        fmt="s--" if rival else "o-",
        ms=4,
        lw=1.0 if rival else 1.6,
        color=PALETTE[index % len(PALETTE)],
        label=composition,
    )


def _finish(axes: Axes, on: pd.DataFrame, title: str, measure: str) -> None:
    axes.set_xscale("log", base=2)
    smallest, largest = np.log2([on["bytes_per_token"].min(), on["bytes_per_token"].max()])
    if np.ceil(smallest) > np.floor(largest):  # no power of two would be marked
        axes.set_xlim(2 ** np.floor(smallest), 2 ** np.ceil(largest))
    axes.set_title(common.short(title), fontsize=9)
    axes.set_xlabel("bytes per token", fontsize=9)
    if measure == "added_nll":
        axes.set_yscale("symlog", linthresh=0.01, linscale=0.4)
        axes.set_ylim(min(-0.01, 2 * on["added_nll"].min()), 2 * max(0.01, on["added_nll"].max()))
        axes.set_ylabel("added NLL, nats per token, held out", fontsize=9)
    else:
        axes.set_ylim(-0.03, 1.05)
        axes.axhline(float(on["stock_score"].iloc[0]), color="grey", lw=0.8, ls=":")
        axes.set_ylabel("share of answers found (dotted: uncompressed)", fontsize=9)
    axes.grid(visible=True, alpha=0.2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.tick_params(labelsize=8)
    full = float((on["bytes_per_token"] / on["ratio"]).mean())
    above = axes.secondary_xaxis("top", functions=(partial(_times, full), partial(_times, full)))
    above.set_xlabel("times smaller than in 16 bits", fontsize=8)
    ticks = [2, 3, 4, 6, 8, 12, 16]
    above.set_ticks(ticks, labels=[str(tick) for tick in ticks])
    above.minorticks_off()
    above.tick_params(labelsize=8)


def _times(full: float, nbytes: Any) -> Any:
    with np.errstate(divide="ignore"):
        return full / np.asarray(nbytes, dtype=float)


def pareto(points: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Return the points than which no smaller one, nor one of the size, is better."""
    better = -1 if measure == "score" else 1
    line = points.dropna(subset=[measure])
    line = line.assign(_order=better * line[measure]).sort_values(["bytes_per_token", "_order"])
    kept = line["_order"] < line["_order"].cummin().shift(fill_value=np.inf)
    return line[kept].drop(columns="_order")


def summary(results: pd.DataFrame, name: str, said: dict[str, str]) -> list[str]:
    """Return the lines of summary.md."""
    first = results.iloc[0]
    lines = [
        f"# Loss and recall against cache size on {name}",
        "",
        f"{first['sequences']} calibration sequences of {first['length']} tokens of "
        f"{common.short(first['calibration'])}, keys of plans {first['rotary']}-rotation, seed "
        f"{first['seed']}. Sizes are those of {first['window']} tokens, with scales, offsets and "
        "all that is kept exact, against a cache in 16 bits; bases come once and are named beside.",
    ]
    if (results["kind"] == "decode").any():
        lines[-1] += (
            " A step after some tokens is the time of a decode step, one sequence, in those of the "
            "stock cache, which took turns with it: the median of three."
        )
    for kind in ("text", "task"):
        for title, part in results[results["kind"] == kind].groupby("measured_on", sort=False):
            shown = _table(part, kind, _decode_times(results))
            lines += ["", *_heading(str(title), kind, part.iloc[0]), *shown]
    lines += ["", *_cost(results), "", "Compositions:", ""]
    return [*lines, *(f"- `{composition}`: {text}" for composition, text in said.items())]


def _heading(title: str, kind: str, first: Any) -> list[str]:
    if kind == "text":
        return [
            f"## {common.short(title)}",
            "",
            f"Added NLL, nats per token (standard error), on {first['items']} held-out windows of "
            f"{first['window']} tokens through the cache; uncompressed {first['stock_nll']:.3f}.",
            "",
        ]
    counted = "" if first["counted"] else " The uncompressed model fails it: not counted."
    return [
        f"## {title}",
        "",
        "Share of answers found (standard error), and nats per token added to the answer, of "
        f"{first['items']} questions after {first['task_length']} tokens, prompts read as they "
        f"are; uncompressed {first['stock_score']:.2f} and {first['stock_nll']:.3f}.{counted}",
        "",
    ]


def _decode_times(results: pd.DataFrame) -> pd.DataFrame:
    """Return times of decode steps by composition and ratio, a column for each length."""
    if "decode_time" not in results:
        return pd.DataFrame()
    timed = results[results["kind"] == "decode"].astype({"measured_on": int})
    by = ["composition", "requested_ratio"]
    return timed.pivot_table(index=by, columns="measured_on", values="decode_time")


def _table(part: pd.DataFrame, kind: str, times: pd.DataFrame) -> list[str]:
    rows = []
    for composition, line in part.groupby("composition", sort=False):
        for _, row in line.sort_values("ratio", ascending=False).iterrows():
            cells = [f"`{composition}`", f"{1 / row['ratio']:.2f}", f"{row['bytes_per_token']:.0f}"]
            if kind == "task":
                cells.append(f"{row['score']:.2f} ({row['score_error']:.2f})")
            if np.isnan(row["added_nll"]):
                cells.append("-")
            else:
                cells.append(f"{row['added_nll']:.4f} ({row['nll_error']:.4f})")
            place = (composition, row["requested_ratio"])
            for tokens in times.columns:
                known = place in times.index and not np.isnan(times.loc[place, tokens])
                cells.append(f"{times.loc[place, tokens]:.1f}" if known else "-")
            rows.append(cells)
    found = ["found"] if kind == "task" else []
    steps = [f"step after {tokens:,}" for tokens in times.columns]
    titles = ["composition", "times smaller", "bytes per token", *found, "added", *steps]
    return common.table(titles, rows)


def _cost(results: pd.DataFrame) -> list[str]:
    threads = common.counted(int(results["threads"].iloc[0]), "thread")
    made = results.drop_duplicates(["composition", "requested_ratio"])
    rows = [
        (
            f"`{row['composition']}`",
            f"{1 / row['ratio']:.2f}",
            f"{row['recent']:.0f}",
            "-" if np.isnan(row["attention_work"]) else f"{row['attention_work']:.2f}",
            f"{row['basis_bytes'] / 1024:.0f}",
            f"{row['seconds']:.0f}",
        )
        for _, row in made[made["requested_ratio"].isin(AT)].iterrows()
    ]
    return [
        "## What it takes",
        "",
        "Newest tokens kept exact, multiplications of a decode step per cached token against the "
        "uncompressed cache, bytes of the bases (once, 16-bit), and seconds of calibration "
        f"({threads}; bases that a plan before has found are not found again).",
        "",
        *common.table(
            ["composition", "times smaller", "recent", "attention work", "bases, KiB", "seconds"],
            rows,
        ),
    ]
