"""Integers without a cut in rank: plans of full rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from manifoldkv import CompressionPlan, Quantization
from manifoldkv.recipes.full_rank import full_rank_plan
from methods.base import register_method
from methods.plans import AttendedMethod


@register_method("integers")
class Integers(AttendedMethod):
    """Heads rotated by Hadamard, integers of 8, 4, 3 and 2 bits with a range per token and head."""

    bits: ClassVar[tuple[int, ...]] = (8, 4, 3, 2)

    @classmethod
    def ratios(cls, requested: Sequence[float]) -> Sequence[float]:
        return [bits / 16 for bits in cls.bits]

    def make_plan(self) -> CompressionPlan:
        quantization = Quantization(round(16 * self.ratio), "token")
        return self.rounded(full_rank_plan(self.setting.model), quantization)
