"""Recipes of coded latents: linear prediction, Fisher-weighted transform, quantizer."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from manifoldkv.activations.capture import capture
from manifoldkv.activations.moments import LayerMoments, SiteMoments
from manifoldkv.basis import Basis, HeadGrouping, detached
from manifoldkv.coding.predictor import Input, LinearPredictor, PredictorContext, stored_inputs
from manifoldkv.coding.quantizer import Quantizer
from manifoldkv.coding.transform import SiteDesign, WeightedKLT, by_token, weighted_klt
from manifoldkv.errors import ArgumentError, PlanError
from manifoldkv.models.decoder import Decoder
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.site import SitePlan
from manifoldkv.recipes.coded_run import ROUNDS, CodedRun
from manifoldkv.recipes.held_out import with_predicted_loss
from manifoldkv.recipes.menu import StepWork
from manifoldkv.recipes.probe import Estimate, Probe
from manifoldkv.recipes.recipe import Recipe
from manifoldkv.recipes.run import Run, check_run, context_of
from manifoldkv.runs.executors import Executor
from manifoldkv.runs.progress import follow
from manifoldkv.text.sources import TextSource

if TYPE_CHECKING:
    from manifoldkv.recipes.config import CompressionConfig

LOG = logging.getLogger(__name__)

REACH = 6
"""Layers whose sites are held at once, to predict from."""
Allocation = TypeVar("Allocation")
"""Unit of a budget: bits of latents, or the step of a quantizer."""


@dataclass(frozen=True)
class Designs(Generic[Allocation]):
    """Structure of the transforms of all sites.

    Parameters
    ----------
    sites : list of SiteDesign
        Of keys and values of all layers, one after the other.
    rounds : int
        How often all sites are fitted.
    allocation : Allocation or None
        Allocation of the first round's reconstructions; exact ones if None.
    step : StepWork or None
        Multiplications of a decode step; None without a limit.
    """

    sites: list[SiteDesign]
    rounds: int
    allocation: Allocation | None = None
    step: StepWork | None = None

    @property
    def depth(self) -> int | None:
        """Return how many layers below are inputs at most; None if nothing is predicted."""
        return max((below for site in self.sites for below, _ in site.inputs), default=None)

    @property
    def inputs(self) -> list[tuple[Input, ...]]:
        """Return the inputs of all sites."""
        return [site.inputs for site in self.sites]

    def with_inputs(self, inputs: list[tuple[Input, ...]]) -> Designs[Allocation]:
        """Return the designs with other inputs, to be fitted and allocated once more."""
        sites = [replace(site, inputs=one) for site, one in zip(self.sites, inputs, strict=True)]
        step = None if self.step is None else self.step.of_designs(sites)
        return Designs(sites, 2, self.allocation, step)


@dataclass(frozen=True)
class CodedRecipe(Recipe, Generic[Allocation]):
    """Latents of the residuals of a linear prediction, coded within one budget of bytes.

    Keys and values of neighbouring layers are alike. Each site may be predicted, by ridge
    regression, from reconstructions of sites before it, and the residual is transformed and
    quantised: predictive coding along the layers. Residuals depend on the allocation of bits below
    and these on residuals, so that both are fitted several times, first as if reconstruction were
    exact.

    Parameters
    ----------
    sinks : int
        Number of first tokens that are kept uncompressed.

    Raises
    ------
    ArgumentError
        If `sinks` is negative.
    """

    in_sixteen_bits = True
    refits_last_round = True
    """Whether the last round allocates too, so that predictors know of the allocation before."""

    sinks: int = 4

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ArgumentError(f"sinks must be >= 0, got {self.sinks}")

    @abstractmethod
    def budget(self, decoder: Decoder, ratio: float, context: int) -> float:
        """Return the budget of latents, in the unit of `allocate`.

        Raises
        ------
        ArgumentError
            If the ratio is too small.
        """

    @abstractmethod
    def design(
        self, decoder: Decoder, run: CodedRun, moments: list[LayerMoments]
    ) -> Designs[Allocation]:
        """Return the structure of the transforms of all sites.

        Parameters
        ----------
        decoder : Decoder
            View of the model.
        run : CodedRun
            With the budget.
        moments : list of LayerMoments
            Fisher moments of all layers.
        """

    @property
    @abstractmethod
    def predicts(self) -> bool:
        """Return whether sites may be predicted from others."""

    @abstractmethod
    def allocate(
        self, sites: list[WeightedKLT], run: CodedRun, designs: Designs[Allocation]
    ) -> Allocation:
        """Return the allocation that costs least within the budget of a run.

        Parameters
        ----------
        sites : list of WeightedKLT
            Of keys and values of all layers, one after the other.
        run : CodedRun
            With the budget.
        designs : Designs
            Of the sites.
        """

    @abstractmethod
    def quantize(
        self, site: WeightedKLT, allocation: Allocation, index: int, grouping: HeadGrouping
    ) -> tuple[Basis, Quantizer]:
        """Return basis and quantizer of a site.

        Parameters
        ----------
        site : WeightedKLT
            Transform of its residuals.
        allocation : Allocation
            From `allocate`.
        index : int
            Of the site, keys and values of all layers counted.
        grouping : HeadGrouping
            Of all heads together.
        """

    @abstractmethod
    def fitting_seconds(self, features: int) -> float:
        """Return the measured seconds of fitting the quantizer of a site once."""

    def prompt(self, length: int) -> int | None:
        """Return how many tokens of a sequence fill the cache before others are predicted.

        None if the cache is attended to while it is filled.
        """
        return None

    def transform(
        self, moments: SiteMoments, x: Tensor, inputs: Tensor | None, design: SiteDesign
    ) -> WeightedKLT:
        """Return the transform of a site; parameters as in `weighted_klt`."""
        return weighted_klt(moments, x, inputs, design=design)

    def reconstruct(
        self,
        site: WeightedKLT,
        allocation: Allocation,
        x: Tensor,
        planned: SitePlan,
        context: PredictorContext,
    ) -> Tensor:
        """Return the reconstruction of keys or values, from which later sites are predicted.

        Parameters
        ----------
        site, allocation
            As in `quantize`.
        x : Tensor
            Keys or values that the transform was fitted to, (tokens, D).
        planned : SitePlan
            Plan of the site under the allocation.
        context : PredictorContext
            Reconstructions of the sites before, (tokens, D) each.
        """
        return planned.reconstruct(x, context)

    def held(self, site: WeightedKLT) -> WeightedKLT:
        """Return a transform with the latents that are kept until all sites are allocated."""
        return site

    def describe(self) -> dict[str, Any]:
        """Return all fields under the names of `RankRecipe.describe`."""
        return {
            "objective": {"name": "fisher"},
            "solver": {"name": "closed-form"},
            "key_grouping": "all",
            "value_grouping": "all",
            "ranks": self.describe_allocation(),
            "sinks": self.sinks,
        }

    @abstractmethod
    def describe_allocation(self) -> dict[str, Any]:
        """Return the name and the fields of the allocation."""

    def check_config(self, config: CompressionConfig) -> None:
        if config.quantization is not None:
            raise PlanError(
                "the recipe rounds every latent by itself: leave the quantisation out, or take "
                "another recipe (low-rank)"
            )
        if config.rotary == "post":
            raise PlanError(
                "the recipe stores keys before rotation: leave rotary out, or take another "
                "recipe (low-rank)"
            )

    def check_windows(self, windows: Sequence[int | None]) -> None:
        """Raise `PlanError` if layers with sliding windows cannot be coded."""
        return

    def check(
        self, decoder: Decoder, tokens: Tensor | TextSource | str, config: CompressionConfig
    ) -> None:
        check_run(decoder, config)
        self.check_windows(decoder.windows)
        self.budget(decoder, config.ratio, context_of(decoder, tokens, config))

    def fit(
        self, decoder: Decoder, run: Run, folder: str | Path | None, executor: Executor
    ) -> CompressionPlan:
        coded = self.coded_run(decoder, run)
        return self.fitted(decoder, coded, coded.moments(decoder, coded.fitted, folder))

    def fitted(
        self, decoder: Decoder, coded: CodedRun, moments: list[LayerMoments]
    ) -> CompressionPlan:
        """Return the plan of a run with Fisher moments of its sequences."""
        designs = self.design(decoder, coded, moments)
        while True:
            planned, allocation = self._fitted_sites(decoder, coded, moments, designs)
            empty = [site.quantizer.is_empty for site in planned]
            inputs = stored_inputs(designs.inputs, empty)
            if inputs == designs.inputs:
                break
            LOG.info("fitting again: some predictions are from sites that got no bits")
            designs = replace(designs.with_inputs(inputs), allocation=allocation)
        layers = [
            LayerPlan(key, value, window)
            for key, value, window in zip(planned[::2], planned[1::2], coded.windows, strict=True)
        ]
        return with_predicted_loss(decoder, coded.plan(decoder, layers, sinks=self.sinks), coded)

    def coded_run(self, decoder: Decoder, run: Run) -> CodedRun:
        """Return a run with its budget."""
        coded = CodedRun(
            run.config,
            self,
            run.text,
            run.tokens,
            run.context,
            decoder.windows,
            HeadGrouping("all", decoder.kv_heads),
            self.budget(decoder, run.config.ratio, run.context),
        )
        coded.warn_if_short(decoder.features)
        return coded

    def _fitted_sites(
        self,
        decoder: Decoder,
        run: CodedRun,
        moments: list[LayerMoments],
        designs: Designs[Allocation],
    ) -> tuple[list[SitePlan], Allocation]:
        """Return the plans of all sites after all rounds, and their allocation."""
        allocation = designs.allocation
        for remaining in reversed(range(designs.rounds)):
            done = designs.rounds - remaining
            LOG.info("fitting %d layers, round %d of %d", len(moments), done, designs.rounds)
            sites = self._sites(decoder, run, moments, designs, allocation)
            if allocation is None or remaining or self.refits_last_round:
                allocation = self.allocate(sites, run, designs)
        assert allocation is not None
        planned = [
            self._planned(site, allocation, index, run.grouping, designs.sites[index])
            for index, site in enumerate(sites)
        ]
        return planned, allocation

    def _sites(
        self,
        decoder: Decoder,
        run: CodedRun,
        moments: list[LayerMoments],
        designs: Designs[Allocation],
        allocation: Allocation | None,
        observe: Callable[[int, list[Tensor], list[Tensor]], None] | None = None,
    ) -> list[WeightedKLT]:
        """Return the transforms of keys and of values of all layers, one after the other.

        Both are predicted, if at all, from reconstructions of the sites before, under an
        allocation; without one, from these sites themselves. `observe` is called with each layer's
        index, keys and values, and their reconstructions, (tokens, D) each.
        """
        context = PredictorContext(designs.depth, run.windows)
        sites: list[WeightedKLT] = []
        for activations in follow(capture(decoder.model, run.fitted), len(moments)):
            context.begin(activations.layer)
            of_layer = moments[activations.layer]
            pair = (activations.keys_in("pre"), activations.values_of())
            exact = [by_token(x[:, :, run.first :]) for x in pair]  # (S·n, D) each
            reconstructed = []
            for of_site, x in zip((of_layer.key, of_layer.value), exact, strict=True):
                design = designs.sites[len(sites)]
                inputs = torch.cat(context.of(design.inputs), dim=1) if design.inputs else None
                site = self.transform(of_site, x, inputs, design)
                if designs.depth is not None and allocation is not None:
                    planned = self._planned(site, allocation, len(sites), run.grouping, design)
                    x = self.reconstruct(site, allocation, x, planned, context)
                context.add(x)
                reconstructed.append(x)
                sites.append(self.held(site))
            if observe is not None:
                observe(activations.layer, exact, reconstructed)
        return sites

    def _planned(
        self,
        site: WeightedKLT,
        allocation: Allocation,
        index: int,
        grouping: HeadGrouping,
        design: SiteDesign,
    ) -> SitePlan:
        basis, quantizer = self.quantize(site, allocation, index, grouping)
        predictor = None
        if site.weights is not None:
            expansion = None if site.expansion is None else detached(site.expansion.float())
            weights = detached(site.weights.float())
            predictor = LinearPredictor(design.inputs, weights, expansion)
        return SitePlan(basis, quantizer, detached(site.mean.float()), predictor)

    def estimate(self, decoder: Decoder, run: Run) -> Estimate:
        probe = Probe.of(decoder, run.tokens)
        rounds = ROUNDS if self.predicts else 1
        layers, reconstructions = probe.layers, 0
        if self.predicts:
            reconstructions = 2 * REACH * decoder.features * torch.float32.itemsize
        return probe.estimate(
            ratio=run.config.ratio,
            capture=rounds * (probe.forward + layers * probe.per_layer),
            bases=probe.fisher_seconds,
            ranks=rounds * 2 * layers * self.fitting_seconds(decoder.features),
            activation_bytes=(layers + 2) * probe.input_bytes + reconstructions,
        )
