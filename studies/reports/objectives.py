"""Figures, tables and captions of compare_objectives, from its results."""

from __future__ import annotations

import argparse
from pathlib import Path

import common
import pandas as pd
from matplotlib.figure import Figure

from manifoldkv.diagnostics.figures import (
    error_against_rank,
    error_against_seconds,
    errors_per_layer,
)
from manifoldkv.diagnostics.figures.style import title_above

SITES = ("key", "value", "both")
ERRORS = ("attention_output_error", "layer_output_error", "cosine_similarity")
CAPS = ("epochs", "steps", "sequences", "sequence_length")
"""Columns of results.csv, the same in every row, which captions are written from."""
LONG_RUN = (
    "The long run, --full, adds rank ratio 0.75, two more seeds (the spread over them) and twice "
    "the tokens, with all epochs and steps of the solvers, in about half an hour."
)


def figures(results: pd.DataFrame) -> dict[str, Figure]:
    drawn = {
        "errors_per_layer": errors_per_layer(results),
        "error_against_rank": error_against_rank(results),
    }
    if set(results["site"]) != {"both"}:
        drawn["error_against_seconds"] = error_against_seconds(results)
    for figure in drawn.values():
        title_above(figure, f"{figure.get_suptitle()}\n{caption(results)}")
    return drawn


def caption(results: pd.DataFrame) -> str:
    """Return the settings that differ from the paper's defaults."""
    epochs, steps, sequences, length = results[list(CAPS)].iloc[0]
    return (
        f"predictor: {epochs} epochs at most (paper: 50); Riemannian Adam: {steps} steps at most "
        f"(not in the paper); {sequences} calibration sequences of {length} tokens (paper: 512 of "
        f"2,048); {common.counted(results['seed'].nunique(), 'seed')}"
    )


def summary(results: pd.DataFrame, given: argparse.Namespace, skipped: list[str]) -> list[str]:
    held_out = results[results["split"] == "held-out"]
    layers = sorted(set(held_out["layer"]))
    lines = [
        f"# Objectives and solvers on {Path(given.model).name}",
        "",
        f"Errors on held-out text, means over layers {', '.join(map(str, layers))} and seeds "
        f"{', '.join(map(str, given.seeds))}; best of each column in bold. Text: {given.text}, "
        + (f"evaluated on {given.eval_text}" if given.eval_text else "a fifth held out")
        + f"; {given.sequences} sequences of {given.sequence_length} tokens in each split. Keys "
        f"are projected {given.rotary}-rotation, the other site is exact unless the table says "
        f"both. Seconds are per layer, on {common.counted(given.threads, 'thread')}. "
        + ("± is the standard deviation over seeds. " if len(set(given.seeds)) > 1 else "")
        + f"Settings: {caption(results)}.",
    ]
    if given.rotary == "pre" and "kq-svd" in given.objectives:
        lines += ["", "kq-svd uses unrotated queries and keys here, as keys are stored unrotated."]
    for site, title in zip(SITES, ("Keys", "Values", "Keys and values"), strict=True):
        for rank, part in held_out[held_out["site"] == site].groupby("rank"):
            ratio = part["rank_ratio"].iloc[0]
            lines += ["", f"## {title}, rank {rank} (ratio {ratio:.3g})", "", *table(part)]
    if skipped:
        lines += ["", "## Not solved", "", *[f"- {line}" for line in skipped]]
    return lines if given.full else [*lines, "", LONG_RUN]


def table(part: pd.DataFrame) -> list[str]:
    keys = ["objective", "solver", "key_grouping", "value_grouping"]
    by_seed = part.groupby([*keys, "seed"], sort=False)[[*ERRORS, "seconds"]].mean()
    means = by_seed.groupby(level=keys, sort=False).mean()
    spread = by_seed.groupby(level=keys, sort=False).std()
    cells = pd.DataFrame(index=means.index)
    for column in ERRORS:
        best = means[column].max() if column == "cosine_similarity" else means[column].min()
        texts = [
            f"{mean:.4f}" + ("" if pd.isna(std) else f" ± {std:.4f}")
            for mean, std in zip(means[column], spread[column], strict=True)
        ]
        cells[column] = [
            f"**{text}**" if mean == best else text
            for text, mean in zip(texts, means[column], strict=True)
        ]
    cells["seconds"] = [f"{seconds:.2f}" for seconds in means["seconds"]]
    cells = cells.reset_index().rename(columns=lambda name: name.replace("_", " "))
    return common.table(list(cells.columns), cells.to_numpy().tolist())
