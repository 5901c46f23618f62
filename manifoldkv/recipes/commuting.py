"""Bases that commute with the rotation of keys, all layers at the same ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import torch
from torch import Tensor

from manifoldkv.activations.layer import LayerActivations
from manifoldkv.basis import SITES, Basis, HeadGrouping, detached, parse_grouping
from manifoldkv.errors import ArgumentError, ModelError
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.rotary import rotate_halves, rotation_of_keys
from manifoldkv.objectives import LayerOutput
from manifoldkv.objectives.linear_algebra import weighted_closed_form
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.site import SitePlan
from manifoldkv.ranks import RankRule
from manifoldkv.recipes.commuting_bases import (
    REFINEMENT,
    closed_form,
    fisher_forms,
    query_forms,
    refined,
)
from manifoldkv.recipes.probe import Estimate, Probe, timed
from manifoldkv.recipes.recipe import Recipe
from manifoldkv.recipes.run import Run, check_run, context_of
from manifoldkv.runs.executors import Executor
from manifoldkv.text.sources import TextSource

if TYPE_CHECKING:
    from manifoldkv.recipes.config import CompressionConfig

Weights = Literal["fisher", "kq-svd", "layer-output"]
"""Costs of errors in keys and values."""


@dataclass(frozen=True)
class CommutingRecipe(Recipe):
    """Keys in bases that commute with their rotation, values in as many latents.

    A plan of it is the only one that `export_checkpoint` can fold into the weights of a model: keys
    are stored after rotation and never rebuilt, all layers have the same ranks of frequencies, and
    keys and values of a group of heads the same width (see `manifoldkv.commuting`). The ratio is
    kept at every length, since no token stays exact. It depends neither on the rank rule nor on
    whether keys are stored before rotation.

    Parameters
    ----------
    objective : {"fisher", "kq-svd", "layer-output"}
        Cost of an error: nats to second order (`fisher_moments`); its relative size in scores and
        in V W_O (`KQSVD`); or the error at the output of the decoder layer (`LayerOutput`), for
        which Riemannian Adam refines the bases of ``"kq-svd"`` at their ranks.
    grouping : str or int
        Heads that share a basis, ``"all"`` or a number: each group becomes one KV head.
    tuning_steps : int
        Steps of `tune`, at the end.

    Raises
    ------
    ArgumentError
        If there is no such objective.
        If the grouping does not exist, or shares one small basis between heads.
    """

    objective: Weights = "fisher"
    grouping: str | int = "all"
    tuning_steps: int = 0

    def __post_init__(self) -> None:
        names = get_args(Weights)
        if self.objective not in names:
            raise ArgumentError(
                f"unknown objective {self.objective!r} of commuting bases; known: "
                f"{', '.join(names)}"
            )
        object.__setattr__(self, "grouping", parse_grouping(self.grouping))
        if self.grouping == "shared":
            raise ArgumentError(
                "a commuting basis is one of heads side by side: take grouping all, or a number"
            )

    def describe(self) -> dict[str, Any]:
        """Return all fields under the names that `RankRecipe.describe` has."""
        return {
            "objective": {"name": self.objective},
            "solver": {
                "name": "riemannian-adam" if self.objective == "layer-output" else "closed-form"
            },
            "key_grouping": self.grouping,
            "value_grouping": self.grouping,
            "ranks": {"name": "frequencies"},
            "tuning_steps": self.tuning_steps,
        }

    def with_ranks(self, ranks: RankRule | str) -> Self:
        raise ArgumentError(
            "recipe commuting has the same ranks in all layers: leave the rank rule out, or "
            "take another recipe"
        )

    def check(
        self, decoder: Decoder, tokens: Tensor | TextSource | str, config: CompressionConfig
    ) -> None:
        check_run(decoder, config)
        check_turns_halves(decoder)
        if config.quantization is not None:
            config.quantization.check_windows(decoder.windows)
        self._grouping_and_latents(decoder, config.ratio)
        context_of(decoder, tokens, config)

    def fit(
        self, decoder: Decoder, run: Run, folder: str | Path | None, executor: Executor
    ) -> CompressionPlan:
        grouping, latents = self._grouping_and_latents(decoder, run.config.ratio)
        if self.objective == "fisher":
            forms = fisher_forms(decoder, run, grouping, folder)
        else:
            forms = query_forms(decoder, run, grouping)
        key_forms, values = [], []
        for key, value in forms:
            key_forms.append(key)
            down, up = weighted_closed_form(*value, latents)
            values.append(Basis(detached(down.float()), detached(up.float()), grouping))
        keys = closed_form(key_forms, latents // 2, grouping)
        bases = [*zip(keys, values, strict=True)]
        if self.objective == "layer-output":
            bases = [*refined(decoder, run, bases)]
        layers = [
            LayerPlan(SitePlan(key), SitePlan(value), window)
            for (key, value), window in zip(bases, decoder.windows, strict=True)
        ]
        return run.plan(decoder, layers, rotary="post")

    def _grouping_and_latents(self, decoder: Decoder, ratio: float) -> tuple[HeadGrouping, int]:
        """Return the head grouping and the latents of a group, for keys and for values."""
        grouping = HeadGrouping(self.grouping, decoder.kv_heads)
        return grouping, _latents(ratio, decoder.head_dim, grouping)

    def estimate(self, decoder: Decoder, run: Run) -> Estimate:
        probe, ratio = Probe.of(decoder, run.tokens), run.config.ratio
        bases = 0.0
        if self.objective == "fisher":
            bases = probe.fisher_seconds
        elif self.objective == "layer-output":
            grouping, latents = self._grouping_and_latents(decoder, ratio)
            share = probe.activations.sequences / len(run.tokens)
            seconds = _refining_seconds(probe.activations, grouping, latents, share)
            bases = probe.layers * seconds
        return probe.estimate(
            ratio=ratio,
            capture=probe.forward + probe.layers * probe.per_layer,
            bases=bases,
            ranks=0.0,
            tuning_steps=self.tuning_steps,
            activation_bytes=(probe.layers + 2) * probe.input_bytes,
        )


def _refining_seconds(
    activations: LayerActivations, grouping: HeadGrouping, latents: int, share: float
) -> float:
    """Return the seconds of the refinement of a layer, by steps on bases that do not commute.

    Activations are those of a share of the calibration sequences.
    """
    solver, factor = REFINEMENT.probe_run(share)
    rank = min(latents // grouping.width, activations.head_dim)
    total = 0.0
    for site in SITES:
        problem = LayerOutput().problem(activations, site, grouping, "post")
        seconds, _ = timed(partial(solver.solve, problem, rank))
        total += factor * seconds
    return total


def _latents(ratio: float, head_dim: int, grouping: HeadGrouping) -> int:
    """Return the largest number of latents of a group within a ratio.

    It is even and a multiple of the heads of a group.
    """
    features, step = head_dim * grouping.width, math.lcm(2, grouping.width)
    latents = int(ratio * features / step + 1e-9) * step
    if not latents:
        raise ArgumentError(
            f"ratio {ratio:g} leaves no latent: {grouping.width} heads of {head_dim} together have "
            f"a multiple of {step}, so that {step / features:g} is the least"
        )
    return latents


def check_turns_halves(decoder: Decoder) -> None:
    """Refuse a model that does not turn features j and d/2 + j of a head by one angle, for all j.

    Raises
    ------
    ModelError
        If it turns neighbours, or a part of the features only.
    """
    start = torch.zeros(1, 1, dtype=torch.long, device=decoder.device)
    for index, layer in enumerate(decoder.layers):
        cos, _ = decoder.angles(index, start, like=start.float())
        if rotation_of_keys(layer, cos.shape[-1]) is not rotate_halves:
            half = decoder.head_dim // 2
            raise ModelError(
                f"{type(decoder.model).__name__} has no commuting bases: it does not rotate "
                f"features j and {half} + j of a head by one angle, for all of them"
            )
