"""Rank and bits from one budget: errors are in nats, and bits go where they save most."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manifoldkv.activations.capture import capture
from manifoldkv.activations.moments import LayerMoments
from manifoldkv.basis import Basis, HeadGrouping
from manifoldkv.coding.allocation import PACK, allocate, allocate_streams
from manifoldkv.coding.costs import gaussian_costs
from manifoldkv.coding.quantizer import Quantizer
from manifoldkv.coding.scales import SHORT_BITS, TOKEN_SCALE_BYTES
from manifoldkv.coding.transform import (
    SAMPLES,
    WeightedKLT,
    by_token,
    mixed_widths,
    trellis_coded,
)
from manifoldkv.coding.trellis import GAUSSIAN_DISTORTION as OF_TRELLIS
from manifoldkv.coding.uniform import GAUSSIAN_DISTORTION as OF_UNIFORM
from manifoldkv.coding.uniform import WIDTHS, fit_quantizers
from manifoldkv.errors import ArgumentError
from manifoldkv.models.decoder import Decoder
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.recipes.coded import CodedRecipe, Designs
from manifoldkv.recipes.coded_run import HELD_OUT, ROUNDS, CodedRun
from manifoldkv.recipes.designs import CHAINS, ONE_CHAIN, MenuBuilder, Space
from manifoldkv.recipes.held_out import with_measured_loss
from manifoldkv.recipes.menu import WORK_TOLERANCE, Menu, StepWork, lowest
from manifoldkv.recipes.probe import Estimate, timed
from manifoldkv.recipes.run import Run
from manifoldkv.recipes.smallest import smallest_plan
from manifoldkv.runs.executors import Executor
from manifoldkv.runs.progress import follow
from manifoldkv.text.sources import TextSource
from manifoldkv.text.tokens import SEQUENCES
from manifoldkv.windows import cached_tokens

if TYPE_CHECKING:
    from manifoldkv.recipes.config import CompressionConfig

DEFAULT_WORK = 4.0
"""Work whose decode step takes about as long as that of the stock cache after 8,000 tokens."""
BANDS = (1, 2, 4, 8, 16, None)
"""Widths of bands in frequencies."""
DEPTH = 5
"""Layers below whose keys predict values."""


FRONTIER = (2.0, 4.0, 8.0, 16.0)
"""Amounts of work whose losses an estimate shows."""
FRONTIER_SEQUENCES = 8
"""Calibration sequences that these losses are estimated on."""
LOG = logging.getLogger(__name__)

"""Neighbouring latents of equal width, if they are rounded."""
Bits = list[NDArray[Any]]
"""Of the latents, by site."""


@dataclass(frozen=True)
class BitRecipe(CodedRecipe[Bits]):
    """Latents get the bits that cost least, within one budget of bytes and one of work.

    Let F = E[g gᵀ] be the Fisher information of the keys or values x of a layer, all heads side by
    side (`fisher_moments`), and C the covariance of what `CodedRecipe` leaves unpredicted. With
    F^½ C F^½ = V Λ Vᵀ, the latents y = Vᵀ F^½ (x - mean) are uncorrelated, and an error in any of
    them, in any layer, costs half its square in nats, to second order; what shrinks all tokens
    alike costs more than noise (`coherent_costs`), and reconstructed latents have a gain that
    allows for it. One water-filling over all latents of the model is then the whole allocation: of
    ranks (latents of 0 bits are not stored) and of bits. The ratio is one to the bytes of a cache
    in 16 bits: latents, scales and sink tokens.

    The transform of keys may be cut into bands of RoPE frequencies over all heads, so that fewer
    multiplications reconstruct a key; values are predicted from the keys of their layer and of the
    layers below, whose latents attention weights mix as cheaply as its own; in chains of layers,
    keys are predicted too (`Space`). `Menu` chooses among all of these what loses least within the
    work, the multiplications of a decode step over those of stock attention
    (`CompressionPlan.work`). Within a limit of work chains are short; without one a single chain
    has all layers, and every site is predicted from up to five layers below.

    The last eighth of the calibration sequences, if there are eight or more, is held out: its
    errors and its Fisher information give ``predicted_nats`` of the plan's provenance. On other
    text the divergence was 1.3 and 1.4 times the prediction (SmolLM2, ratio 1/8, work 16 and 4,
    16 × 512 calibration tokens, 4 × 1,024 held-out tokens of C4).

    Parameters
    ----------
    sinks
        As in `CodedRecipe`.
    work : float
        Largest `CompressionPlan.work`; infinite for no limit.
    bands : tuple of (int or None)
        Possible widths of a band in frequencies; None for all frequencies together.
    depth : int or None
        Largest number of layers below whose keys predict values; 0 for the keys of the same layer
        only, None to predict nothing.
    trellis : bool
        Whether latents are trellis-coded (`TrellisCoded`). Uniform quantisers (`MixedWidths`) lose
        more, and encode prompts sooner.

    Raises
    ------
    ArgumentError
        If `sinks` or `depth` is negative, a band is not positive, or `work` is not a positive
        number.
    """

    meets_nats = True
    refits_last_round = False

    work: float = DEFAULT_WORK
    bands: tuple[int | None, ...] = BANDS
    depth: int | None = DEPTH
    trellis: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.work > 0:  # nor NaN
            raise ArgumentError(f"work must be a positive number, got {self.work}")
        if self.depth is not None and self.depth < 0:
            raise ArgumentError(f"depth must be >= 0, got {self.depth}")
        if not self.bands or any(band is not None and band < 1 for band in self.bands):
            raise ArgumentError(f"bands must be positive numbers of frequencies, got {self.bands}")

    def with_work(self, work: float) -> BitRecipe:
        return replace(self, work=work)

    def describe(self) -> dict[str, Any]:
        work = "unlimited" if self.work == inf else self.work
        structure = {"work": work, "bands": list(self.bands), "depth": self.depth}
        return super().describe() | structure

    def describe_allocation(self) -> dict[str, Any]:
        return {"name": "bits", "trellis": self.trellis}

    def check(
        self, decoder: Decoder, tokens: Tensor | TextSource | str, config: CompressionConfig
    ) -> None:
        super().check(decoder, tokens, config)
        count = len(tokens) if isinstance(tokens, Tensor) else config.sequences or SEQUENCES
        if config.nats is not None and count < HELD_OUT:
            raise ArgumentError(
                f"nats must have {HELD_OUT} or more calibration sequences, got {count}: the loss "
                "is measured on an eighth of them"
            )
        least = self.least_work(decoder)
        if self.work < least:
            least = ceil(100 * least) / 100  # a number to take over
            raise ArgumentError(
                f"work must be >= {least:g}, got {self.work:g}: a decode step on the cheapest "
                f"plan for this model multiplies {least:g} times as often as stock attention"
            )

    def least_work(self, decoder: Decoder) -> float:
        """Return the work of a plan without latents, which rotates and scores a mean of keys."""
        rotated = 2 * decoder.rotary_dim * decoder.kv_heads
        scored = decoder.query_heads * decoder.head_dim
        return (rotated + scored + decoder.query_heads) / (2 * scored)

    def fit(
        self, decoder: Decoder, run: Run, folder: str | Path | None, executor: Executor
    ) -> CompressionPlan:
        nats = run.config.nats
        if nats is None:
            return super().fit(decoder, run, folder, executor)
        coded = self.coded_run(decoder, run)
        moments = coded.moments(decoder, coded.fitted, folder)

        def plan_at(ratio: float) -> CompressionPlan:
            at_ratio = replace(run, config=replace(run.config, ratio=ratio))
            coded = self.coded_run(decoder, at_ratio)
            return with_measured_loss(decoder, self.fitted(decoder, coded, moments), coded)

        of_sinks, of_scales, full = self._fixed_bytes(decoder, run.context)
        return smallest_plan(plan_at, nats, (of_sinks + of_scales) / full)

    def _space(self, *chains: float) -> Space:
        return Space(self.bands, self.depth, chains if self.predicts else ())

    @property
    def _distortion(self) -> dict[float, float]:
        """Return the mean squared errors of a Gaussian of variance one, by bits."""
        return OF_TRELLIS if self.trellis else OF_UNIFORM

    @property
    def predicts(self) -> bool:
        return self.depth is not None

    def design(self, decoder: Decoder, run: CodedRun, moments: list[LayerMoments]) -> Designs[Bits]:
        chains = CHAINS if isfinite(self.work) else ONE_CHAIN

        def chosen(fill: Callable[[MenuBuilder], object]) -> Designs[Bits]:
            builder = MenuBuilder(decoder, run, moments, self._space(*chains))
            fill(builder)
            return self._chosen(decoder, run, builder.menus(self._distortion))

        LOG.info("choosing transforms within %g times the work of stock attention", self.work)
        designs = chosen(lambda builder: self._add_exact(decoder, run, builder))
        if designs.depth is None:
            return designs
        # What a site is worth as an input depends on the bits that it gets.
        return chosen(
            lambda builder: self._sites(
                decoder, run, moments, designs, designs.allocation, builder.add
            )
        )

    def _add_exact(self, decoder: Decoder, run: CodedRun, builder: MenuBuilder) -> None:
        """Add all layers, as if reconstruction were exact."""
        for activations in follow(capture(decoder.model, run.fitted), len(decoder.layers)):
            pair = (activations.keys_in("pre"), activations.values_of())
            exact = [by_token(x[:, :, run.first :]) for x in pair]
            builder.add(activations.layer, exact, exact)

    def _chosen(self, decoder: Decoder, run: CodedRun, menus: list[Menu]) -> Designs[Bits]:
        """Return the designs that lose least of all menus."""
        limit = _limit(decoder, run, self.work)
        chosen = [menu.best(8 * run.budget, limit) for menu in menus]
        best = min(range(len(chosen)), key=lambda index: chosen[index].nats)
        menu, choice = menus[best], chosen[best]
        sites = [site[index] for site, index in zip(menu.sites, choice.indices, strict=True)]
        designs = [one.design for one in sites]
        step = None
        if isfinite(limit):
            step = StepWork(sites, menu.cached, limit)
        if not any(one.inputs for one in designs):
            return Designs(designs, 1, None, step)
        costs = [gaussian_costs(one.variances, self._distortion).numpy() for one in sites]
        # Of the inputs of predictions; allocated again, within the work, from measured distortions.
        bits = self._widths(costs, run, menu.cached)
        return Designs(designs, ROUNDS - 1, bits, step)

    def estimate(self, decoder: Decoder, run: Run) -> Estimate:
        few = replace(run, tokens=run.tokens[:FRONTIER_SEQUENCES])
        coded = self.coded_run(decoder, few)
        moments = coded.moments(decoder, coded.fitted, None)
        builder = MenuBuilder(decoder, coded, moments, self._space(*CHAINS, *ONE_CHAIN))
        self._add_exact(decoder, coded, builder)
        menus, least = builder.menus(self._distortion), self.least_work(decoder)
        frontier = {}
        for work in (one for one in (*FRONTIER, inf) if one >= least):
            limit = _limit(decoder, coded, work)
            # The last menu is of one chain, which `design` tries without a limit only.
            possible = menus[: 1 + len(CHAINS)] if isfinite(work) else menus
            nats = min(menu.best(8 * coded.budget, limit).nats for menu in possible)
            frontier[f"{work:g}" if isfinite(work) else "unlimited"] = nats
        return replace(super().estimate(decoder, run), frontier=frontier)

    def bytes_beyond_ratio(self, elements: int, itemsize: int, tokens: int) -> int:
        return min(self.sinks, tokens) * elements * (itemsize - 2)

    def budget(self, decoder: Decoder, ratio: float, context: int) -> int:
        """Return the bytes of the latents of a text, without sink tokens and scales."""
        features = decoder.features
        if not self.trellis and features % PACK:
            raise ArgumentError(
                f"without a trellis code the features of a layer must be a multiple of {PACK}, got "
                f"{features}: leave trellis out"
            )
        of_sinks, of_scales, full = self._fixed_bytes(decoder, context)
        remaining = int(ratio * full + 1e-9) - of_sinks - of_scales
        if remaining < 0:
            raise ArgumentError(
                f"ratio {ratio:g} is too small: {self.sinks} uncompressed tokens and the scales of "
                f"tokens take {(of_sinks + of_scales) / full:.3g} of the cache of {context} tokens"
            )
        return remaining

    def _fixed_bytes(self, decoder: Decoder, context: int) -> tuple[int, int, int]:
        """Return the bytes of sink tokens, of scales, and of the whole cache in 16 bits."""
        cached = [cached_tokens(context, window) for window in decoder.windows]
        sinks = min(self.sinks, context)
        of_sinks = 4 * decoder.features * sum(sinks for x in decoder.windows if x is None)
        return of_sinks, 2 * TOKEN_SCALE_BYTES * sum(cached), 4 * decoder.features * sum(cached)

    def allocate(self, sites: list[WeightedKLT], run: CodedRun, designs: Designs[Bits]) -> Bits:
        costs = [site.trellis_costs() if self.trellis else site.rounding_costs() for site in sites]
        cached = [cached_tokens(run.context, window) for window in run.windows for _ in range(2)]
        step = designs.step
        if step is None:
            return self._widths(costs, run, cached)
        uses = step.uses
        rows = [
            site.rows if index % 2 == 0 else torch.zeros_like(site.rows)
            for index, site in enumerate(sites)
        ]

        def at(price: float) -> Bits:
            priced = [
                with_work(cost, price * tokens * (mapped + times))
                for cost, tokens, mapped, times in zip(costs, cached, rows, uses, strict=True)
            ]
            widths = self._widths(priced, run, cached)
            # Of a pack that is widened, latents without variance stay without bits in every round.
            return [one * site.varying.numpy() for one, site in zip(widths, sites, strict=True)]

        def fits(bits: Bits) -> bool:
            return step.total([torch.from_numpy(one > 0) for one in bits], rows) <= step.limit

        return lowest(at, fits, WORK_TOLERANCE)

    def _widths(self, costs: list[NDArray[np.float64]], run: CodedRun, cached: list[int]) -> Bits:
        """Return the bits of latents of some costs, (D, widths), within the budget of a run."""
        budget = int(run.budget)
        if self.trellis:
            spare = 8 * TOKEN_SCALE_BYTES - SHORT_BITS  # of the bytes that are counted for scales
            return allocate_streams(costs, tuple(OF_TRELLIS), budget, cached, spare)
        packs = [cost.reshape(-1, PACK, len(WIDTHS)).sum(axis=1) for cost in costs]
        return [np.repeat(bits, PACK) for bits in allocate(packs, budget, cached)]

    def quantize(
        self, site: WeightedKLT, allocation: Bits, index: int, grouping: HeadGrouping
    ) -> tuple[Basis, Quantizer]:
        quantizer = trellis_coded if self.trellis else mixed_widths
        return quantizer(site, allocation[index], grouping)

    def fitting_seconds(self, features: int) -> float:
        seconds, _ = timed(partial(fit_quantizers, torch.randn(SAMPLES, features)))
        return seconds


def _limit(decoder: Decoder, run: CodedRun, work: float) -> float:
    """Return the multiplications of all cached tokens within a budget of work."""
    cached = sum(cached_tokens(run.context, window) for window in run.windows)
    return work * 2 * decoder.query_heads * decoder.head_dim * cached


def with_work(cost: NDArray[np.float64], price: Tensor) -> NDArray[np.float64]:
    """Return costs of latents (D, widths) with the price of their work, (D,)."""
    priced = cost.copy()
    priced[:, 1:] += price.unsqueeze(1).numpy()
    return priced
