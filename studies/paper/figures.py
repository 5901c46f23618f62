"""The figures of one model, their names and their captions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from manifoldkv.diagnostics import figures as draw
from manifoldkv.diagnostics.figures import save_figure
from manifoldkv.errors import RunError
from paper.protocol import SAME_RANKS

_OVER_WINDOWS = (
    "Bands are the range over seeds, or with one seed standard errors over windows of the "
    "difference from the uncompressed model."
)
FIGURES: dict[str, tuple[Any, str, str]] = {
    "accuracy": (
        draw.accuracy,
        "zero-shot accuracy against the achieved cache ratio",
        "Bands are standard errors over items.",
    ),
    "ppl": (draw.perplexities, "perplexity against the achieved cache ratio", _OVER_WINDOWS),
    "policy_uniform": (
        draw.policies,
        "perplexity of the paper's bases by rank rule",
        _OVER_WINDOWS,
    ),
    "quantization": (
        draw.quantization,
        "perplexity of integer latents against bytes",
        "Of the plans whose ratio is nearest to 0.6, in the paper's layout; dashed where latents "
        "are rotated by Hadamard matrices before they are rounded, which the paper does not do. "
        + _OVER_WINDOWS,
    ),
    "bases_comparison": (
        draw.bases_comparison,
        "errors of each layer by itself, rank head_dim / 2",
        "On the windows of the first corpus, as long as calibration sequences at most; bands are "
        "the range over seeds.",
    ),
    "ranks": (
        draw.rank_profile,
        "ranks that the sequential rule chose for the paper's bases",
        "Means over the requested ratios; bands are their range.",
    ),
}
"""Function, title and further caption of each figure of the paper."""
COMPARED = ("accuracy", "ppl")
"""Figures that compare methods with the rank rule each was published with."""
RULES = {
    "release": "its own search",
    "sequential": "the sequential rule",
    "optimal": "the optimal rule",
    SAME_RANKS: "the sequential rule for the paper's bases",
}


def save(stem: str, frame: pd.DataFrame, model: str, out: Path, *, quick: bool) -> None:
    """Draw a figure of a model into a folder, beside the CSV that it is drawn from."""
    path = out / label(stem, model)
    frame.to_csv(path.with_suffix(".csv"), index=False)
    draw_figure(stem, model, out, quick=quick)


def draw_figure(stem: str, model: str, out: Path, *, quick: bool) -> None:
    """Draw a figure of a model from the CSV of its name in a folder."""
    path = out / label(stem, model)
    figure, title, _ = FIGURES[stem]
    frame = pd.read_csv(path.with_suffix(".csv"))
    save_figure(figure(frame, title=f"{shown(model, quick)}: {title}"), path)


def shown(model: str, quick: bool) -> str:
    """Return the name of a model in titles and captions, which say if the run was a quick one."""
    return f"{model}, quick run" if quick else model


def redraw(models: Iterable[str], out: Path, *, quick: bool) -> None:
    """Draw all figures of models again, from the CSVs in a folder.

    Raises
    ------
    RunError
        If one is missing, before any is drawn.
    """
    stems = [(stem, model) for model in models for stem in FIGURES]
    for stem, model in stems:
        if not (out / f"{label(stem, model)}.csv").is_file():
            raise RunError(f"{out} has no {label(stem, model)}.csv to draw")
    for stem, model in stems:
        draw_figure(stem, model, out, quick=quick)


def label(stem: str, model: str) -> str:
    """Return the paper's label of a figure: of the diagnostics, only Qwen's has the name."""
    plain = (stem, model) == ("bases_comparison", "llama")
    return stem if plain else f"{stem}_{model}"


def captions(model: str, series: Mapping[str, str]) -> list[str]:
    """Return a caption line for every figure of a model; `series` has the rank rule by method."""
    compared = ", ".join(f"{method} by {RULES[policy]}" for method, policy in series.items())
    return [
        f"- `{label(stem, model)}`: {title}. {f'Ranks of {compared}. ' * (stem in COMPARED)}{band}"
        for stem, (_, title, band) in FIGURES.items()
    ]
