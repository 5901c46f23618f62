"""Figures, each drawn from a DataFrame that is saved beside it."""

from manifoldkv.evaluate.diagnostics.figures.palette import MARKS, Mark, mark_of
from manifoldkv.evaluate.diagnostics.figures.paper import (
    accuracy,
    bases_comparison,
    perplexities,
    policies,
    quantization,
    rank_profile,
)
from manifoldkv.evaluate.diagnostics.figures.style import legend_below, save_figure

__all__ = [
    "MARKS",
    "Mark",
    "accuracy",
    "bases_comparison",
    "legend_below",
    "mark_of",
    "perplexities",
    "policies",
    "quantization",
    "rank_profile",
    "save_figure",
]
