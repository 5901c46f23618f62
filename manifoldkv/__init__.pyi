"""What `import manifoldkv` offers; each name is imported when it is first used."""

from .core.errors import ManifoldKVError
from .evaluate.diagnostics import diagnose
from .evaluate.perplexity import perplexity
from .learn.objectives import Objective, register_objective
from .learn.solvers import Solver, register_solver
from .models.loading import load_model
from .plan.formats.integers import Quantization
from .plan.plan import CompressionPlan
from .recipes.bits import BitRecipe
from .recipes.compress import calibrate, compress, fit, ratio_from_bytes
from .recipes.low_rank import RankRecipe
from .recipes.named import RECIPES, register_recipe
from .recipes.recipe import Recipe
from .recipes.rounding import quantize
from .recipes.tune import tune
from .serve.cache import compressed
from .serve.codec import Codec
from .statistics.statistics import Statistics
from .text.sources import open_text
from .text.tokens import sample_tokens

__all__ = [
    "RECIPES",
    "BitRecipe",
    "Codec",
    "CompressionPlan",
    "ManifoldKVError",
    "Objective",
    "Quantization",
    "RankRecipe",
    "Recipe",
    "Solver",
    "Statistics",
    "calibrate",
    "compress",
    "compressed",
    "diagnose",
    "fit",
    "load_model",
    "open_text",
    "perplexity",
    "quantize",
    "ratio_from_bytes",
    "register_objective",
    "register_recipe",
    "register_solver",
    "sample_tokens",
    "tune",
]
