"""The run of a recipe: settings, text, tokens and context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manifoldkv.basis import Rotary
from manifoldkv.errors import ArgumentError
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.weights import check_finite
from manifoldkv.plan.files import check_context
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.model import config_hash
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.provenance import Provenance
from manifoldkv.plan.work import AttentionShape
from manifoldkv.recipes.recipe import Recipe
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_model, digest_of_tokens
from manifoldkv.runs.source import versions
from manifoldkv.text.sources import TextSource
from manifoldkv.text.tokens import calibration_length

if TYPE_CHECKING:
    from manifoldkv.recipes.config import CompressionConfig


@dataclass(frozen=True)
class Run:
    """Settings and calibration tokens of a run of `compress`.

    Parameters
    ----------
    config : CompressionConfig
        What plan to make.
    recipe : Recipe
        With the rank rule of the run.
    text : str
        Name of the calibration text.
    tokens : Tensor
        Token ids, (sequences, length), int64.
    context : int
        Tokens that the ratio holds for.
    """

    config: CompressionConfig
    recipe: Recipe
    text: str
    tokens: Tensor
    context: int

    def plan(
        self,
        decoder: Decoder,
        layers: Sequence[LayerPlan],
        *,
        rotary: Rotary | None = None,
        sinks: int = 0,
    ) -> CompressionPlan:
        """Return the plan of layers that the run has found, by torch's threads of now.

        Parameters
        ----------
        decoder : Decoder
            View of the model.
        layers : sequence of LayerPlan
            All of the model's.
        rotary : {"pre", "post"}, optional
            Whether keys are stored before rotation; as the run has it if omitted.
        sinks : int
            As in `CompressionPlan`.
        """
        provenance = Provenance(
            model=decoder.config._name_or_path,
            text=self.text,
            sequences=self.tokens.shape[0],
            length=self.tokens.shape[1],
            context=self.context,
            recipe=self.recipe.describe(),
            seed=self.config.seed,
            requested_ratio=self.config.ratio,
            threads=torch.get_num_threads(),
            versions=versions(),
        )
        return CompressionPlan(
            tuple(layers),
            self.config.rotary if rotary is None else rotary,
            config_hash(decoder.config),
            decoder.fingerprint(),
            AttentionShape(decoder.query_heads, decoder.rotary_dim),
            provenance,
            sinks=sinks,
        )

    def checkpoints(self, decoder: Decoder, folder: str | Path | None) -> Checkpoints:
        """Return the checkpoints of all that depends on model, tokens, threads and versions."""
        if folder is None:
            return Checkpoints()
        settings = {
            "model": digest_of_model(decoder.model),
            "tokens": digest_of_tokens(self.tokens),
            "threads": torch.get_num_threads(),
            "versions": versions(),
        }
        return Checkpoints(Path(folder), settings)


def check_run(decoder: Decoder, config: CompressionConfig) -> None:
    """Refuse settings that no recipe supports, before the text is read."""
    if not 0 < config.ratio <= 1:
        raise ArgumentError(f"ratio {config.ratio:g} is not in (0, 1]")
    if config.context is not None:
        check_context(config.context)
    check_finite(decoder.model)


def context_of(
    decoder: Decoder, tokens: Tensor | TextSource | str, config: CompressionConfig
) -> int:
    """Return the tokens that the ratio holds for, and refuse sequences too long for the model.

    No text is read.
    """
    length = calibration_length(decoder.model, tokens, config.length)
    return length if config.context is None else config.context
