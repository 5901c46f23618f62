"""Ways to make a cache smaller: recipes, their parts, and what people would use instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from comparison.rivals import (
    SINKS,
    DroppingHolder,
    SinksAndRecent,
    SnapKV,
    check_without_windows,
    float8_cache,
    in_float8,
    losses,
)
from comparison.transformers_cache import HQQHolder, check_hqq
from manifoldkv import (
    RECIPES,
    BitRecipe,
    CompressionPlan,
    Quantization,
    RankRecipe,
    Recipe,
    compress,
    quantize,
)
from manifoldkv.basis import Rotary
from manifoldkv.coding.integers import Layout
from manifoldkv.evaluation import Perplexity, perplexity
from manifoldkv.evaluation.retrieval import Holder, through_plan
from manifoldkv.evaluation.speed import decode_speed
from manifoldkv.models.support import (
    attention_of,
    cached_tokens,
    decoder_layers,
    sliding_windows,
)
from manifoldkv.ranks import Optimal, Uniform
from manifoldkv.recipes.full_rank import full_rank_plan


def attention_work(plan: CompressionPlan, query_heads: int) -> float:
    """Multiplications per cached token of a decode step, against the uncompressed cache.

    Scores and mixtures on latents of g concatenated heads are g·r long. Keys stored before rotation
    are expanded instead, every KV head of every token once a step, and scored at head_dim. Where
    latents are predicted, values are expanded too, and both are predicted again.
    """
    work = full = 0
    for layer in plan.layers:
        full += 2 * query_heads * layer.key.head_dim
        for site, basis in layer.sites:
            features = basis.rank * basis.grouping.width
            if plan.predictor_depth is not None or (site == "key" and plan.rotary == "pre"):
                expanded = basis.grouping.heads * basis.head_dim
                work += query_heads * basis.head_dim + expanded * features
            else:
                work += query_heads * features
        predictions = (site.predictor for site in (layer.key, layer.value))
        work += sum(p.weights.numel() for p in predictions if p is not None)
    return work / full


BITS = (8, 4, 3, 2)
ROUNDED_BITS = 4
"""Of latents in the compositions of rank and bits."""
CALIBRATION_OF_BITS = 8
"""Calibration sequences that ranges of integers are found on."""


class Composition(Protocol):
    """Something that makes caches, at a ratio that is asked for."""

    @property
    def said(self) -> str:
        """Return what it does, in a line."""
        ...

    def ratios(self, asked: Sequence[float]) -> Sequence[float]:
        """Return the ratios it is measured at, given those asked for."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return what its caches depend on, beside ratio, model and text."""
        ...

    def made_by(self) -> tuple[Callable[..., Any], ...]:
        """Return what else makes its plans: classes and functions."""
        ...

    def point(self, at: Setting, ratio: float) -> Point:
        """Return what it makes at a ratio.

        Raises
        ------
        ModelError
            If it can make nothing for the model.
        """
        ...


class Point(Protocol):
    """A way to hold tokens, made for a ratio."""

    def nbytes(self, tokens: int) -> int:
        """Return the bytes of a cache of so many tokens; a plan is made for it.

        Raises
        ------
        ArgumentError, PlanError, ModelError
            If there is no such plan.
        """
        ...

    def perplexity(self, tokens: Tensor) -> Perplexity | None:
        """Return the loss through the cache, or None where that means nothing."""
        ...

    @property
    def holder(self) -> Holder:
        """Return how prompts are held."""
        ...

    def facts(self) -> dict[str, float]:
        """Return what else is known of it."""
        ...


