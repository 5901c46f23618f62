"""Conformance tests of objectives, solvers, rank rules, recipes and quantizers, to inherit from.

    from manifoldkv.testing import ObjectiveConformance

    class TestMine(ObjectiveConformance):
        objective = MyObjective()

pytest collects the inherited tests. They run on tiny random models in float64, in seconds.
"""

from manifoldkv.testing.checks import assert_describable, assert_orthonormal
from manifoldkv.testing.objectives import ObjectiveConformance
from manifoldkv.testing.quantizers import QuantizerConformance
from manifoldkv.testing.ranks import RankRuleConformance
from manifoldkv.testing.recipes import RecipeConformance
from manifoldkv.testing.solvers import SolverConformance
from manifoldkv.testing.tiny import (
    HEAD_DIM,
    KV_HEADS,
    SHAPE,
    random_basis,
    tiny_activations,
    tiny_tokens,
)

__all__ = [
    "HEAD_DIM",
    "KV_HEADS",
    "SHAPE",
    "ObjectiveConformance",
    "QuantizerConformance",
    "RankRuleConformance",
    "RecipeConformance",
    "SolverConformance",
    "assert_describable",
    "assert_orthonormal",
    "random_basis",
    "tiny_activations",
    "tiny_tokens",
]
