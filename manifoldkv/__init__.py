"""manifoldkv: low-rank bases for the key-value cache of language models."""

from manifoldkv.basis import (
    Basis,
    HeadGrouping,
    orthonormal_basis,
    principal_angles,
    projector_distance,
    rank_from_ratio,
)
from manifoldkv.cache import CompressedCache, compressed
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
from manifoldkv.layers.activations import Batch, LayerActivations
from manifoldkv.layers.capture import capture
from manifoldkv.models.loading import load_model
from manifoldkv.models.support import check_supported
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
from manifoldkv.pipeline.compress import compress, ratio_from_bytes
from manifoldkv.pipeline.config import CompressionConfig
from manifoldkv.pipeline.recipes import RECIPES, Recipe
from manifoldkv.pipeline.rounding import quantize
from manifoldkv.pipeline.tune import tune
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.provenance import Provenance
from manifoldkv.plan.quantization import Quantization
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
from manifoldkv.text.sources import TextSource, open_text
from manifoldkv.text.tokens import sample_tokens

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