@dataclass(frozen=True)
class Setting:
    """What every composition is given.

    Parameters
    ----------
    model : PreTrainedModel
        Measured.
    calibration : Tensor
        (sequences, length)
    window : int
        Tokens for which ratios are kept.
    rotary : {"pre", "post"}
        Of keys in plans.
    seed : int
        Of solvers.
    folder : Path
        Of what plans are made of.
    """

    model: PreTrainedModel
    calibration: Tensor
    window: int
    rotary: Rotary
    seed: int
    folder: Path

    def stock_bytes(self, tokens: int) -> int:
        """Return the bytes of so many tokens in the stock cache, in 16-bit numbers."""
        attention = attention_of(decoder_layers(self.model)[0])
        elements = self.model.config.get_text_config().num_key_value_heads * attention.head_dim
        windows = sliding_windows(self.model.config)
        return 2 * elements * 2 * sum(cached_tokens(tokens, window) for window in windows)

    def compressed(self, recipe: Recipe | BitRecipe, ratio: float) -> CompressionPlan:
        """Return the plan of a recipe."""
        return compress(
            self.model,
            self.calibration,
            ratio=ratio,
            recipe=recipe,
            rotary=self.rotary,
            seed=self.seed,
            context=self.window,
            folder=self.folder,
        )

    def rounded(self, plan: CompressionPlan, quantization: Quantization) -> CompressionPlan:
        """Return a plan with integer latents."""
        return quantize(plan, self.model, self.calibration[:CALIBRATION_OF_BITS], quantization)


class PlanPoint:
    """A plan, made when it is needed, or read from where it was stored."""

    def __init__(
        self, at: Setting, make: Callable[[], CompressionPlan], stored: Path | None = None
    ) -> None:
        self._at = at
        self._make = make
        self._stored = stored

    def stored_in(self, folder: Path) -> PlanPoint:
        """Return the same, its plan stored in a folder, or read from it."""
        return PlanPoint(self._at, self._make, folder)

    @cached_property
    def plan(self) -> CompressionPlan:
        if self._stored is not None and self._stored.exists():
            return CompressionPlan.load(self._stored)
        plan = self._make()
        if self._stored is not None:
            plan.save(self._stored)
        return plan

    def nbytes(self, tokens: int) -> int:
        return self.plan.nbytes(tokens)

    def perplexity(self, tokens: Tensor) -> Perplexity:
        return perplexity(self._at.model, tokens, self.plan)

    def decode_time(self, tokens: int) -> float:
        """Return the time of a decode step after so many tokens, against the stock cache."""
        return decode_speed(self._at.model, self.plan, tokens=tokens, new_tokens=4).time_ratio

    @property
    def holder(self) -> Holder:
        return partial(through_plan, plan=self.plan)

    def facts(self) -> dict[str, float]:
        attention = attention_of(decoder_layers(self._at.model)[0])
        query_heads = int(attention.o_proj.weight.shape[1]) // int(attention.head_dim)
        return {
            "basis_bytes": self.plan.basis_nbytes(),
            "attention_work": attention_work(self.plan, query_heads),
        }


@dataclass(frozen=True)
class Ranks:
    """A recipe, its latents in 16 bits or rounded to fewer."""

    recipe: RankRecipe
    said: str
    bits: int | None = None
    only_at: tuple[float, ...] = ()

    def ratios(self, asked: Sequence[float]) -> Sequence[float]:
        reached = 1 if self.bits is None else self.bits / 16
        chosen = self.only_at or asked
        return [ratio for ratio in asked if ratio <= reached and ratio in chosen]

    def describe(self) -> dict[str, Any]:
        return {"recipe": self.recipe.describe(), "bits": self.bits}

    def made_by(self) -> tuple[Callable[..., Any], ...]:
        return type(self.recipe.objective), type(self.recipe.solver), type(self.recipe.ranks)

    def point(self, at: Setting, ratio: float) -> PlanPoint:
        if self.bits is None:
            return PlanPoint(at, partial(at.compressed, self.recipe, ratio))
        return PlanPoint(at, partial(self._rounded, at, ratio, self.bits))

    def _rounded(self, at: Setting, ratio: float, bits: int) -> CompressionPlan:
        """Return the plan with the largest ranks whose integers stay within the ratio."""
        of_ranks = min(1.0, ratio * 16 / bits)
        while True:
            plan = at.rounded(at.compressed(self.recipe, of_ranks), Quantization(bits))
            taken = plan.nbytes(at.window) / at.stock_bytes(at.window)
            if taken <= ratio:
                return plan
            of_ranks *= 0.995 * ratio / taken


