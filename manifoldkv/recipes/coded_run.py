"""Runs of recipes of coded latents: sequences, Fisher moments, warnings."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from manifoldkv.activations.fisher import fisher_moments
from manifoldkv.activations.moments import LayerMoments
from manifoldkv.basis import HeadGrouping
from manifoldkv.models.decoder import Decoder
from manifoldkv.recipes.run import Run

if TYPE_CHECKING:
    from manifoldkv.recipes.coded import CodedRecipe

LOG = logging.getLogger(__name__)

HELD_OUT = 8
"""One of this many sequences is held out, to predict the loss on."""
ROUNDS = 3
"""Rounds of fitting bits and predictors, which depend on each other: first as if reconstruction
were exact."""


@dataclass(frozen=True)
class CodedRun(Run):
    """A run of a recipe of coded latents.

    Parameters
    ----------
    windows : tuple of int or None
        Sliding windows of the layers.
    grouping : HeadGrouping
        Of all KV heads of a layer.
    budget : float
        `CodedRecipe.budget` of the run.
    """

    recipe: CodedRecipe[Any]
    windows: tuple[int | None, ...]
    grouping: HeadGrouping
    budget: float

    @property
    def prompt(self) -> int | None:
        """Return `CodedRecipe.prompt` of the calibration sequences."""
        return self.recipe.prompt(self.tokens.shape[1])

    @property
    def first(self) -> int:
        """Return how many tokens at the beginning of every sequence nothing is fitted to.

        They are those that the cache keeps uncompressed; of a shorter sequence all but one.
        """
        return min(self.recipe.sinks, (self.prompt or self.tokens.shape[1]) - 1)

    @property
    def fitted(self) -> Tensor:
        """Return the sequences that everything is fitted to, all but the last eighth."""
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

    def moments(
        self, decoder: Decoder, tokens: Tensor, folder: str | Path | None
    ) -> list[LayerMoments]:
        """Return the Fisher moments of all layers, of keys before rotation.

        Parameters
        ----------
        decoder : Decoder
            View of the model.
        tokens : Tensor
            Some of the sequences, (S, n), int64.
        folder : str or Path, optional
            Where moments are cached on disk, for a run that resumes.

        Raises
        ------
        RunError
            As `fisher_moments`.
        """
        return fisher_moments(
            decoder.model,
            tokens,
            seed=self.config.seed,
            first=self.first,
            prompt=self.prompt,
            folder=folder,
        )
