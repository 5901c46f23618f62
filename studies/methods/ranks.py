"""Recipes that choose ranks, and variants of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from manifoldkv import RECIPES, CompressionPlan, Quantization, RankRecipe
from manifoldkv.learn.ranks import Optimal, Uniform
from manifoldkv.learn.solvers import ObliqueLBFGS, RiemannianLBFGS
from methods.base import register_method
from methods.plans import AttendedMethod

RANKED = {name: recipe for name, recipe in RECIPES.items() if isinstance(recipe, RankRecipe)}
GROUPED = replace(RANKED["low-rank"], ranks=Uniform(), tuning_steps=0)


class RankMethod(AttendedMethod):
    """A recipe with latents in 16 bits, or in integers if `bits` is set."""

    recipe: ClassVar[RankRecipe]
    bits: ClassVar[int | None] = None
    only_at: ClassVar[tuple[float, ...]] = ()
    """Ratios of a slow method; all if empty."""

    @classmethod
    def ratios(cls, requested: Sequence[float]) -> Sequence[float]:
        largest = 1 if cls.bits is None else cls.bits / 16
        chosen = cls.only_at or requested
        return [ratio for ratio in requested if ratio <= largest and ratio in chosen]

    @classmethod
    def describe(cls) -> dict[str, Any]:
        return {"recipe": cls.recipe.describe(), "bits": cls.bits}

    def make_plan(self) -> CompressionPlan:
        if self.bits is None:
            return self.compressed(self.recipe, self.ratio)
        return self._with_integers(self.bits)

    def _with_integers(self, bits: int) -> CompressionPlan:
        """Return the plan with the largest ranks whose integers stay within the ratio."""
        setting, rank_ratio = self.setting, min(1.0, self.ratio * 16 / bits)
        while True:
            plan = self.rounded(self.compressed(self.recipe, rank_ratio), Quantization(bits))
            ratio = plan.nbytes(setting.window) / setting.stock_bytes(setting.window)
            if ratio <= self.ratio:
                return plan
            rank_ratio *= 0.995 * self.ratio / ratio


@register_method("eigen-attention")
class EigenAttention(RankMethod):
    """The recipe eigen-attention."""

    recipe = RANKED["eigen-attention"]


@register_method("paper")
class Paper(RankMethod):
    """The recipe paper, with the paper's solver."""

    recipe = RANKED["paper"]
    only_at = (0.5,)


@register_method("fast")
class Fast(RankMethod):
    """The recipe fast: the paper's objective, nested oblique bases."""

    recipe = RANKED["fast"]


@register_method("fast-separate")
class FastSeparate(RankMethod):
    """Fast with oblique bases solved separately for every rank."""

    recipe = replace(Fast.recipe, solver=ObliqueLBFGS())


@register_method("layer-output")
class OrthonormalLayerOutput(RankMethod):
    """The paper's objective and orthonormal bases, the same ranks in every layer."""

    recipe = replace(Fast.recipe, solver=RiemannianLBFGS(), ranks=Uniform())


@register_method("fast-uniform")
class FastUniform(RankMethod):
    """Fast with the same ranks in every layer."""

    recipe = replace(Fast.recipe, ranks=Uniform())


@register_method("low-rank")
class LowRank(RankMethod):
    """The recipe low-rank."""

    recipe = RANKED["low-rank"]


@register_method("grouped-orthonormal")
class GroupedOrthonormal(RankMethod):
    """Eigen-attention with all heads in one basis."""

    recipe = replace(EigenAttention.recipe, key_grouping="all", value_grouping="all")


@register_method("grouped")
class Grouped(RankMethod):
    """KQ-SVD (oblique) with all heads in one basis."""

    recipe = GROUPED


@register_method("grouped-optimal")
class GroupedOptimal(RankMethod):
    """Grouped with optimal ranks."""

    recipe = replace(GROUPED, ranks=Optimal())


@register_method("grouped-4-bit")
class Grouped4Bit(RankMethod):
    """Grouped with latents of 4 bits."""

    recipe = GROUPED
    bits = 4


@register_method("grouped-layer-output")
class GroupedLayerOutput(RankMethod):
    """Fast-uniform (layer-output, oblique) with all heads in one basis."""

    recipe = replace(FastUniform.recipe, key_grouping="all", value_grouping="all")


@register_method("fast-optimal-tuned")
class FastOptimalTuned(RankMethod):
    """Fast in the paper's head sharing, with optimal ranks, tuned."""

    recipe = replace(Fast.recipe, ranks=Optimal(), tuning_steps=LowRank.recipe.tuning_steps)
    only_at = (0.5,)
