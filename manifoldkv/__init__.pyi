"""What `import manifoldkv` offers; each name is imported when it is first used."""

from .cache import compressed
from .codec import Codec
from .coding.integers import Quantization
from .diagnostics import diagnose
from .errors import ManifoldKVError
from .evaluation.perplexity import perplexity
from .models.loading import load_model
from .objectives import Objective, register_objective
from .plan.plan import CompressionPlan
from .recipes.bits import BitRecipe
from .recipes.compress import compress, ratio_from_bytes
from .recipes.low_rank import RankRecipe
from .recipes.named import RECIPES, register_recipe
from .recipes.recipe import Recipe
from .recipes.rounding import quantize
from .recipes.tune import tune
from .solvers import Solver, register_solver
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
    "compress",
    "compressed",
    "diagnose",
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
