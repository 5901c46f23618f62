"""Methods that are compression plans."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

from torch import Tensor
from transformers import Cache, PreTrainedModel

from manifoldkv import CompressionPlan, Quantization, Recipe, compress, quantize
from manifoldkv.evaluate import Perplexity, perplexity
from manifoldkv.evaluate.retrieval import Prompts, through_plan
from manifoldkv.evaluate.speed import decode_speed
from manifoldkv.serve.cache.compressed import Prefill
from methods.base import Method

CALIBRATION_OF_BITS = 8
"""Number of calibration sequences that ranges of integers are fitted to."""


class PlanMethod(Method):
    """A compression plan, made when it is first needed or loaded from `plan_folder`."""

    plan_folder: Path | None = None

    @abstractmethod
    def make_plan(self) -> CompressionPlan:
        """Return the plan of the ratio."""

    @cached_property
    def plan(self) -> CompressionPlan:
        if self.plan_folder is not None and self.plan_folder.exists():
            return CompressionPlan.load(self.plan_folder)
        plan = self.make_plan()
        if self.plan_folder is not None:
            plan.save(self.plan_folder)
        return plan

    def compressed(self, recipe: Recipe, ratio: float) -> CompressionPlan:
        """Return the plan of a recipe."""
        return compress(
            self.setting.model,
            self.setting.calibration,
            ratio=ratio,
            recipe=recipe,
            rotary=self.setting.rotary,
            seed=self.setting.seed,
            context=self.setting.window,
            folder=self.setting.folder,
        )

    def rounded(self, plan: CompressionPlan, quantization: Quantization) -> CompressionPlan:
        """Return a plan with integer latents."""
        tokens = self.setting.calibration[:CALIBRATION_OF_BITS]
        return quantize(plan, self.setting.model, tokens, quantization)

    def planned(self) -> Sequence[PlanMethod]:
        return (self,)

    def nbytes(self, tokens: int) -> int:
        return self.plan.nbytes(tokens)

    def facts(self) -> dict[str, float]:
        return {"basis_bytes": self.plan.basis_nbytes(), "attention_work": self.plan.compute}


class AttendedMethod(PlanMethod):
    """A plan whose compressed cache is attended to, token by token."""

    def perplexity(self, tokens: Tensor) -> Perplexity:
        return perplexity(self.setting.model, tokens, self.plan)

    def decode_time(self, tokens: int) -> float:
        """Return the time of a decode step at a context length, over that of the stock cache."""
        return decode_speed(self.setting.model, self.plan, tokens=tokens, new_tokens=4).time_ratio

    def holder(
        self, model: PreTrainedModel, prompts: Prompts, prefill: Prefill = "exact"
    ) -> AbstractContextManager[Callable[[], Cache]]:
        return through_plan(model, prompts, self.plan, prefill)
