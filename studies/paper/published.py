"""The paper's numbers, and a check that a model is the one it measured."""

from __future__ import annotations

import common
import pandas as pd

PAPER_WEIGHTS = {"Meta-Llama-3-8B": "Llama3-8B", "Qwen3-8B": "Qwen3-8B"}
"""Names on the Hub of the models the paper measured."""
WIKITEXT, C4 = "wikitext:wikitext-2-raw-v1", "allenai/c4:en:validation"
PAPER_CORPORA = {"WikiText": f"{WIKITEXT}:test", "C4": C4}
PAPER_WINDOWS, PAPER_LENGTH = 140, 2048
"""The whole test set of WikiText-2 in the paper's windows, but for a rest."""
MISMATCH = 0.05
"""Relative difference from the paper's uncompressed perplexity that is reported."""


def published_rows() -> pd.DataFrame:
    """Return the paper's table, a row for each model and requested ratio."""
    return pd.read_csv(common.HERE / "paper_results.csv")


def mismatches(model: str, measured: dict[str, float]) -> list[str]:
    """Return a warning for each corpus on which an uncompressed model differs from the paper's.

    `measured` has the perplexity by corpus, and `model` is a name of paper_results.csv.
    """
    rows = published_rows()
    theirs = rows[(rows["model"] == model) & rows["requested_ratio"].isna()].iloc[0]
    return [
        f"{model} uncompressed has a perplexity of {ours:.2f} on {corpus} in windows of "
        f"{PAPER_LENGTH} tokens, the paper's row says {theirs[corpus]:.2f}: weights, text or "
        "sampler differ, and all later numbers will differ too"
        for corpus, ours in measured.items()
        if abs(ours / theirs[corpus] - 1) > MISMATCH
    ]
