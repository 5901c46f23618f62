"""Plans for caches that are stored: one step for all latents, and tables of symbols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from manifoldkv.activations.moments import LayerMoments, SiteMoments
from manifoldkv.basis import SITES, Basis, HeadGrouping
from manifoldkv.coding.costs import best_gains
from manifoldkv.coding.entropy import TOKEN_ID_BYTES, frame_bytes
from manifoldkv.coding.predictor import PredictorContext, all_inputs, layers_below
from manifoldkv.coding.quantizer import Quantizer
from manifoldkv.coding.tables import entropy_coded, find_step
from manifoldkv.coding.transform import SiteDesign, WeightedKLT, sampled, weighted_klt
from manifoldkv.errors import ArgumentError, PlanError
from manifoldkv.models.decoder import Decoder
from manifoldkv.plan.site import SitePlan
from manifoldkv.recipes.coded import CodedRecipe, Designs
from manifoldkv.recipes.coded_run import ROUNDS, CodedRun

SAMPLES = 8192
"""Tokens of each site that tables are made of."""
FOLDS = 8
"""Folds of `weighted_klt`: tables must hold for other text."""


@dataclass(frozen=True)
class StoredRecipe(CodedRecipe[float]):
    """A plan for a `Codec`: latents become symbols, which an entropy coder stores.

    The transform is that of `BitRecipe`, but the Fisher information is that of a prompt whose cache
    is stored after it was read exactly: errors cost the tokens after it (`fisher_moments`, whose
    `prompt` is half of every calibration sequence). One step for all latents of the model is then
    the whole allocation; it is chosen so that the bytes of a stored cache, with everything in it,
    are expected to meet the ratio. They are compared to a cache in 16 bits, at the context of the
    run. No model runs on such latents: a codec decodes them to a stock cache.

    Parameters
    ----------
    sinks
        As in `CodedRecipe`.
    below : int or None
        Number of layers below that predict keys and values; with 0 only values are predicted, from
        the keys of their own layer, and with None nothing is.

    Raises
    ------
    ArgumentError
        If `sinks` or `below` is negative.
    """

    below: int | None = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.below is not None and self.below < 0:
            raise ArgumentError(f"below must be >= 0, got {self.below}")

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"below": self.below}

    def describe_allocation(self) -> dict[str, Any]:
        return {"name": "entropy"}

    @property
    def predicts(self) -> bool:
        return self.below is not None

    def design(
        self, decoder: Decoder, run: CodedRun, moments: list[LayerMoments]
    ) -> Designs[float]:
        if self.below is None:
            return Designs([SiteDesign() for _ in moments for _ in SITES], 1)
        layers = range(len(moments))
        depths = [min(self.below, layers_below(run.windows, index)) for index in layers]
        inputs = [all_inputs(site, depth) for depth in depths for site in SITES]
        return Designs([SiteDesign(one) for one in inputs], ROUNDS)

    def prompt(self, length: int) -> int:
        return length // 2

    def check_windows(self, windows: Sequence[int | None]) -> None:
        for index, window in enumerate(windows):
            if window is not None:
                raise PlanError(
                    f"layer {index} has a sliding window of {window} tokens, whose caches recipe "
                    "stored does not store: take recipe bits"
                )

    def budget(self, decoder: Decoder, ratio: float, context: int) -> float:
        """Return the bits of the symbols of a token, after all else in a stored cache."""
        layers, features = len(decoder.layers), decoder.features
        full = 2 * 2 * features * layers * context
        sinks = min(self.sinks, context)
        around = frame_bytes(context) + TOKEN_ID_BYTES * context
        around += 2 * features * layers * sinks * decoder.dtype.itemsize
        around += 2 * layers  # sizes of sites are rounded up to whole bytes
        remaining = ratio * full - around
        if remaining <= 0:
            raise ArgumentError(
                f"ratio {ratio:g} is too small: {self.sinks} uncompressed tokens, token ids and "
                f"frames take {around / full:.3g} of the cache of {context} tokens"
            )
        return 8 * remaining / max(1, context - sinks)

    def transform(
        self, moments: SiteMoments, x: Tensor, inputs: Tensor | None, design: SiteDesign
    ) -> WeightedKLT:
        return weighted_klt(moments, x, inputs, samples=len(x), folds=FOLDS)

    def held(self, site: WeightedKLT) -> WeightedKLT:
        return replace(site, latents=sampled(site.latents, SAMPLES).float())

    def allocate(self, sites: list[WeightedKLT], run: CodedRun, designs: Designs[float]) -> float:
        return find_step([site.latents for site in sites], run.budget)

    def quantize(
        self, site: WeightedKLT, allocation: float, index: int, grouping: HeadGrouping
    ) -> tuple[Basis, Quantizer]:
        used = (site.latents / allocation).round().abs().amax(dim=0) > 0
        order = used.int().argsort(descending=True, stable=True)
        # Every head has as many latents: some that are always 0 may be among them.
        columns = order[: max(1, -(-int(used.sum()) // grouping.width)) * grouping.width]
        quantizer = entropy_coded(site.latents[:, columns] / allocation)
        return site.basis(columns, grouping, step=allocation), quantizer

    def reconstruct(
        self,
        site: WeightedKLT,
        allocation: float,
        x: Tensor,
        planned: SitePlan,
        context: PredictorContext,
    ) -> Tensor:
        # Latents are those of residuals of a cross-validation, as of text that nothing was fitted
        # to: where one is rounded to 0, the prediction is the reconstruction.
        scaled = (site.latents / allocation).float()
        rounded = scaled.round()
        errors = rounded * best_gains(scaled, rounded).float() - scaled
        return x + (errors @ (site.up * allocation).float().mT).to(x)
