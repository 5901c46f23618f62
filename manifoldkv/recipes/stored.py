"""Plans for caches that are stored: Fisher coordinates, one step, and tables of symbols."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.activations.capture import capture
from manifoldkv.activations.moments import LayerMoments
from manifoldkv.basis import Basis, HeadGrouping, detached
from manifoldkv.coding.allocation import best_gains
from manifoldkv.coding.entropy import TOKEN_ID_BYTES, EntropyCoding, frame_bytes
from manifoldkv.coding.predictor import Below
from manifoldkv.coding.tables import entropy_coding, find_step
from manifoldkv.coding.transform import SAMPLES as COORDINATE_SAMPLES
from manifoldkv.coding.transform import Coordinates, by_token, find_coordinates, sampled
from manifoldkv.errors import ArgumentError, PlanError
from manifoldkv.models.support import (
    decoder_layers,
    sliding_windows,
)
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.recipes.coded import (
    CodedRun,
    check_coded_config,
    check_counts,
    estimate_of_coded,
)
from manifoldkv.recipes.held_out import with_predicted_loss
from manifoldkv.recipes.probe import Estimate, Probe, timed
from manifoldkv.recipes.recipe import Recipe
from manifoldkv.recipes.run import Run, check_run, context_of, heads_and_features
from manifoldkv.runs.executors import Executor
from manifoldkv.runs.progress import follow
from manifoldkv.text.sources import TextSource

if TYPE_CHECKING:
    from manifoldkv.recipes.config import CompressionConfig

LOG = logging.getLogger(__name__)

SAMPLES = 8192
"""Tokens that tables are made of, of each site."""
STEPS_TRIED = 24
"""Of quantisers that entropy coding is measured with, on twice as many samples as for bits."""
FOLDS = 8
"""Into which tokens are cut, of `find_coordinates`: tables must promise what other text takes."""


@dataclass(frozen=True)
class StoredRecipe(Recipe):
    """A plan for a `Codec`: latents become symbols, which an entropy coder stores.

    Coordinates are Fisher's, as in `BitRecipe`, but the Fisher information is that of a prompt
    whose cache is stored after it was read exactly: what its errors cost are the predictions after
    it (`fisher_moments`, whose `prompt` is half of every calibration sequence). One step for all
    latents of the model is then the whole allocation; it is chosen so that the bytes of a blob,
    with everything in it, are expected to meet the ratio. They are compared to a cache in 16 bits,
    at the context of the run. No model runs on such latents: a codec gives a stock cache back.

    Keys and values are predicted from the layers below as in `BitRecipe`; the step is found three
    times, since it depends on residuals, and these on reconstructions.

    Parameters
    ----------
    sinks : int
        Number of first tokens that are kept uncompressed.
    below : int or None
        As in `BitRecipe`.

    Raises
    ------
    ArgumentError
        If there are no such first tokens or layers below.
    """

    in_sixteen_bits = True

    sinks: int = 4
    below: int | None = 2

    def __post_init__(self) -> None:
        check_counts(sinks=self.sinks, below=self.below)

    def describe(self) -> dict[str, Any]:
        """Return all fields and what they stand for, as `RankRecipe.describe` does."""
        return {
            "objective": {"name": "fisher"},
            "solver": {"name": "closed-form"},
            "key_grouping": "all",
            "value_grouping": "all",
            "ranks": {"name": "entropy"},
            "sinks": self.sinks,
            "below": self.below,
        }

    def check_config(self, config: CompressionConfig) -> None:
        check_coded_config(config)

    def check(
        self, model: PreTrainedModel, tokens: Tensor | TextSource | str, config: CompressionConfig
    ) -> None:
        check_run(model, config)
        for index, window in enumerate(sliding_windows(model.config)):
            if window is not None:
                raise PlanError(
                    f"layer {index} has a sliding window of {window} tokens, whose caches recipe "
                    "stored does not store: take recipe best"
                )
        _, features = heads_and_features(model)
        context = context_of(model, tokens, config)
        _symbol_bits(model, config.ratio, context, features, self.sinks)

    def fit(
        self, model: PreTrainedModel, run: Run, folder: str | Path | None, executor: Executor
    ) -> CompressionPlan:
        return _solved(model, self._run(model, run), folder)

    def _run(self, model: PreTrainedModel, run: Run) -> StoredRun:
        heads, features = heads_and_features(model)
        bits = _symbol_bits(model, run.config.ratio, run.context, features, self.sinks)
        found = StoredRun(
            *(run.config, self, run.text, run.tokens, run.context, self.sinks, self.below),
            *(HeadGrouping("all", heads), bits),
        )
        found.warn_if_short(features)
        return found

    def estimate(self, model: PreTrainedModel, run: Run) -> Estimate:
        stored_run, probe = self._run(model, run), Probe.of(model, run.tokens)
        _, features = heads_and_features(model)
        once, _ = timed(partial(entropy_coding, torch.randn(COORDINATE_SAMPLES, features)))
        return estimate_of_coded(stored_run, probe, STEPS_TRIED * once)


@dataclass(frozen=True)
class StoredRun(CodedRun):
    """A run by a `StoredRecipe`: the first half of every sequence is the prompt.

    Parameters
    ----------
    grouping : HeadGrouping
        Of all KV heads of a layer.
    bits : float
        Of the symbols of a token, in all layers.
    """

    recipe: StoredRecipe
    grouping: HeadGrouping
    bits: float

    @property
    def prompt(self) -> int:
        return self.tokens.shape[1] // 2


def _symbol_bits(
    model: PreTrainedModel, ratio: float, context: int, features: int, sinks: int
) -> float:
    """Return the bits that are left for the symbols of a token, after all else in a blob."""
    layers = len(decoder_layers(model))
    full = 2 * 2 * features * layers * context
    exact = min(sinks, context)
    around = frame_bytes(context, layers) + TOKEN_ID_BYTES * context
    around += 2 * features * layers * exact * model.dtype.itemsize
    around += 2 * layers  # the symbols of a site fill whole bytes
    left = ratio * full - around
    if left <= 0:
        raise ArgumentError(
            f"ratio {ratio:g} is too small: {sinks} uncompressed tokens, token ids and "
            f"frames take {around / full:.3g} of the cache of {context} tokens"
        )
    return 8 * left / max(1, context - exact)


def _solved(model: PreTrainedModel, run: StoredRun, folder: str | Path | None) -> CompressionPlan:
    """Return the plan of a run.

    Parameters
    ----------
    model : PreTrainedModel
        As in `compress`, and unwrapped.
    run : StoredRun
        Of the recipe.
    folder : str or Path, optional
        Where Fisher moments are stored, for a run that resumes.

    Raises
    ------
    ArgumentError
        If no step takes so few bits.
    RunError
        As `CodedRun.moments`.
    """
    moments = run.moments(model, run.fitted, folder)
    step = None
    for _ in range(run.rounds):
        sites = _sites(model, run, moments, step)
        LOG.info("choosing the step of %d sites", len(sites))
        step = find_step([site.latents for site in sites], run.bits)
    assert step is not None
    coded = [_coded(site, step, run.grouping) for site in sites]
    layers = [
        LayerPlan(key, value, key_coding=of_keys, value_coding=of_values)
        for (key, of_keys), (value, of_values) in zip(coded[::2], coded[1::2], strict=True)
    ]
    return with_predicted_loss(model, run.plan(model, layers, sinks=run.recipe.sinks), run)


def _sites(
    model: PreTrainedModel, run: StoredRun, moments: list[LayerMoments], step: float | None
) -> list[Coordinates]:
    """Return the coordinates of keys and of values of all layers, one after the other.

    Both are predicted, if at all, from reconstructions of the sites before, with this step; without
    one, from these sites themselves.
    """
    sites: list[Coordinates] = []
    below = Below(run.recipe.below)  # of tensors (tokens, D)
    for activations in follow(capture(model, run.fitted), len(moments)):
        of_layer = moments[activations.layer]
        keys, values = activations.keys_in("pre"), activations.values_of()
        for site_moments, x in ((of_layer.key, keys), (of_layer.value, values)):
            x = by_token(x[:, :, run.first :])  # (S·n, D)
            inputs = torch.cat(below.given, dim=1) if below.given else None
            site = find_coordinates(site_moments, x, inputs, samples=len(x), folds=FOLDS)
            if run.recipe.below is not None and step is not None:
                x = _given_back(site, step, x)
            below.add(x)
            latents = sampled(site.latents, SAMPLES).float()  # held of all sites at once
            sites.append(replace(site, latents=latents))
    return sites


def _given_back(site: Coordinates, step: float, x: Tensor) -> Tensor:
    """Return reconstructed keys or values (tokens, D) of text that nothing was fitted to.

    The site has latents of all of them, each predicted by a regression on others: where a latent is
    rounded to 0, the prediction is the reconstruction.
    """
    scaled = (site.latents / step).float()
    rounded = scaled.round()
    errors = rounded * best_gains(scaled, rounded).float() - scaled
    return x + (errors @ (site.up * step).float().mT).to(x)


def _coded(site: Coordinates, step: float, grouping: HeadGrouping) -> tuple[Basis, EntropyCoding]:
    """Return basis and tables of the latents that are not always 0."""
    used = (site.latents / step).round().abs().amax(dim=0) > 0
    order = used.int().argsort(descending=True, stable=True)
    # Every head has as many latents: some that are always 0 may be among them.
    order = order[: max(1, -(-int(used.sum()) // grouping.width)) * grouping.width]
    coding = entropy_coding(site.latents[:, order] / step, site.mean, site.prediction)
    down, up = (
        detached(x[:, order].float().unsqueeze(0)) for x in (site.down / step, site.up * step)
    )
    return Basis(down, up, grouping), coding
