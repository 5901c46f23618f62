"""What `import manifoldkv` offers; each name is imported when it is first used."""

from .activations.capture import capture
from .activations.layer import Batch, LayerActivations
from .basis import (
    Basis,
    HeadGrouping,
    orthonormal_basis,
    principal_angles,
    projector_distance,
    rank_from_ratio,
)
from .cache import CompressedCache, compressed
from .codec import Codec
from .coding.integers import Quantization
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
from .plan.layer import LayerPlan
from .plan.plan import CompressionPlan
from .plan.provenance import Provenance
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
from .recipes.compress import compress, ratio_from_bytes
from .recipes.config import CompressionConfig
from .recipes.full_rank import full_rank_plan
from .recipes.own import own_text
from .recipes.recipe import RECIPES, BitRecipe, CommutingRecipe, Recipe, StoredRecipe
from .recipes.rounding import quantize
from .recipes.tune import tune
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
