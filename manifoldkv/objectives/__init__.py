"""Objectives: each turns one layer's activations into a problem over bases."""

from manifoldkv.objectives import eigen_attention, k_svd, kq_svd, layer_output
from manifoldkv.objectives.base import (
    OBJECTIVES,
    Objective,
    Problem,
    Site,
    register_objective,
)

__all__ = [
    "OBJECTIVES",
    "Objective",
    "Problem",
    "Site",
    "eigen_attention",
    "k_svd",
    "kq_svd",
    "layer_output",
    "register_objective",
]
