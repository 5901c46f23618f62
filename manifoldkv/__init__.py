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
from manifoldkv.cache import CompressedCache, compressed
from manifoldkv.calibration import TextSource, open_text, sample_tokens
from manifoldkv.compress import (
    compress,
    ratio_from_bytes,
    uniform_ranks,
)
from manifoldkv.diagnostics import LayerErrors, diagnose, layer_errors
from manifoldkv.errors import (
    CacheError,
    DivergenceError,
    ExecutorError,
    ManifoldKVError,
    ModelError,
    OutputError,
    PlanError,
    RankError,
    SeedError,
    TextError,
    UnknownNameError,
    UnsolvableError,
    UnsupportedModelError,
)
from manifoldkv.executors import Executor, LocalExecutor, RayExecutor
from manifoldkv.loading import load_model
from manifoldkv.models import check_supported
from manifoldkv.objectives import OBJECTIVES, Objective, Problem, register_objective
from manifoldkv.plan import CompressionPlan, LayerPlan, Provenance, Quantization
from manifoldkv.quantize import quantize
from manifoldkv.recipes import RANK_RULES, RECIPES, Recipe
from manifoldkv.solvers import SOLVERS, Solution, Solver, register_solver
from manifoldkv.tuning import tune

__all__ = [
    "OBJECTIVES",
    "RANK_RULES",
    "RECIPES",
    "SOLVERS",
    "Basis",
    "Batch",
    "CacheError",
    "CompressedCache",
    "CompressionPlan",
    "DivergenceError",
    "Executor",
    "ExecutorError",
    "HeadGrouping",
    "LayerActivations",
    "LayerErrors",
    "LayerPlan",
    "LocalExecutor",
    "ManifoldKVError",
    "ModelError",
    "Objective",
    "OutputError",
    "PlanError",
    "Problem",
    "Provenance",
    "Quantization",
    "RankError",
    "RayExecutor",
    "Recipe",
    "SeedError",
    "Solution",
    "Solver",
    "TextError",
    "TextSource",
    "UnknownNameError",
    "UnsolvableError",
    "UnsupportedModelError",
    "capture",
    "check_supported",
    "compress",
    "compressed",
    "diagnose",
    "layer_errors",
    "load_model",
    "open_text",
    "orthonormal_basis",
    "principal_angles",
    "projector_distance",
    "quantize",
    "rank_from_ratio",
    "ratio_from_bytes",
    "register_objective",
    "register_solver",
    "sample_tokens",
    "tune",
    "uniform_ranks",
]
