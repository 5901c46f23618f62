"""The figure and the table of `benchmark.py agreement`."""

from __future__ import annotations

from pathlib import Path

import common
import pandas as pd
from matplotlib.figure import Figure

from manifoldkv.evaluate.agreement import UNCOMPRESSED
from manifoldkv.evaluate.diagnostics.figures import legend_below, mark_of
from manifoldkv.evaluate.diagnostics.figures.style import label_axes, title_above
from manifoldkv.evaluate.perplexity import standard_error
from reports.axes import mark_times

LINEAR_BELOW = 1e-3
"""Share of tokens below which the axis is linear, to include zero."""


def draw(results: pd.DataFrame) -> dict[str, Figure]:
    """Return tokens that are not accepted and same tokens against the size of the cache."""
    caches = results[results["composition"] != UNCOMPRESSED]
    methods = list(dict.fromkeys(caches["composition"]))
    figure = Figure(figsize=(9.2, 4.4), layout="constrained")
    missed, same = figure.subplots(1, 2)
    for method in methods:
        by_ratio = caches[caches["composition"] == method].groupby("ratio")
        style = {"markersize": 5, "lw": 1.4, "label": method, **mark_of(method, methods).style}
        error = by_ratio["accepted"].agg(lambda x: standard_error(x.tolist()))
        mean, median = by_ratio["accepted"].mean(), by_ratio["same_tokens"].median()
        missed.errorbar(1 / mean.index, 1 - mean, error, elinewidth=0.8, **style)
        same.plot(1 / median.index, median, **style)
    x = "times smaller than in 16 bits"
    missed.set_yscale("symlog", linthresh=LINEAR_BELOW)
    y = f"share of greedy tokens\n(logarithmic above {LINEAR_BELOW:g})"
    label_axes(missed, x, y, "not accepted, mean")
    label_axes(same, x, "tokens before the first difference", "same text, median")
    for panel in (missed, same):
        mark_times(panel, 1 / caches["ratio"])
        panel.set_ylim(bottom=0)
    legend_below(figure)
    name = Path(results["model"].iloc[0]).name
    prompts, tokens = results["prompt"].nunique(), results["new_tokens"].iloc[0]
    title_above(figure, f"{name}: greedy texts of {prompts} prompts, {tokens} tokens each")
    return {"agreement_against_bytes": figure}


def summary(results: pd.DataFrame, name: str, described: dict[str, str]) -> list[str]:
    """Return the lines of summary.md."""
    first = results.iloc[0]
    lines = [
        f"# Greedy texts from a smaller cache of {name}",
        "",
        f"Greedy tokens of the uncompressed model, {first['new_tokens']} after each of "
        f"{results['prompt'].nunique()} held-out prompts of {first['prompt_length']} tokens of "
        f"{common.short(first['calibration'])}: the share that is also the most probable token "
        "given the cache (standard error), and the median number of tokens before the first that "
        f"is not. {first['sequences']} calibration sequences of {first['length']} tokens, seed "
        f"{first['seed']}; sizes against a cache in 16 bits at {first['window']} tokens. Prompts "
        "are read uncompressed and then compressed.",
        "",
    ]
    rows = []
    for (method, _), part in results.groupby(["composition", "ratio"], sort=False):
        accepted = part["accepted"]
        error = standard_error(accepted.tolist())
        rows.append(
            [
                f"`{method}`",
                f"{1 / part['ratio'].iloc[0]:.2f}",
                common.with_error(accepted.mean(), error, 3),
                f"{part['same_tokens'].median():.0f}",
            ]
        )
    lines += common.table(["cache", "times smaller", "accepted", "same tokens"], rows)
    lines += ["", "Methods:", ""]
    return [*lines, *(f"- `{method}`: {text}" for method, text in described.items())]
