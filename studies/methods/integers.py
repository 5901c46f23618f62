"""Integers without a cut in rank: plans of full rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from manifoldkv import CompressionPlan, Quantization
from manifoldkv.coding.integers import Layout
from manifoldkv.recipes.full_rank import full_rank_plan
from methods.base import register_method
from methods.plans import AttendedMethod


@register_method("integers")
class Integers(AttendedMethod):
    """Heads rotated by Hadamard, integers of 8, 4, 3 and 2 bits with a range per token and head."""

    layout: ClassVar[Layout] = "token"
    bits: ClassVar[tuple[int, ...]] = (8, 4, 3, 2)

    @classmethod
    def ratios(cls, requested: Sequence[float]) -> Sequence[float]:
        return [bits / 16 for bits in cls.bits]

    def make_plan(self) -> CompressionPlan:
        quantization = Quantization(round(16 * self.ratio), self.layout)
        return self.rounded(full_rank_plan(self.setting.model), quantization)


@register_method("kivi")
class KIVI(Integers):
    """Integers of 4 and 2 bits in KIVI's layout, the newest 64 tokens uncompressed."""

    layout = "kivi"
    bits = (4, 2)
