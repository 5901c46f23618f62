"""Figures, each drawn from a DataFrame that is saved beside it."""

from manifoldkv.figures.objectives import (
    error_against_rank,
    error_against_seconds,
    errors_per_layer,
)
from manifoldkv.figures.paper import (
    accuracy,
    bases_comparison,
    perplexities,
    policies,
    quantization,
    rank_profile,
    table_of_results,
)
from manifoldkv.figures.style import COLOURS, colour_of, legend_below, save_figure

__all__ = [
    "COLOURS",
    "accuracy",
    "bases_comparison",
    "colour_of",
    "error_against_rank",
    "error_against_seconds",
    "errors_per_layer",
    "legend_below",
    "perplexities",
    "policies",
    "quantization",
    "rank_profile",
    "save_figure",
    "table_of_results",
]