@dataclass(frozen=True)
class Integers:
    """No rank is cut; every element is an integer."""

    layout: Layout
    said: str
    all_bits: tuple[int, ...] = BITS

    def ratios(self, asked: Sequence[float]) -> Sequence[float]:
        return [bits / 16 for bits in self.all_bits]

    def describe(self) -> dict[str, Any]:
        return {"integers": self.layout}

    def made_by(self) -> tuple[Callable[..., Any], ...]:
        return ()

    def point(self, at: Setting, ratio: float) -> PlanPoint:
        quantization = Quantization(round(16 * ratio), self.layout)
        return PlanPoint(at, lambda: at.rounded(full_rank_plan(at.model), quantization))


@dataclass(frozen=True)
class Bits:
    """Rank and bits from one budget."""

    recipe: BitRecipe
    said: str

    def ratios(self, asked: Sequence[float]) -> Sequence[float]:
        return asked

    def describe(self) -> dict[str, Any]:
        return {"recipe": self.recipe.describe()}

    def made_by(self) -> tuple[Callable[..., Any], ...]:
        return (BitRecipe,)

    def point(self, at: Setting, ratio: float) -> PlanPoint:
        return PlanPoint(at, partial(at.compressed, self.recipe, ratio))


@dataclass(frozen=True)
class Float8:
    """Eight-bit floats."""

    said: str

    def ratios(self, asked: Sequence[float]) -> Sequence[float]:
        return [0.5]

    def describe(self) -> dict[str, Any]:
        return {"rival": "fp8"}

    def made_by(self) -> tuple[Callable[..., Any], ...]:
        return ()

    def point(self, at: Setting, ratio: float) -> _Float8Point:
        check_without_windows(at.model)
        return _Float8Point(at)


