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
from manifoldkv.compress import CompressionConfig, compress, ratio_from_bytes
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
from manifoldkv.loading import load_model
from manifoldkv.models import check_supported
from manifoldkv.objectives import (
    KQSVD,
    KSVD,
    OBJECTIVES,
    EigenAttention,
    LayerOutput,
    Objective,
    Problem,
    register_objective,
)
from manifoldkv.plan import CompressionPlan, LayerPlan, Provenance, Quantization
from manifoldkv.quantize import quantize
from manifoldkv.ranks import (
    RANK_RULES,
    GivenRanks,
    Optimal,
    RankRule,
    Sequential,
    Threshold,
    Uniform,
    register_rank_rule,
)
from manifoldkv.recipes import RECIPES, Recipe
from manifoldkv.runs.executors import Executor, LocalExecutor, RayExecutor
from manifoldkv.solvers import (
    SOLVERS,
    ClosedForm,
    Predictor,
    RiemannianAdam,
    Solution,
    Solver,
    register_solver,
)
from manifoldkv.tuning import tune

__all__ = [
    "KQSVD",
    "KSVD",
    "OBJECTIVES",
    "RANK_RULES",
    "RECIPES",
    "SOLVERS",
    "Basis",
    "Batch",
    "CacheError",
    "ClosedForm",
    "CompressedCache",
    "CompressionConfig",
    "CompressionPlan",
    "DivergenceError",
    "EigenAttention",
    "Executor",
    "ExecutorError",
    "GivenRanks",
    "HeadGrouping",
    "LayerActivations",
    "LayerErrors",
    "LayerOutput",
    "LayerPlan",
    "LocalExecutor",
    "ManifoldKVError",
    "ModelError",
    "Objective",
    "Optimal",
    "OutputError",
    "PlanError",
    "Predictor",
    "Problem",
    "Provenance",
    "Quantization",
    "RankError",
    "RankRule",
    "RayExecutor",
    "Recipe",
    "RiemannianAdam",
    "SeedError",
    "Sequential",
    "Solution",
    "Solver",
    "TextError",
    "TextSource",
    "Threshold",
    "Uniform",
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
    "register_rank_rule",
    "register_solver",
    "sample_tokens",
    "tune",
]
