"""Bases that commute with the rotation of keys, with equal ranks in all layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import torch
from torch import Tensor

from manifoldkv.basis import Basis, HeadGrouping, detached, parse_grouping
from manifoldkv.errors import ArgumentError, ModelError
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.rotary import rotate_halves, rotation_of_keys
from manifoldkv.objectives.linear_algebra import weighted_closed_form
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.site import SitePlan
from manifoldkv.ranks import RankRule
from manifoldkv.recipes.commuting_bases import (
    closed_form,
    fisher_forms,
    query_forms,
    refined,
)
from manifoldkv.recipes.recipe import Recipe
from manifoldkv.recipes.run import Run, check_run, context_of
from manifoldkv.runs.executors import Executor
from manifoldkv.text.sources import TextSource

if TYPE_CHECKING:
    from manifoldkv.recipes.config import CompressionConfig

Weights = Literal["fisher", "kq-svd", "layer-output"]
"""Objectives of commuting bases."""


@dataclass(frozen=True)
class CommutingRecipe(Recipe):
    """Key bases that commute with rotation, and value bases of the same rank.

    Only its plans can be folded into the weights of a model by `export_checkpoint`: keys are stored
    after rotation and never reconstructed, all layers have the same ranks of frequencies, and keys
    and values of a head group the same width (see `manifoldkv.commuting`). The ratio holds at every
    length, without sink tokens. Rank rules and `rotary` have no effect.

    Parameters
    ----------
    objective : {"fisher", "kq-svd", "layer-output"}
        Cost of errors: nats to second order (`fisher_moments`); relative errors of scores and of
        V W_O (`KQSVD`); or the decoder-layer output error (`LayerOutput`), for which Riemannian
        Adam refines the bases of ``"kq-svd"`` at their ranks.
    grouping : str or int
        Heads that share a basis, ``"all"`` or a number; each group becomes one KV head.
    tuning_steps : int
        Number of final steps of `tune`.

    Raises
    ------
    ArgumentError
        If the objective or the grouping is unknown, or the grouping is ``"shared"``.
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
                "grouping of commuting bases must be all or a number of heads, got shared"
            )

    def describe(self) -> dict[str, Any]:
        """Return all fields under the names of `RankRecipe.describe`."""
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
        check_rotates_halves(decoder)
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
        """Return the head grouping and the number of latents of a group, for both sites."""
        grouping = HeadGrouping(self.grouping, decoder.kv_heads)
        return grouping, _latents(ratio, decoder.head_dim, grouping)


def _latents(ratio: float, head_dim: int, grouping: HeadGrouping) -> int:
    """Return the largest number of latents of a group within a ratio, even and a multiple of g."""
    features, step = head_dim * grouping.width, math.lcm(2, grouping.width)
    latents = int(ratio * features / step + 1e-9) * step
    if not latents:
        raise ArgumentError(
            f"ratio must be >= {step / features:g} for {step} latents of {grouping.width} heads of "
            f"{head_dim}, got {ratio:g}"
        )
    return latents


def check_rotates_halves(decoder: Decoder) -> None:
    """Raise `ModelError` unless features j and d/2 + j of a head have one angle, for all j."""
    start = torch.zeros(1, 1, dtype=torch.long, device=decoder.device)
    for index, layer in enumerate(decoder.layers):
        cos, _ = decoder.angles(index, start, like=start.float())
        if rotation_of_keys(layer, cos.shape[-1]) is not rotate_halves:
            half = decoder.head_dim // 2
            raise ModelError(
                f"{type(decoder.model).__name__} has no commuting bases: it does not rotate "
                f"features j and {half} + j of a head by one angle, for all of them"
            )
