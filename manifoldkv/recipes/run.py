"""A run of `compress`: model, settings, text and where tasks run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manifoldkv.core.description import ModelDescription
from manifoldkv.core.errors import ArgumentError
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.fingerprint import digest_of_model
from manifoldkv.models.weights import check_finite
from manifoldkv.plan.compute import AttentionShape
from manifoldkv.plan.files import check_context
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.provenance import Provenance
from manifoldkv.recipes.recipe import Recipe
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_tokens
from manifoldkv.runs.executors import Executor
from manifoldkv.runs.source import versions
from manifoldkv.statistics.collect import collect
from manifoldkv.statistics.statistics import Statistics

if TYPE_CHECKING:
    from manifoldkv.recipes.config import CompressionConfig

LOG = logging.getLogger(__name__)
HELD_OUT = 8
"""One of this many sequences is held out, to estimate the loss on."""


@dataclass(frozen=True)
class Run:
    """Model, calibration tokens and settings of a run.

    Parameters
    ----------
    decoder : Decoder
        View of the model.
    config : CompressionConfig
        What plan to make.
    text : str
        Name of the calibration text.
    tokens : Tensor
        Token ids, (sequences, length), int64.
    folder : str or Path or None
        Where finished parts are stored, for a run that resumes.
    executor : Executor
        Where independent tasks run.
    """

    decoder: Decoder
    config: CompressionConfig
    text: str
    tokens: Tensor
    folder: str | Path | None
    executor: Executor

    @property
    def context(self) -> int:
        """Return the number of tokens that the ratio holds for."""
        return self.config.context or self.tokens.shape[1]

    @property
    def fitted(self) -> Tensor:
        """Return the sequences that everything is fitted to, all but the last eighth."""
        return self.tokens[: len(self.tokens) - len(self.held_out)]

    @property
    def held_out(self) -> Tensor:
        """Return the sequences that the loss is estimated on; none of fewer than eight."""
        return self.tokens[len(self.tokens) - len(self.tokens) // HELD_OUT :]

    def statistics(
        self, *, first: int = 0, prompt: int | None = None, jacobian: bool = False
    ) -> Statistics:
        """Return the statistics of the text; parameters as in `collect`."""

        def of(tokens: Tensor, folder: Path | None) -> Statistics:
            return collect(
                self.decoder.model,
                tokens,
                text=self.text,
                seed=self.config.seed,
                first=first,
                prompt=prompt,
                jacobian=jacobian,
                folder=folder,
                executor=self.executor,
            )

        LOG.info("collecting statistics of %d sequences", len(self.tokens))
        folder = None if self.folder is None else Path(self.folder)
        statistics = of(self.fitted, folder)
        if not len(self.held_out):
            return statistics
        return replace(statistics, held_out=of(self.held_out, folder))

    def checkpoints(self) -> Checkpoints:
        """Return the checkpoints of all that depends on model, tokens, threads and versions."""
        if self.folder is None:
            return Checkpoints()
        settings = {
            "model": digest_of_model(self.decoder.model),
            "tokens": digest_of_tokens(self.tokens),
            "threads": torch.get_num_threads(),
            "versions": versions(),
        }
        return Checkpoints(Path(self.folder), settings)


@dataclass(frozen=True)
class Text:
    """Calibration text of a plan: its name, and the number and length of its sequences."""

    name: str
    sequences: int
    length: int

    @classmethod
    def of(cls, statistics: Statistics) -> Text:
        """Return the text of statistics, with its held-out sequences."""
        held_out = statistics.held_out
        sequences = statistics.sequences + (0 if held_out is None else held_out.sequences)
        return cls(statistics.text, sequences, statistics.length)


def new_plan(
    recipe: Recipe,
    model: ModelDescription,
    layers: Sequence[LayerPlan],
    text: Text,
    config: CompressionConfig,
    *,
    sinks: int = 0,
) -> CompressionPlan:
    """Return the plan of layers that a recipe has made, by torch's threads of now.

    Parameters
    ----------
    recipe : Recipe
        The recipe.
    model : ModelDescription
        The model.
    layers : sequence of LayerPlan
        All of the model's.
    text : Text
        Calibration text.
    config : CompressionConfig
        Settings of the run.
    sinks : int
        As in `CompressionPlan`.
    """
    provenance = Provenance(
        model=model.name,
        text=text.name,
        sequences=text.sequences,
        length=text.length,
        context=config.context or text.length,
        recipe=recipe.describe(),
        seed=config.seed,
        requested_ratio=config.ratio,
        threads=torch.get_num_threads(),
        versions=versions(),
    )
    return CompressionPlan(
        tuple(layers),
        config.rotary,
        model.config_hash,
        model.fingerprint,
        AttentionShape(model.query_heads, model.rotary_dim),
        provenance,
        sinks=sinks,
    )


def check_run(decoder: Decoder, config: CompressionConfig) -> None:
    """Refuse settings that no recipe supports, before the text is read."""
    if not 0 < config.ratio <= 1:
        raise ArgumentError(f"ratio {config.ratio:g} is not in (0, 1]")
    if config.context is not None:
        check_context(config.context)
    check_finite(decoder.model)
