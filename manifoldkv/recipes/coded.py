"""Runs of recipes that code the residuals of a linear prediction."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.activations.fisher import fisher_moments
from manifoldkv.activations.moments import LayerMoments
from manifoldkv.errors import ArgumentError, PlanError
from manifoldkv.recipes.probe import Estimate, Probe
from manifoldkv.recipes.run import Run

if TYPE_CHECKING:
    from manifoldkv.recipes.config import CompressionConfig

LOG = logging.getLogger(__name__)

HELD_OUT = 8
"""One of this many sequences is held out, to predict the loss on."""
ROUNDS = 3
"""In which codes and predictions are found, which depend on each other: first as if reconstruction
were exact."""


@dataclass(frozen=True)
class CodedRun(Run):
    """A run by a recipe that codes the residuals of a prediction.

    Parameters
    ----------
    sinks : int
        First tokens of a sequence that stay uncompressed.
    below : int or None
        How many layers below predict.
    """

    sinks: int
    below: int | None

    @property
    def prompt(self) -> int | None:
        """Return the tokens of every sequence whose cache is stored before others are read.

        None if the cache is attended to while it is filled.
        """
        return None

    @property
    def first(self) -> int:
        """Return how many tokens at the beginning of every sequence nothing is fitted to.

        They are those that the cache keeps uncompressed; of a shorter sequence all but one.
        """
        return min(self.sinks, (self.prompt or self.tokens.shape[1]) - 1)

    @property
    def fitted(self) -> Tensor:
        """Return the sequences that codes are fitted to, all but the last eighth."""
        return self.tokens[: len(self.tokens) - len(self.held_out)]

    @property
    def held_out(self) -> Tensor:
        """Return the sequences that the loss is predicted on; none of fewer than eight."""
        return self.tokens[len(self.tokens) - len(self.tokens) // HELD_OUT :]

    def warn_if_short(self, features: int) -> None:
        """Warn of a text that cannot span the features of a layer, all KV heads together."""
        fitted = self.fitted[:, self.first : self.prompt]
        distinct = len(fitted.unique())
        if fitted.numel() <= features:
            LOG.warning(
                "the calibration text has %d tokens, and a layer %d features: directions that the "
                "text does not span are not stored. Use more or longer sequences",
                fitted.numel(),
                features,
            )
        elif distinct <= features:
            LOG.warning(
                "the calibration text has %d distinct tokens, and the first layer, whose keys "
                "depend on the token alone, %d features: directions that the text does not span "
                "are not stored. Use more text",
                distinct,
                features,
            )

    @property
    def rounds(self) -> int:
        """Return how often the activations of all layers are run through."""
        return 1 if self.below is None else ROUNDS

    def moments(
        self, model: PreTrainedModel, tokens: Tensor, folder: str | Path | None
    ) -> list[LayerMoments]:
        """Return the Fisher moments of all layers, of keys before rotation.

        Parameters
        ----------
        model : PreTrainedModel
            As in `compress`, and unwrapped.
        tokens : Tensor
            Some of the sequences, (S, n), int64.
        folder : str or Path, optional
            Where they are stored, for a run that resumes.

        Raises
        ------
        RunError
            As `fisher_moments`.
        """
        return fisher_moments(
            model,
            tokens,
            seed=self.config.seed,
            first=self.first,
            prompt=self.prompt,
            folder=folder,
        )


def check_coded_config(config: CompressionConfig) -> None:
    """Refuse settings of a run that a recipe of coded latents does not take."""
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


def check_counts(**counts: int | None) -> None:
    """Refuse negative fields of a recipe."""
    for name, value in counts.items():
        if value is not None and value < 0:
            raise ArgumentError(f"{name} must be >= 0, got {value}")


def estimate_of_coded(run: CodedRun, probe: Probe, fitting: float) -> Estimate:
    """Return the estimate of a run, given the seconds of fitting the codes of a site once."""
    layers, reconstructions = probe.layers, 0
    if run.below is not None:
        activations = probe.activations
        features = activations.kv_heads * activations.head_dim
        reconstructions = 2 * (run.below + 1) * features * torch.float32.itemsize
    return probe.estimate(
        ratio=run.config.ratio,
        capture=run.rounds * (probe.forward + layers * probe.per_layer),
        bases=probe.fisher_seconds,
        ranks=run.rounds * 2 * layers * fitting,
        activation_bytes=(layers + 2) * probe.input_bytes + reconstructions,
    )
