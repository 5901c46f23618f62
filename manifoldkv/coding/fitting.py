"""Fitting of transforms, predictors and bits to statistics, within two budgets."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manifoldkv.coding.allocation import PACK, allocate, allocate_streams
from manifoldkv.coding.candidates import COMPUTE_TOLERANCE, Candidates, StepCompute, lowest
from manifoldkv.coding.costs import gaussian_costs
from manifoldkv.coding.predictive import Reconstruct, fit_layers, predictor_of
from manifoldkv.coding.search import (
    GROUP_LENGTHS,
    ONE_GROUP,
    LayerTensors,
    SearchSpace,
    candidates,
)
from manifoldkv.coding.transform import (
    TransformConfig,
    WeightedKLT,
    mixed_widths,
    trellis_coded,
    weighted_klt,
)
from manifoldkv.core.basis import SITES, detached
from manifoldkv.core.windows import cached_tokens
from manifoldkv.plan.formats.scales import SHORT_BITS, TOKEN_SCALE_BYTES
from manifoldkv.plan.formats.trellis import GAUSSIAN_DISTORTION as OF_TRELLIS
from manifoldkv.plan.formats.uniform import GAUSSIAN_DISTORTION as OF_UNIFORM
from manifoldkv.plan.formats.uniform import WIDTHS
from manifoldkv.plan.predictor import PredictorContext
from manifoldkv.plan.site import SitePlan
from manifoldkv.statistics.statistics import Statistics

LOG = logging.getLogger(__name__)

Bits = list[NDArray[Any]]
"""Bits of the latents, (D,), by tensor: keys and values of all layers, one after the other."""


@dataclass(frozen=True)
class Selected:
    """Configurations of the transforms of all tensors.

    Parameters
    ----------
    configs : list of TransformConfig
        By tensor.
    bits : Bits
        Estimated bits of the latents.
    step : StepCompute or None
        Multiplications of a decode step; None without a limit.
    """

    configs: list[TransformConfig]
    bits: Bits
    step: StepCompute | None

    @property
    def predicts(self) -> bool:
        """Return whether any tensor is predicted."""
        return any(config.inputs for config in self.configs)


@dataclass(frozen=True)
class BitFit:
    """Budgets and metrics of a plan, and the steps of fitting it.

    Parameters
    ----------
    statistics : Statistics
        Of the model.
    metrics : list of Tensor
        By tensor.
    context : int
        Tokens that both budgets hold for.
    nbytes : int
        Bytes of all latents.
    limit : float
        Multiplications of all cached tokens; infinite for no limit.
    bands, depth, trellis
        As in `BitRecipe`.
    """

    statistics: Statistics
    metrics: list[Tensor] = field(repr=False)
    context: int
    nbytes: int
    limit: float
    bands: tuple[int | None, ...]
    depth: int | None
    trellis: bool

    @property
    def distortion(self) -> dict[float, float]:
        """Return the mean squared errors of a Gaussian of variance one, by bits."""
        return OF_TRELLIS if self.trellis else OF_UNIFORM

    @property
    def cached(self) -> list[int]:
        """Return the cached tokens, by tensor."""
        windows = self.statistics.model.windows
        return [cached_tokens(self.context, window) for window in windows for _ in SITES]

    def candidates(
        self, inputs: Iterable[LayerTensors], groups: tuple[float, ...]
    ) -> list[Candidates]:
        """Return the candidates with cross-layer groups of some lengths, as `candidates` does."""
        space = SearchSpace(self.bands, self.depth, () if self.depth is None else groups)
        return candidates(
            self.statistics, self.metrics, inputs, space, self.distortion, self.context
        )

    def selected(self, inputs: Iterable[LayerTensors]) -> Selected:
        """Return the configurations that lose least of all candidates.

        Parameters
        ----------
        inputs : iterable of LayerTensors
            As in `candidates`.
        """
        found = self.candidates(inputs, GROUP_LENGTHS if isfinite(self.limit) else ONE_GROUP)
        selections = [each.best(8 * self.nbytes, self.limit) for each in found]
        best = min(range(len(found)), key=lambda index: selections[index].nats)
        of_tensors = zip(found[best].tensors, selections[best].indices, strict=True)
        chosen = [of_tensor[index] for of_tensor, index in of_tensors]
        step = None
        if isfinite(self.limit):
            step = StepCompute(chosen, found[best].cached, self.limit)
        costs = [gaussian_costs(one.variances, self.distortion).numpy() for one in chosen]
        return Selected([one.config for one in chosen], self._widths(costs), step)

    def reconstructed(self, selected: Selected) -> Iterable[LayerTensors]:
        """Return the reconstructions of the samples, by layer."""
        layers = fit_layers(
            self.statistics, selected.configs, self._fit, self._reconstruct(selected, selected.bits)
        )
        return (layer.reconstructed for layer in layers)

    def transforms(self, selected: Selected, bits: Bits | None) -> list[WeightedKLT]:
        """Return the transforms of all tensors, predicted from reconstructions of some bits."""
        LOG.info("fitting %d layers", self.statistics.model.layers)
        reconstruct = None if bits is None else self._reconstruct(selected, bits)
        layers = fit_layers(self.statistics, selected.configs, self._fit, reconstruct)
        return [transform for layer in layers for transform in layer.transforms]

    def _fit(
        self, tensor: int, x: Tensor, inputs: Tensor | None, config: TransformConfig
    ) -> WeightedKLT:
        layer, site = divmod(tensor, len(SITES))
        of_tensor = self.statistics.layers[layer].of(SITES[site])
        return weighted_klt(of_tensor, self.metrics[tensor], x, inputs, config=config)

    def _reconstruct(self, selected: Selected, bits: Bits) -> Reconstruct:
        """Return the reconstruction of tensors by their plans, as a cache reads them."""

        def reconstruct(
            tensor: int, transform: WeightedKLT, x: Tensor, context: PredictorContext
        ) -> Tensor:
            planned = self.planned(tensor, transform, bits, selected.configs[tensor])
            return planned.reconstruct(x, context)

        return reconstruct

    def planned(
        self, tensor: int, transform: WeightedKLT, bits: Bits, config: TransformConfig
    ) -> SitePlan:
        """Return the plan of a tensor."""
        quantizer = trellis_coded if self.trellis else mixed_widths
        basis, quantized = quantizer(transform, bits[tensor], self.statistics.model.grouping)
        mean = detached(transform.mean.float())
        return SitePlan(basis, quantized, mean, predictor_of(transform, config))

    def allocated(self, transforms: Sequence[WeightedKLT], step: StepCompute | None) -> Bits:
        """Return the bits of the latents that cost least within both budgets."""
        trellis, cached = self.trellis, self.cached
        costs = [one.trellis_costs() if trellis else one.rounding_costs() for one in transforms]
        if step is None:
            return self._widths(costs)
        rows = [
            one.rows if tensor % len(SITES) == 0 else torch.zeros_like(one.rows)
            for tensor, one in enumerate(transforms)
        ]

        uses = step.uses

        def at(price: float) -> Bits:
            priced = [
                with_compute(cost, price * tokens * (mapped + times))
                for cost, tokens, mapped, times in zip(costs, cached, rows, uses, strict=True)
            ]
            widths = self._widths(priced)
            # Of a pack that is widened, latents without variance stay without bits in every round.
            return [x * one.varying.numpy() for x, one in zip(widths, transforms, strict=True)]

        def fits(bits: Bits) -> bool:
            return step.total([torch.from_numpy(one > 0) for one in bits], rows) <= step.limit

        return lowest(at, fits, COMPUTE_TOLERANCE)

    def _widths(self, costs: list[NDArray[np.float64]]) -> Bits:
        """Return the bits of latents of some costs, (D, widths), within the budget of bytes."""
        if self.trellis:
            spare = 8 * TOKEN_SCALE_BYTES - SHORT_BITS  # of the bytes that are counted for scales
            return allocate_streams(costs, tuple(OF_TRELLIS), self.nbytes, self.cached, spare)
        packs = [cost.reshape(-1, PACK, len(WIDTHS)).sum(axis=1) for cost in costs]
        return [np.repeat(bits, PACK) for bits in allocate(packs, self.nbytes, self.cached)]


def with_compute(cost: NDArray[np.float64], price: Tensor) -> NDArray[np.float64]:
    """Return costs of latents (D, widths) with the price of their multiplications, (D,)."""
    priced = cost.copy()
    priced[:, 1:] += price.unsqueeze(1).numpy()
    return priced