@dataclass(frozen=True)
class _Float8Point:
    at: Setting

    def nbytes(self, tokens: int) -> int:
        return self.at.stock_bytes(tokens) // 2

    def perplexity(self, tokens: Tensor) -> Perplexity:
        return losses(
            self.at.model, tokens, lambda: {"past_key_values": float8_cache(self.at.model)}
        )

    @property
    def holder(self) -> Holder:
        return in_float8

    def facts(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class OfTransformers:
    """The quantised cache of transformers."""

    said: str
    all_bits: tuple[int, ...] = (8, 4, 2)

    def ratios(self, asked: Sequence[float]) -> Sequence[float]:
        return [bits / 16 for bits in self.all_bits]

    def describe(self) -> dict[str, Any]:
        return {"rival": "transformers hqq"}

    def made_by(self) -> tuple[Callable[..., Any], ...]:
        return (HQQHolder,)

    def point(self, at: Setting, ratio: float) -> _PointOfTransformers:
        check_without_windows(at.model)
        check_hqq()
        return _PointOfTransformers(at, HQQHolder(round(16 * ratio)))


@dataclass(frozen=True)
class _PointOfTransformers:
    at: Setting
    holder: HQQHolder

    def nbytes(self, tokens: int) -> int:
        return self.holder.nbytes(self.at.stock_bytes(tokens) // 2)

    def perplexity(self, tokens: Tensor) -> None:
        """Return nothing: a text that is read at once sees itself as it is."""

    def facts(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class Dropping:
    """Tokens are kept whole, or not at all."""

    holder: type[DroppingHolder]
    said: str

    def ratios(self, asked: Sequence[float]) -> Sequence[float]:
        return asked

    def describe(self) -> dict[str, Any]:
        return {"rival": self.holder.__name__}

    def made_by(self) -> tuple[Callable[..., Any], ...]:
        return (self.holder,)

    def point(self, at: Setting, ratio: float) -> _DroppingPoint:
        check_without_windows(at.model)
        return _DroppingPoint(at, self.holder(ratio))


@dataclass(frozen=True)
class _DroppingPoint:
    at: Setting
    holder: DroppingHolder

    def nbytes(self, tokens: int) -> int:
        return self.at.stock_bytes(self.holder.kept_tokens(tokens))

    def perplexity(self, tokens: Tensor) -> Perplexity | None:
        return self.holder.perplexity(self.at.model, tokens)

    def facts(self) -> dict[str, float]:
        return {}


RANKED = {name: recipe for name, recipe in RECIPES.items() if isinstance(recipe, RankRecipe)}
LOW_RANK = RANKED["low-rank"]
FAST_UNIFORM = replace(RANKED["fast"], ranks=Uniform())
GROUPED = replace(LOW_RANK, ranks=Uniform(), tuning_steps=0)
COMPOSITIONS: dict[str, Composition] = {
    "eigen-attention": Ranks(RANKED["eigen-attention"], "the recipe"),
    "paper": Ranks(RANKED["paper"], "the recipe, with the paper's solver", only_at=(0.5,)),
    "fast": Ranks(RANKED["fast"], "the recipe: the paper's objective, Riemannian Adam"),
    "fast-uniform": Ranks(FAST_UNIFORM, "fast, the same ranks in every layer"),
    "low-rank": Ranks(LOW_RANK, "the recipe"),
    "grouped-orthonormal": Ranks(
        replace(RANKED["eigen-attention"], key_grouping="all", value_grouping="all"),
        "eigen-attention, all heads in one basis",
    ),
    "grouped": Ranks(GROUPED, "kq-svd (oblique), all heads in one basis"),
    "grouped-optimal": Ranks(replace(GROUPED, ranks=Optimal()), "grouped with optimal ranks"),
    "grouped-4-bit": Ranks(GROUPED, "grouped, latents of 4 bits", bits=ROUNDED_BITS),
    "grouped-layer-output": Ranks(
        replace(FAST_UNIFORM, key_grouping="all", value_grouping="all"),
        "fast (layer-output, orthonormal), all heads in one basis",
    ),
    "fast-optimal-tuned": Ranks(
        replace(RANKED["fast"], ranks=Optimal(), tuning_steps=LOW_RANK.tuning_steps),
        "fast in the paper's head sharing, optimal ranks, tuned",
        only_at=(0.5,),
    ),
    "best": Bits(
        BitRecipe(),
        "the recipe: bits for what a prediction from the two layers below leaves",
    ),
    "bits": Bits(
        BitRecipe(below=None),
        "the recipe: rank and bits from one budget, Fisher coordinates, a scale per token, the "
        "first 4 tokens exact",
    ),
    "bits-few-widths": Bits(
        BitRecipe(widths=(0, 2, 4, 8), below=None), "bits, latents of 0, 2, 4 and 8 bits only"
    ),
    "own-keys": Bits(BitRecipe(below=0), "best, values predicted from their own keys only"),
    "one-layer-below": Bits(BitRecipe(below=1), "best, predicted from one layer below"),
    "integers": Integers(
        "token",
        "no rank cut; every head rotated by Hadamard, integers of 8, 4, 3 and 2 bits with a range "
        "per token and head",
    ),
    "kivi": Integers(
        "kivi", "the same in KIVI's layout, the newest 64 tokens exact", all_bits=(4, 2)
    ),
    "fp8": Float8("keys and values in the format e4m3, no scale"),
    "transformers-hqq": OfTransformers(
        "the quantised cache of transformers, HQQ with a scale and a zero point per 64 elements"
    ),
    "sinks-recent": Dropping(
        SinksAndRecent, f"the first {SINKS} tokens and the newest, others dropped (StreamingLLM)"
    ),
    "snapkv": Dropping(
        SnapKV, "the tokens that the end of the prompt attends to, others dropped (SnapKV)"
    ),
}
USUAL = (
    *("eigen-attention", "fast-uniform", "low-rank", "grouped", "grouped-4-bit"),
    *("best", "bits", "integers", "kivi", "fp8", "sinks-recent", "snapkv"),
)
