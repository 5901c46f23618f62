"""What recipes of coded latents share: an objective with a metric, first tokens, the plan."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from manifoldkv.coding.transform import TransformConfig
from manifoldkv.core.basis import SITES
from manifoldkv.core.errors import ArgumentError, PlanError
from manifoldkv.core.progress import follow
from manifoldkv.learn.objectives import OBJECTIVES, Objective
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.predictor import stored_inputs
from manifoldkv.plan.site import SitePlan
from manifoldkv.recipes.recipe import Recipe
from manifoldkv.recipes.run import Run, Text, new_plan
from manifoldkv.statistics.statistics import Statistics

if TYPE_CHECKING:
    from manifoldkv.recipes.config import CompressionConfig

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CodedRecipe(Recipe):
    """Latents of the residuals of a linear prediction, coded within one budget of bytes.

    Parameters
    ----------
    sinks : int
        Number of first tokens that are kept uncompressed.
    objective : Objective or str
        Objective with a metric, which weighs errors.

    Raises
    ------
    ArgumentError
        If `sinks` is negative, or the objective is unknown or has no metric.
    """

    in_sixteen_bits = True

    sinks: int = 4
    objective: Objective | str = field(default="fisher", kw_only=True)

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ArgumentError(f"sinks must be >= 0, got {self.sinks}")
        objective = OBJECTIVES.resolve(self.objective)
        if not objective.has_metric:
            name = OBJECTIVES.describe(objective)["name"]
            known = ", ".join(n for n in OBJECTIVES.names() if OBJECTIVES.resolve(n).has_metric)
            raise ArgumentError(
                f"objective {name} has no metric, which coded latents need; those that have one: "
                f"{known}. Recipe low-rank takes any objective"
            )
        object.__setattr__(self, "objective", objective)

    def describe(self) -> dict[str, Any]:
        return {
            "objective": OBJECTIVES.describe(self._objective),
            "solver": {"name": "closed-form"},
            "key_grouping": "all",
            "value_grouping": "all",
            "sinks": self.sinks,
        }

    @property
    def _objective(self) -> Objective:
        assert isinstance(self.objective, Objective)  # resolved above
        return self.objective

    def configured(self, config: CompressionConfig) -> Self:
        if config.quantization is not None:
            raise PlanError(
                "the recipe quantizes every latent by itself: leave the quantization out, or take "
                "another recipe (low-rank)"
            )
        if config.rotary == "post":
            raise PlanError(
                "the recipe stores keys before rotation: leave rotary out, or take another "
                "recipe (low-rank)"
            )
        return super().configured(config)

    def prompt(self, length: int) -> int | None:
        """Return how many tokens of a sequence fill the cache before others are predicted.

        None if the cache is attended to while it is filled.
        """
        return None

    def calibrate(self, run: Run) -> Statistics:
        length = run.tokens.shape[1]
        prompt = self.prompt(length)
        # First tokens are not fitted to; of a shorter sequence all but one are left out.
        first = min(self.sinks, (prompt or length) - 1)
        warn_if_short(run.fitted[:, first:prompt], run.decoder.features)
        return run.statistics(first=first, prompt=prompt, jacobian=self._objective.needs_jacobian)

    def metrics(self, statistics: Statistics) -> list[Tensor]:
        """Return the metric of the objective by tensor, (D, D) each, float64."""
        return [
            self._objective.metric(statistics, layer, site)
            for layer in range(statistics.model.layers)
            for site in SITES
        ]


def warn_if_short(tokens: Tensor, features: int) -> None:
    """Warn of token ids that cannot span the features of a layer, all KV heads together."""
    distinct = len(tokens.unique())
    if tokens.numel() <= features:
        LOG.warning(
            "the calibration text has %d tokens, and a layer %d features: directions that the "
            "text does not span are not stored. Use more or longer sequences",
            tokens.numel(),
            features,
        )
    elif distinct <= features:
        LOG.warning(
            "the calibration text has %d distinct tokens, and the first layer, whose keys "
            "depend on the token alone, %d features: directions that the text does not span "
            "are not stored. Use more text",
            distinct,
            features,
        )


def without_empty_inputs(
    configs: Sequence[TransformConfig], planned: Sequence[SitePlan]
) -> list[TransformConfig]:
    """Return configurations without the inputs of which a plan stores nothing.

    Their reconstructions are constants, or predictions from other inputs.
    """
    empty = [one.quantizer.is_empty for one in planned]
    inputs = stored_inputs([config.inputs for config in configs], empty)
    return [
        replace(config, inputs=of_tensor) if of_tensor != config.inputs else config
        for config, of_tensor in zip(configs, inputs, strict=True)
    ]


def coded_plan(
    recipe: CodedRecipe,
    statistics: Statistics,
    config: CompressionConfig,
    planned: Sequence[SitePlan],
) -> CompressionPlan:
    """Return the plan of all tensors, with its estimated loss in its provenance.

    Errors in keys and values are those of held-out sequences, and their cost is read from the
    Fisher information of the same sequences: the plan was fitted to neither.
    """
    layers = [
        LayerPlan(key, value, window)
        for key, value, window in zip(
            planned[::2], planned[1::2], statistics.model.windows, strict=True
        )
    ]
    held_out, text = statistics.held_out, Text.of(statistics)
    plan = new_plan(recipe, statistics.model, layers, text, config, sinks=recipe.sinks)
    if held_out is None:
        LOG.info("fewer than 8 calibration sequences: none is held out to estimate the loss on")
        return plan
    LOG.info("estimating the loss on %d held-out sequences", held_out.sequences)
    nats = estimated_loss(plan, held_out)
    counted = held_out.sequences * held_out.length
    provenance = replace(plan.provenance, predicted_nats=nats, predicted_tokens=counted)
    return replace(plan, provenance=provenance)


def estimated_loss(plan: CompressionPlan, statistics: Statistics) -> float:
    """Return the loss of a plan in nats per token, to second order in the errors of samples."""
    nats, prompt = 0.0, statistics.prompt
    counted = None if prompt is None else prompt - statistics.first
    context = plan.predictor_context()
    for index, layer in enumerate(follow(plan.layers, len(plan.layers), "estimating the loss")):
        context.begin(index)
        for site, planned in layer.sites:
            of_tensor = statistics.layers[index].of(site)
            x = of_tensor.samples[:, :counted].flatten(0, 1)
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            reconstruction = planned.reconstruct(x, context)
            context.add(reconstruction)
            errors = (x - reconstruction).double()
            nats += float((errors.mT @ errors * of_tensor.fisher).sum()) / len(errors) / 2
    if prompt is not None:
        # The errors of a prompt cost the tokens after it.
        nats *= (prompt - statistics.first) / (statistics.length - prompt)
    return nats
