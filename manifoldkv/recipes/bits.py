"""Ranks and bits from one budget: bits go where they reduce the loss most."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from math import ceil, inf, isfinite
from operator import is_
from typing import TYPE_CHECKING, Any

from manifoldkv.coding.allocation import PACK
from manifoldkv.coding.fitting import BitFit, Selected
from manifoldkv.coding.search import (
    ONE_GROUP,
    exact_tensors,
)
from manifoldkv.core.description import ModelDescription
from manifoldkv.core.errors import ArgumentError
from manifoldkv.core.windows import cached_tokens
from manifoldkv.plan.formats.scales import TOKEN_SCALE_BYTES
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.recipes.coded import (
    CodedRecipe,
    coded_plan,
    without_empty_inputs,
)
from manifoldkv.statistics.statistics import Statistics

if TYPE_CHECKING:
    from manifoldkv.recipes.config import CompressionConfig

DEFAULT_COMPUTE = 4.0
"""Limit whose decode step takes about as long as that of the uncompressed cache after 8,000
tokens."""
BANDS = (1, 2, 4, 8, 16, None)
"""Widths of bands in frequencies."""
DEPTH = 5
"""Layers below whose keys predict values."""
FRONTIER = (2.0, 4.0, 8.0, 16.0, inf)
"""Limits of compute whose losses are estimated."""
FRONTIER_GROUP = 4
"""Length of cross-layer groups in this estimate: with all of `GROUP_LENGTHS` it takes twice as long
for the same."""
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class BitRecipe(CodedRecipe):
    """Ranks and bits of all latents from one budget of bytes and one of compute.

    Let F be the metric of the objective for the keys or values x of a layer, all heads side by
    side, and C the covariance of the residuals of their linear prediction. With F^½ C F^½ = V Λ Vᵀ,
    the latents y = Vᵀ F^½ (x - mean) are uncorrelated, and an error in any of them, in any layer,
    costs half its square, for the objective ``fisher`` in nats, to second order; what shrinks all
    tokens alike costs more than noise (`coherent_costs`), and reconstructed latents have a gain
    that allows for it. One water-filling over all latents of the model is then the whole
    allocation: of ranks (latents of 0 bits are not stored) and of bits. The ratio is one to the
    bytes of a cache in 16 bits: latents, scales and uncompressed first tokens.

    The transform of keys may be cut into blocks of RoPE frequencies over all heads (bands), so that
    fewer multiplications reconstruct a key; values are predicted from the keys of their layer and
    of the layers below, whose latents attention weights mix as cheaply as its own; in cross-layer
    groups, keys are predicted too (`SearchSpace`). `Candidates` selects among all of these what
    loses least within the compute, the multiplications of a decode step over those of uncompressed
    attention (`CompressionPlan.compute`). Within a limit, groups are short; without one a single
    group has all layers, and every tensor is predicted from up to five layers below.

    The last eighth of the calibration sequences, if there are eight or more, is held out: its
    errors and its Fisher information give ``predicted_nats`` of the plan's provenance. On other
    text the divergence was 1.3 and 1.4 times the estimate (SmolLM2, ratio 1/8, compute 16 and 4,
    16 × 512 calibration tokens, 4 × 1,024 held-out tokens of C4).

    Parameters
    ----------
    sinks, objective
        As in `CodedRecipe`.
    compute : float
        Largest `CompressionPlan.compute`; infinite for no limit.
    bands : tuple of (int or None)
        Possible widths of a band in frequencies; None for all frequencies together.
    depth : int or None
        Largest number of layers below whose keys predict values; 0 for the keys of the same layer
        only, None to predict nothing.
    trellis : bool
        Whether latents are trellis-coded (`TrellisCoded`). Uniform quantizers (`MixedWidths`) lose
        more, and encode prompts sooner.

    Raises
    ------
    ArgumentError
        If `sinks` or `depth` is negative, a band is not positive, or `compute` is not a positive
        number; or if the objective is unknown or has no metric.
    """

    meets_nats = True

    compute: float = DEFAULT_COMPUTE
    bands: tuple[int | None, ...] = BANDS
    depth: int | None = DEPTH
    trellis: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.compute > 0:  # nor NaN
            raise ArgumentError(f"compute must be a positive number, got {self.compute}")
        if self.depth is not None and self.depth < 0:
            raise ArgumentError(f"depth must be >= 0, got {self.depth}")
        if not self.bands or any(band is not None and band < 1 for band in self.bands):
            raise ArgumentError(f"bands must be positive numbers of frequencies, got {self.bands}")

    def describe(self) -> dict[str, Any]:
        compute = "unlimited" if self.compute == inf else self.compute
        structure = {"compute": compute, "bands": list(self.bands), "depth": self.depth}
        ranks = {"name": "bits", "trellis": self.trellis}
        return super().describe() | {"ranks": ranks} | structure

    def check(self, model: ModelDescription, config: CompressionConfig, context: int) -> None:
        self.budget(model, config.ratio, context)
        least = least_compute(model)
        if self.compute < least:
            least = ceil(100 * least) / 100  # a number to take over
            raise ArgumentError(
                f"compute must be >= {least:g}, got {self.compute:g}: a decode step on the "
                f"cheapest plan for this model multiplies {least:g} times as often as uncompressed "
                "attention"
            )

    def fit(self, statistics: Statistics, config: CompressionConfig) -> CompressionPlan:
        task = self._fit(statistics, config)
        LOG.info("selecting transforms within %g times the multiplications", self.compute)
        layers = range(statistics.model.layers)
        selected = task.selected(exact_tensors(statistics, index) for index in layers)
        if selected.predicts:
            # What a tensor is worth as an input depends on the bits that it gets.
            selected = task.selected(task.reconstructed(selected))
        bits = None
        if selected.predicts:
            bits = task.allocated(task.transforms(selected, selected.bits), selected.step)
        while True:
            transforms = task.transforms(selected, bits)
            if bits is None:
                bits = task.allocated(transforms, selected.step)
            planned = [
                task.planned(tensor, transform, bits, selected.configs[tensor])
                for tensor, transform in enumerate(transforms)
            ]
            configs = without_empty_inputs(selected.configs, planned)
            if all(map(is_, configs, selected.configs)):
                return coded_plan(self, statistics, config, planned)
            LOG.info("fitting again: some predictions are from tensors that got no bits")
            step = None if selected.step is None else selected.step.of_configs(configs)
            selected = Selected(configs, bits, step)
            bits = task.allocated(task.transforms(selected, bits), step)

    def _fit(self, statistics: Statistics, config: CompressionConfig) -> BitFit:
        """Return the budgets and metrics of a plan."""
        context = config.context or statistics.length
        return BitFit(
            statistics,
            self.metrics(statistics),
            context,
            self.budget(statistics.model, config.ratio, context),
            self.multiplications(statistics.model, context),
            self.bands,
            self.depth,
            self.trellis,
        )

    def frontier(self, statistics: Statistics, config: CompressionConfig) -> dict[str, float]:
        task, model = self._fit(statistics, config), statistics.model
        exact = (exact_tensors(statistics, index) for index in range(model.layers))
        found = task.candidates(exact, (FRONTIER_GROUP, *ONE_GROUP))
        least, losses = least_compute(model), {}
        for compute in (one for one in FRONTIER if one >= least):
            limit = replace(self, compute=compute).multiplications(model, task.context)
            # The last candidates are of one group, which is tried without a limit only.
            possible = found[:-1] if isfinite(compute) else found
            nats = min(each.best(8 * task.nbytes, limit).nats for each in possible)
            losses[f"{compute:g}" if isfinite(compute) else "unlimited"] = nats
        return losses

    def multiplications(self, model: ModelDescription, context: int) -> float:
        """Return the limit of the multiplications of all cached tokens of a text."""
        cached = sum(cached_tokens(context, window) for window in model.windows)
        return self.compute * 2 * model.query_heads * model.head_dim * cached

    def least_ratio(self, model: ModelDescription, context: int) -> float:
        """Return the ratio of a plan without latents."""
        of_sinks, of_scales, full = _fixed_bytes(model, self.sinks, context)
        return (of_sinks + of_scales) / full

    def bytes_beyond_ratio(self, elements: int, itemsize: int, tokens: int) -> int:
        return min(self.sinks, tokens) * elements * (itemsize - 2)

    def budget(self, model: ModelDescription, ratio: float, context: int) -> int:
        """Return the bytes of the latents of a text, without first tokens and scales.

        Raises
        ------
        ArgumentError
            If the ratio is too small, or packs of latents do not fit the features of a layer.
        """
        if not self.trellis and model.features % PACK:
            raise ArgumentError(
                f"without a trellis code the features of a layer must be a multiple of {PACK}, got "
                f"{model.features}: leave trellis out"
            )
        of_sinks, of_scales, full = _fixed_bytes(model, self.sinks, context)
        remaining = int(ratio * full + 1e-9) - of_sinks - of_scales
        if remaining < 0:
            raise ArgumentError(
                f"ratio {ratio:g} is too small: {self.sinks} uncompressed tokens and the scales of "
                f"tokens take {(of_sinks + of_scales) / full:.3g} of the cache of {context} tokens"
            )
        return remaining


def least_compute(model: ModelDescription) -> float:
    """Return the compute of a plan without latents, which rotates and scores a mean of keys."""
    rotated = 2 * model.rotary_dim * model.kv_heads
    scored = model.query_heads * model.head_dim
    return (rotated + scored + model.query_heads) / (2 * scored)


def _fixed_bytes(model: ModelDescription, sinks: int, context: int) -> tuple[int, int, int]:
    """Return the bytes of first tokens, of scales, and of the whole cache in 16 bits."""
    cached = [cached_tokens(context, window) for window in model.windows]
    open_layers = sum(window is None for window in model.windows)
    of_sinks = 4 * model.features * min(sinks, context) * open_layers
    return of_sinks, 2 * TOKEN_SCALE_BYTES * sum(cached), 4 * model.features * sum(cached)
