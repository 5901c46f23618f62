"""Recipes that choose bits, and variants of them."""

from __future__ import annotations

from typing import Any, ClassVar

from manifoldkv import BitRecipe, CompressionPlan
from methods.base import register_method
from methods.plans import PlanMethod


class BitMethod(PlanMethod):
    """Rank and bits from one budget."""

    recipe: ClassVar[BitRecipe]

    @classmethod
    def describe(cls) -> dict[str, Any]:
        return {"recipe": cls.recipe.describe()}

    def make_plan(self) -> CompressionPlan:
        return self.compressed(self.recipe, self.ratio)


@register_method("best")
class Best(BitMethod):
    """The recipe best: bits for the residual of a prediction from the two layers below."""

    recipe = BitRecipe()


@register_method("bits")
class Bits(BitMethod):
    """The recipe bits: rank and bits from one budget, the first 4 tokens uncompressed."""

    recipe = BitRecipe(below=None)


@register_method("bits-few-widths")
class BitsFewWidths(BitMethod):
    """Bits with latents of 0, 2, 4 and 8 bits only."""

    recipe = BitRecipe(widths=(0, 2, 4, 8), below=None)


@register_method("own-keys")
class OwnKeys(BitMethod):
    """Best with values predicted from the keys of the same layer only."""

    recipe = BitRecipe(below=0)


@register_method("one-layer-below")
class OneLayerBelow(BitMethod):
    """Best predicted from one layer below."""

    recipe = BitRecipe(below=1)
