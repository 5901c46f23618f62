"""manifoldkv: low-rank bases for the key-value cache of language models."""

from manifoldkv.activations import Batch, LayerActivations, capture
from manifoldkv.basis import (
    Basis,
    HeadGrouping,
    orthonormal_basis,
    principal_angles,
    projector_distance,
    rank_from_ratio,
)
from manifoldkv.calibration import TextSource, open_text, sample_tokens
from manifoldkv.diagnostics import LayerErrors, diagnose, layer_errors
from manifoldkv.errors import (
    DivergenceError,
    ManifoldKVError,
    ModelError,
    OutputError,
    RankError,
    TextError,
    UnknownNameError,
    UnsolvableError,
    UnsupportedModelError,
)
from manifoldkv.models import check_supported, load_model
from manifoldkv.objectives import OBJECTIVES, Objective, Problem, register_objective
from manifoldkv.solvers import SOLVERS, Solution, Solver, register_solver

__all__ = [
    "OBJECTIVES",
    "SOLVERS",
    "Basis",
    "Batch",
    "DivergenceError",
    "HeadGrouping",
    "LayerActivations",
    "LayerErrors",
    "ManifoldKVError",
    "ModelError",
    "Objective",
    "OutputError",
    "Problem",
    "RankError",
    "Solution",
    "Solver",
    "TextError",
    "TextSource",
    "UnknownNameError",
    "UnsolvableError",
    "UnsupportedModelError",
    "capture",
    "check_supported",
    "diagnose",
    "layer_errors",
    "load_model",
    "open_text",
    "orthonormal_basis",
    "principal_angles",
    "projector_distance",
    "rank_from_ratio",
    "register_objective",
    "register_solver",
    "sample_tokens",
]
