"""Methods that are compression plans."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

from torch import Tensor
from transformers import Cache, PreTrainedModel

from manifoldkv import CompressionPlan, Quantization, Recipe, compress, quantize
from manifoldkv.cache.compressed import Prefill
from manifoldkv.evaluation import Perplexity, perplexity
from manifoldkv.evaluation.retrieval import Prompts, through_plan
from manifoldkv.evaluation.speed import decode_speed
from manifoldkv.models.support import attention_of, decoder_layers
from methods.base import Method

CALIBRATION_OF_BITS = 8
"""Number of calibration sequences that ranges of integers are fitted to."""


def attention_work(plan: CompressionPlan, query_heads: int) -> float:
    """Multiplications per cached token of a decode step, against the uncompressed cache.

    Scores and mixtures on latents of g concatenated heads are g·r long. Keys stored before rotation
    are expanded instead, every KV head of every token once a step, and scored at head_dim. Where
    latents are predicted, values are expanded too, and both are predicted again.
    """
    work = full = 0
    for layer in plan.layers:
        full += 2 * query_heads * layer.key.head_dim
        for site, planned in layer.sites:
            latents = planned.basis.down.shape[2]
            if plan.predictor_depth is not None or (site == "key" and plan.rotary == "pre"):
                work += query_heads * planned.head_dim + planned.features * latents
            else:
                work += query_heads * latents
            if planned.predictor is not None:
                work += planned.predictor.weights.numel()
    return work / full


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

    def nbytes(self, tokens: int) -> int:
        return self.plan.nbytes(tokens)

    def perplexity(self, tokens: Tensor) -> Perplexity:
        return perplexity(self.setting.model, tokens, self.plan)

    def decode_time(self, tokens: int) -> float:
        """Return the time of a decode step at a context length, over that of the stock cache."""
        return decode_speed(self.setting.model, self.plan, tokens=tokens, new_tokens=4).time_ratio

    def holder(
        self, model: PreTrainedModel, prompts: Prompts, prefill: Prefill = "exact"
    ) -> AbstractContextManager[Callable[[], Cache]]:
        return through_plan(model, prompts, self.plan, prefill)

    def facts(self) -> dict[str, float]:
        attention = attention_of(decoder_layers(self.setting.model)[0])
        query_heads = int(attention.o_proj.weight.shape[1]) // int(attention.head_dim)
        return {
            "basis_bytes": self.plan.basis_nbytes(),
            "attention_work": attention_work(self.plan, query_heads),
        }
