"""What `import manifoldkv` offers; each name is imported when it is first used."""

from .basis import (
    Basis,
    HeadGrouping,
    orthonormal_basis,
    principal_angles,
    projector_distance,
    rank_from_ratio,
)
from .cache import Codec, CompressedCache, compressed
from .diagnostics import LayerErrors, diagnose, layer_errors
from .errors import (
    ArgumentError,
    CacheError,
    ManifoldKVError,
    ModelError,
    PlanError,
    RunError,
)
from .evaluation.perplexity import Perplexity, perplexity
from .export import Exported, export_checkpoint
from .layers.activations import Batch, LayerActivations
from .layers.capture import capture
from .models.loading import load_model
from .models.support import check_supported
from .objectives import (
    KQSVD,
    KSVD,
    OBJECTIVES,
    EigenAttention,
    LayerOutput,
    Objective,
    Problem,
    register_objective,
)
from .pipeline.compress import compress, ratio_from_bytes
from .pipeline.config import CompressionConfig
from .pipeline.full_rank import full_rank_plan
from .pipeline.own import own_text
from .pipeline.recipes import RECIPES, BitRecipe, CommutingRecipe, Recipe, StoredRecipe
from .pipeline.rounding import quantize
from .pipeline.tune import tune
from .plan.layer import LayerPlan
from .plan.plan import CompressionPlan
from .plan.provenance import Provenance
from .plan.quantization import Quantization
from .ranks import (
    RANK_RULES,
    GivenRanks,
    Optimal,
    RankRule,
    Sequential,
    Threshold,
    Uniform,
    register_rank_rule,
)
from .runs.executors import Executor, LocalExecutor, RayExecutor
from .solvers import (
    SOLVERS,
    ClosedForm,
    Predictor,
    RiemannianAdam,
    Solution,
    Solver,
    checked,
    register_solver,
)
from .text.sources import TextSource, open_text
from .text.tokens import sample_tokens

__all__ = [
    "KQSVD",
    "KSVD",
    "OBJECTIVES",
    "RANK_RULES",
    "RECIPES",
    "SOLVERS",
    "ArgumentError",
    "Basis",
    "Batch",
    "BitRecipe",
    "CacheError",
    "ClosedForm",
    "Codec",
    "CommutingRecipe",
    "CompressedCache",
    "CompressionConfig",
    "CompressionPlan",
    "EigenAttention",
    "Executor",
    "Exported",
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
    "Perplexity",
    "PlanError",
    "Predictor",
    "Problem",
    "Provenance",
    "Quantization",
    "RankRule",
    "RayExecutor",
    "Recipe",
    "RiemannianAdam",
    "RunError",
    "Sequential",
    "Solution",
    "Solver",
    "StoredRecipe",
    "TextSource",
    "Threshold",
    "Uniform",
    "capture",
    "check_supported",
    "checked",
    "compress",
    "compressed",
    "diagnose",
    "export_checkpoint",
    "full_rank_plan",
    "layer_errors",
    "load_model",
    "open_text",
    "orthonormal_basis",
    "own_text",
    "perplexity",
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
