"""Plans for caches that are stored: one step for all latents, and tables of symbols."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from operator import is_
from typing import TYPE_CHECKING, Any

from torch import Tensor

from manifoldkv.coding.costs import best_gains
from manifoldkv.coding.predictive import Reconstruct, fit_layers, predictor_of
from manifoldkv.coding.tables import entropy_coded, find_step
from manifoldkv.coding.transform import TransformConfig, WeightedKLT, sampled, weighted_klt
from manifoldkv.core.basis import SITES, Basis, HeadGrouping, detached
from manifoldkv.core.description import ModelDescription
from manifoldkv.core.errors import ArgumentError, PlanError
from manifoldkv.plan.formats.entropy import TOKEN_ID_BYTES, EntropyCoded, frame_bytes
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.predictor import PredictorContext, all_inputs, layers_below
from manifoldkv.plan.site import SitePlan
from manifoldkv.recipes.coded import CodedRecipe, coded_plan, without_empty_inputs
from manifoldkv.statistics.statistics import Statistics

if TYPE_CHECKING:
    from manifoldkv.recipes.config import CompressionConfig

SAMPLES = 8192
"""Tokens of each tensor that tables are made of."""
FOLDS = 8
"""Folds of `weighted_klt`: tables must hold for other text."""
ROUNDS = 3
"""Rounds of fitting predictors and the step, which depend on each other: first as if reconstruction
were exact."""
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredRecipe(CodedRecipe):
    """A plan for a `Codec`: latents become symbols, which an entropy coder stores.

    The transform is that of `BitRecipe`, but the Fisher information is that of a prompt whose cache
    is stored after it was read exactly: errors cost the tokens after it (`collect`, whose `prompt`
    is half of every calibration sequence). One step for all latents of the model is then the whole
    allocation; it is chosen so that the bytes of a stored cache, with everything in it, are
    expected to meet the ratio. They are compared to a cache in 16 bits, at the context of the run.
    No model runs on such latents: a codec decodes them to an uncompressed cache.

    Parameters
    ----------
    sinks, objective
        As in `CodedRecipe`.
    below : int or None
        Number of layers below that predict keys and values; with 0 only values are predicted, from
        the keys of their own layer, and with None nothing is.

    Raises
    ------
    ArgumentError
        If `sinks` or `below` is negative, or the objective is unknown or has no metric.
    """

    below: int | None = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.below is not None and self.below < 0:
            raise ArgumentError(f"below must be >= 0, got {self.below}")

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"ranks": {"name": "entropy"}, "below": self.below}

    def prompt(self, length: int) -> int:
        return length // 2

    def check(self, model: ModelDescription, config: CompressionConfig, context: int) -> None:
        for index, window in enumerate(model.windows):
            if window is not None:
                raise PlanError(
                    f"layer {index} has a sliding window of {window} tokens, whose caches recipe "
                    "stored does not store: take recipe bits"
                )
        self.budget(model, config.ratio, context)

    def budget(self, model: ModelDescription, ratio: float, context: int) -> float:
        """Return the bits of the symbols of a token, after all else in a stored cache.

        Raises
        ------
        ArgumentError
            If the ratio is too small.
        """
        full = 2 * 2 * model.features * model.layers * context
        sinks = min(self.sinks, context)
        around = frame_bytes(context) + TOKEN_ID_BYTES * context
        around += 2 * model.features * model.layers * sinks * model.itemsize
        around += 2 * model.layers  # sizes of tensors are rounded up to whole bytes
        remaining = ratio * full - around
        if remaining <= 0:
            raise ArgumentError(
                f"ratio {ratio:g} is too small: {self.sinks} uncompressed tokens, token ids and "
                f"frames take {around / full:.3g} of the cache of {context} tokens"
            )
        return 8 * remaining / max(1, context - sinks)

    def fit(self, statistics: Statistics, config: CompressionConfig) -> CompressionPlan:
        model, metrics = statistics.model, self.metrics(statistics)
        bits = self.budget(model, config.ratio, config.context or statistics.length)
        configs = self._configs(model)

        def fit(
            tensor: int, x: Tensor, inputs: Tensor | None, config: TransformConfig
        ) -> WeightedKLT:
            layer, site = divmod(tensor, len(SITES))
            of_tensor = statistics.layers[layer].of(SITES[site])
            return weighted_klt(of_tensor, metrics[tensor], x, inputs, samples=len(x), folds=FOLDS)

        step, rounds = 0.0, 1 if self.below is None else ROUNDS
        while True:
            transforms: list[WeightedKLT] = []
            for count in range(1, rounds + 1):
                LOG.info("fitting %d layers, round %d of %d", model.layers, count, rounds)
                reconstruct = reconstruct_at(step) if step else None
                layers = fit_layers(statistics, configs, fit, reconstruct)
                transforms = [_thinned(one) for layer in layers for one in layer.transforms]
                step = find_step([one.latents for one in transforms], bits)
            planned = []
            for transform, of_tensor in zip(transforms, configs, strict=True):
                basis, quantizer = quantized(transform, step, model.grouping)
                mean = detached(transform.mean.float())
                planned.append(SitePlan(basis, quantizer, mean, predictor_of(transform, of_tensor)))
            kept = without_empty_inputs(configs, planned)
            if all(map(is_, kept, configs)):
                return coded_plan(self, statistics, config, planned)
            LOG.info("fitting again: some predictions are from tensors whose latents are all 0")
            configs, rounds = kept, 2

    def _configs(self, model: ModelDescription) -> list[TransformConfig]:
        """Return the configurations of all tensors."""
        if self.below is None:
            return [TransformConfig() for _ in model.windows for _ in SITES]
        depths = [min(self.below, layers_below(model.windows, i)) for i in range(model.layers)]
        return [TransformConfig(all_inputs(site, depth)) for depth in depths for site in SITES]


def quantized(
    transform: WeightedKLT, step: float, grouping: HeadGrouping
) -> tuple[Basis, EntropyCoded]:
    """Return basis and quantizer of the latents that are not always rounded to 0."""
    used = (transform.latents / step).round().abs().amax(dim=0) > 0
    order = used.int().argsort(descending=True, stable=True)
    # Every head has as many latents: some that are always 0 may be among them.
    columns = order[: max(1, -(-int(used.sum()) // grouping.width)) * grouping.width]
    quantizer = entropy_coded(transform.latents[:, columns] / step)
    return transform.basis(columns, grouping, step=step), quantizer


def reconstruct_at(step: float) -> Reconstruct:
    """Return the reconstruction of tensors whose latents are rounded at a step.

    Latents are those of residuals of a cross-validation, as of text that nothing was fitted to:
    where one is rounded to 0, the prediction is the reconstruction.
    """

    def reconstruct(
        tensor: int, transform: WeightedKLT, x: Tensor, context: PredictorContext
    ) -> Tensor:
        scaled = (transform.latents / step).float()
        rounded = scaled.round()
        errors = rounded * best_gains(scaled, rounded).float() - scaled
        return x + (errors @ (transform.up * step).float().mT).to(x)

    return reconstruct


def _thinned(transform: WeightedKLT) -> WeightedKLT:
    """Return a transform with fewer latents, which are kept until all tensors are fitted."""
    return replace(transform, latents=sampled(transform.latents, SAMPLES).float())
