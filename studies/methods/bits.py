"""Recipes that choose bits, and variants of them."""

from __future__ import annotations

from math import inf
from typing import Any, ClassVar

from manifoldkv import BitRecipe, CompressionPlan
from methods.base import register_method
from methods.plans import AttendedMethod


class BitMethod(AttendedMethod):
    """Rank and bits from one budget."""

    recipe: ClassVar[BitRecipe]

    @classmethod
    def describe(cls) -> dict[str, Any]:
        return {"recipe": cls.recipe.describe()}

    def make_plan(self) -> CompressionPlan:
        return self.compressed(self.recipe, self.ratio)


@register_method("best")
class Best(BitMethod):
    """The recipe best: the least loss within the ratio, whatever the work."""

    recipe = BitRecipe(compute=inf)


@register_method("best-rounded")
class BestRounded(BitMethod):
    """Best with uniform quantisers in place of the trellis code."""

    recipe = BitRecipe(compute=inf, trellis=False)


@register_method("bits")
class Bits(BitMethod):
    """The recipe bits: the least loss of a decode step as fast as that of the stock cache."""

    recipe = BitRecipe()


@register_method("dense-bits")
class DenseBits(BitMethod):
    """Bits with one transform of all frequencies and nothing predicted."""

    recipe = BitRecipe(compute=inf, bands=(None,), depth=None)


@register_method("own-keys")
class OwnKeys(BitMethod):
    """Bits with values predicted from the keys of the same layer only."""

    recipe = BitRecipe(depth=0)


@register_method("one-layer-below")
class OneLayerBelow(BitMethod):
    """Bits with values predicted from the keys of their layer and of the one below."""

    recipe = BitRecipe(depth=1)


@register_method("work-4")
class Work4(BitMethod):
    """Bits within 4 times the multiplications of stock attention."""

    recipe = BitRecipe(compute=4)


@register_method("work-8")
class Work8(BitMethod):
    """Bits within 8 times the multiplications of stock attention."""

    recipe = BitRecipe(compute=8)


@register_method("work-16")
class Work16(BitMethod):
    """Bits within 16 times the multiplications of stock attention."""

    recipe = BitRecipe(compute=16)


@register_method("work-32")
class Work32(BitMethod):
    """Bits within 32 times the multiplications of stock attention."""

    recipe = BitRecipe(compute=32)
