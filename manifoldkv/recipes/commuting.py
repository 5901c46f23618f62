"""Bases that commute with the rotation of keys, all layers at the same ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from manifoldkv.activations.capture import capture
from manifoldkv.activations.fisher import fisher_moments
from manifoldkv.activations.layer import LayerActivations
from manifoldkv.activations.moments import SiteMoments
from manifoldkv.basis import Basis, HeadGrouping, Site, detached, parse_grouping
from manifoldkv.coding.transform import RIDGE
from manifoldkv.commuting import commuting_basis, hermitian_parts
from manifoldkv.errors import ArgumentError, ModelError, PlanError
from manifoldkv.models.rotary import (
    angles_at,
    rotary_embedding_of,
    rotate_halves,
    rotation_of_keys,
)
from manifoldkv.models.support import (
    attention_of,
    decoder_layers,
    sliding_windows,
)
from manifoldkv.objectives import KQSVD, LayerOutput
from manifoldkv.objectives.linear_algebra import (
    same_size,
    weighted_closed_form,
    weighted_directions,
)
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.site import SitePlan
from manifoldkv.ranks import RankRule
from manifoldkv.recipes.commuting_descent import SOLVER, descended
from manifoldkv.recipes.probe import Estimate, Probe, timed
from manifoldkv.recipes.recipe import Recipe
from manifoldkv.recipes.run import Run, check_run, context_of, heads_and_features
from manifoldkv.runs.executors import Executor
from manifoldkv.runs.progress import follow
from manifoldkv.text.sources import TextSource

if TYPE_CHECKING:
    from manifoldkv.recipes.config import CompressionConfig

LOG = logging.getLogger(__name__)

SITES: tuple[Site, Site] = ("key", "value")
Forms = tuple[Tensor, Tensor]
"""Second moments of keys or values and the weight of errors in them, (groups, g·d, g·d) both."""


Weights = Literal["fisher", "kq-svd", "layer-output"]
"""What an error in keys and values costs."""


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
        What an error costs: nats to second order (`fisher_moments`); its share of the scores and of
        the output that the queries and W_O of a layer read; or the error at the output of the
        decoder layer, to which Riemannian Adam moves the bases of ``"kq-svd"``, of their ranks.
    grouping : str or int
        Which heads have a basis together, ``"all"`` or a number: each group becomes one KV head.
    tuning_steps : int
        Of `tune`, at the end; 0 leaves bases in closed form.

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
        known = get_args(Weights)
        if self.objective not in known:
            raise ArgumentError(
                f"unknown objective {self.objective!r} of commuting bases; known: "
                f"{', '.join(known)}"
            )
        object.__setattr__(self, "grouping", parse_grouping(self.grouping))
        if self.grouping == "shared":
            raise ArgumentError(
                "a commuting basis is one of heads side by side: take grouping all, or a number"
            )

    def describe(self) -> dict[str, Any]:
        """Return all fields and what they stand for, as `RankRecipe.describe` does."""
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
        self, model: PreTrainedModel, tokens: Tensor | TextSource | str, config: CompressionConfig
    ) -> None:
        check_run(model, config)
        check_turns_halves(model)
        if config.quantization is not None:
            config.quantization.check_windows(sliding_windows(model.config))
        self._run_of(model, config.ratio)
        context_of(model, tokens, config)

    def fit(
        self, model: PreTrainedModel, run: Run, folder: str | Path | None, executor: Executor
    ) -> CompressionPlan:
        return _solved(model, self._run(model, run), folder)

    def _run_of(self, model: PreTrainedModel, ratio: float) -> tuple[HeadGrouping, int]:
        """Return the head grouping and the latents of a group at a ratio."""
        heads, features = heads_and_features(model)
        grouping = HeadGrouping(self.grouping, heads)
        return grouping, _latents(ratio, features // heads, grouping)

    def _run(self, model: PreTrainedModel, run: Run) -> CommutingRun:
        grouping, latents = self._run_of(model, run.config.ratio)
        return CommutingRun(run.config, self, run.text, run.tokens, run.context, grouping, latents)

    def estimate(self, model: PreTrainedModel, run: Run) -> Estimate:
        commuting, probe = self._run(model, run), Probe.of(model, run.tokens)
        bases = 0.0
        if self.objective == "fisher":
            bases = probe.fisher_seconds
        elif self.objective == "layer-output":
            bases = probe.layers * _descending(probe.activations, commuting)
        return probe.estimate(
            ratio=run.config.ratio,
            capture=probe.forward + probe.layers * probe.per_layer,
            bases=bases,
            ranks=0.0,
            tuning_steps=self.tuning_steps,
            activation_bytes=(probe.layers + 2) * probe.input_bytes,
        )


@dataclass(frozen=True)
class CommutingRun(Run):
    """A run by a `CommutingRecipe`, whose ratio holds for any number of tokens.

    Parameters
    ----------
    grouping : HeadGrouping
        Of keys and of values.
    latents : int
        Of each group, for keys and for values: even, a multiple of the heads of a group.
    """

    recipe: CommutingRecipe
    grouping: HeadGrouping
    latents: int


def _descending(activations: LayerActivations, run: CommutingRun) -> float:
    """Return the seconds of a layer whose commuting bases are trained, by steps of others."""
    solver, longer = SOLVER.rehearsal(activations.sequences / len(run.tokens))
    total = 0.0
    for site in SITES:
        problem = LayerOutput().problem(activations, site, run.grouping, "post")
        rank = min(run.latents // run.grouping.width, activations.head_dim)
        seconds, _ = timed(partial(solver.solve, problem, rank))
        total += longer * seconds
    return total


def _latents(ratio: float, head_dim: int, grouping: HeadGrouping) -> int:
    """Return how many latents of a group are within a ratio."""
    features, step = head_dim * grouping.width, math.lcm(2, grouping.width)
    latents = int(ratio * features / step + 1e-9) * step
    if not latents:
        raise ArgumentError(
            f"ratio {ratio:g} leaves no latent: {grouping.width} heads of {head_dim} together have "
            f"a multiple of {step}, so that {step / features:g} is the least"
        )
    return latents


def check_turns_halves(model: PreTrainedModel) -> None:
    """Refuse a model that does not turn features j and d/2 + j of a head by one angle, for all j.

    Raises
    ------
    ModelError
        If it turns neighbours, or a part of the features only.
    """
    kinds, _ = get_layer_types_and_kwargs(model.config.get_text_config())
    embedding = rotary_embedding_of(model.get_decoder())
    start = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    for kind, layer in zip(kinds, decoder_layers(model), strict=True):
        cos, _ = angles_at(embedding, start, kind, like=start.float())
        if rotation_of_keys(layer, cos.shape[-1]) is not rotate_halves:
            half = attention_of(layer).head_dim // 2
            raise ModelError(
                f"{type(model).__name__} has no commuting bases: it does not rotate features j and "
                f"{half} + j of a head by one angle, for all of them"
            )


def _solved(
    model: PreTrainedModel, run: CommutingRun, folder: str | Path | None
) -> CompressionPlan:
    """Return the plan of a run, not tuned end to end.

    Parameters
    ----------
    model : PreTrainedModel
        As in `compress`, and unwrapped.
    run : CommutingRun
        Of the recipe.
    folder : str or Path, optional
        Where Fisher moments are stored, for a run that resumes.

    Raises
    ------
    RunError
        As `fisher_moments`.
    """
    keys, values = [], []
    for key, value in quadratic_forms(model, run, folder):
        keys.append(key)
        down, up = (detached(x.float()) for x in weighted_closed_form(*value, run.latents))
        values.append(Basis(down, up, run.grouping))
    bases = closed_form(keys, run.latents // 2, run.grouping)
    found = [*zip(bases, values, strict=True)]
    if run.recipe.objective == "layer-output":
        found = [*descended(model, run, found)]
    return plan_of(model, run, found)


def closed_form(forms: Sequence[Forms], pairs: int, grouping: HeadGrouping) -> list[Basis]:
    """Return commuting bases of the keys of all layers, of the same frequencies.

    With second moments C_j = E[z zᴴ] and weights W_j of one frequency, errors cost
    tr((I - A Bᴴ) C_j (I - A Bᴴ)ᴴ W_j) when all phases are alike. The least is left by the leading
    eigenvectors U of W_j^½ C_j W_j^½, with B = W_j^½ U and A = W_j^-½ U, and an eigenvalue is what
    its direction saves. So the ranks r_j are those that save most in all layers and groups
    together.

    Parameters
    ----------
    forms : sequence of tuple of Tensor
        Of the keys of every layer, before rotation or after it.
    pairs : int
        Σ_j r_j, of every group.
    grouping : HeadGrouping
        Which heads have a basis together.

    Returns
    -------
    list of Basis
        float32.
    """
    width, directions = grouping.width, []
    for gram, weight in forms:
        of_frequencies = (hermitian_parts(x, width) for x in (gram, weight))
        directions.append(weighted_directions(*of_frequencies))  # (G, d/2, g), (G, d/2, g, g)
    saved = torch.stack([gains for gains, _, _ in directions]).sum(dim=(0, 1))  # (d/2, g)
    # Stable, and gains of a frequency fall: the first r_j directions of each are taken.
    kept = saved.flatten().sort(descending=True, stable=True).indices[:pairs].sort().values
    at, column = kept // width, kept % width
    found = []
    for _, down, up in directions:
        # Two indices that stand apart put their axis first: (pairs, G, g).
        of_down, of_up = (
            detached(x.to(torch.complex64))
            for x in same_size(*(x[:, at, :, column].movedim(0, -1) for x in (down, up)))
        )
        frequencies, head_dim = tuple(at.tolist()), 2 * saved.shape[0]
        found.append(commuting_basis(of_down, of_up, frequencies, grouping, head_dim))
    return found


def quadratic_forms(
    model: PreTrainedModel, run: CommutingRun, folder: str | Path | None
) -> Iterator[tuple[Forms, Forms]]:
    """Yield second moments and weights of the keys and of the values of every layer."""
    if run.recipe.objective == "fisher":
        # In nats, so that layers can be compared as they are.
        moments = fisher_moments(
            model, run.tokens, seed=run.config.seed, rotary="pre", folder=folder
        )
        for layer in moments:
            yield _fisher_forms(layer.key, run.grouping), _fisher_forms(layer.value, run.grouping)
        return
    layers = len(decoder_layers(model))
    for activations in follow(capture(model, run.tokens), layers, "layers"):
        key, value = (
            KQSVD().matrices(KQSVD().problem(activations, site, run.grouping), None)
            for site in SITES
        )
        yield _relative(*key), _relative(*value)


def _fisher_forms(moments: SiteMoments, grouping: HeadGrouping) -> Forms:
    second = moments.second
    ridge = RIDGE * moments.fisher.diagonal().mean()
    weight = moments.fisher + ridge * torch.eye(len(second), dtype=second.dtype)
    return of_groups(second, grouping), of_groups(weight, grouping)


def of_groups(matrix: Tensor, grouping: HeadGrouping) -> Tensor:
    """Return the blocks of head groups on the diagonal of a matrix of all heads."""
    groups = grouping.groups
    blocks = matrix.unflatten(0, (groups, -1)).unflatten(2, (groups, -1))  # (G, p, G, p)
    return blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0)


def _relative(gram: Tensor, weight: Tensor | None) -> Forms:
    """Return forms in which all that a layer could lose is 1."""
    if weight is None:
        raise PlanError("the objective of a commuting basis has weights")
    gram, weight = gram.cpu(), weight.cpu()
    total = (gram * weight).sum()
    return gram, weight / total if total > 0 else weight  # a layer of zeros loses nothing


def plan_of(
    model: PreTrainedModel, run: CommutingRun, bases: Sequence[tuple[Basis, Basis]]
) -> CompressionPlan:
    """Return the plan that stores these keys, after rotation, and these values."""
    layers = [
        LayerPlan(SitePlan(key), SitePlan(value), window)
        for (key, value), window in zip(bases, sliding_windows(model.config), strict=True)
    ]
    return run.plan(model, layers, rotary="post")
