"""What a run of `compress` starts from, by whatever recipe."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.activations.fisher import LayerMoments, fisher_moments
from manifoldkv.basis import Rotary
from manifoldkv.coding.integers import check_layout
from manifoldkv.errors import ArgumentError
from manifoldkv.models.fingerprint import fingerprint
from manifoldkv.models.support import (
    attention_of,
    check_supported,
    decoder_layers,
    sliding_windows,
)
from manifoldkv.models.weights import check_finite
from manifoldkv.plan.files import check_context
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan, config_hash
from manifoldkv.plan.provenance import Provenance
from manifoldkv.ranks import Budget
from manifoldkv.ranks.base import CandidateRanks
from manifoldkv.recipes.config import CompressionConfig
from manifoldkv.recipes.recipe import AnyRecipe, BitRecipe, Recipe, StoredRecipe
from manifoldkv.recipes.solve import BasisFinder
from manifoldkv.runs.source import versions
from manifoldkv.text.sources import TextSource
from manifoldkv.text.tokens import calibration_length, calibration_tokens

HELD_OUT = 8
"""One of so many sequences is held out, to predict the loss on."""
LOG = logging.getLogger(__name__)

ROUNDS = 3
"""In which codes and predictions are found, which depend on each other: first as if all was given
back exactly."""


@dataclass(frozen=True)
class Prepared:
    """A run of `compress`, all asked that could refuse it before its long work.

    Parameters
    ----------
    config : CompressionConfig
        What plan to make.
    recipe : Recipe, BitRecipe, CommutingRecipe or StoredRecipe
        How, with the rank rule of the run.
    text : str
        Name of the calibration text.
    tokens : Tensor
        Token ids, (sequences, length), int64.
    context : int
        Tokens that the ratio holds for.
    """

    config: CompressionConfig
    recipe: AnyRecipe
    text: str
    tokens: Tensor
    context: int

    def plan(
        self,
        model: PreTrainedModel,
        layers: Sequence[LayerPlan],
        *,
        rotary: Rotary | None = None,
        sinks: int = 0,
        predicted_nats: float | None = None,
    ) -> CompressionPlan:
        """Return the plan of layers that the run has found, by torch's threads of now.

        Parameters
        ----------
        model : PreTrainedModel
            Unwrapped.
        layers : sequence of LayerPlan
            All of the model's.
        rotary : {"pre", "post"}, optional
            Whether keys are stored before rotation; as the run has it if omitted.
        sinks, predicted_nats
            As in `CompressionPlan` and `Provenance`.
        """
        provenance = Provenance(
            model=model.config._name_or_path,
            text=self.text,
            sequences=self.tokens.shape[0],
            length=self.tokens.shape[1],
            context=self.context,
            recipe=self.recipe.describe(),
            seed=self.config.seed,
            requested_ratio=self.config.ratio,
            threads=torch.get_num_threads(),
            versions=versions(),
            predicted_nats=predicted_nats,
        )
        return CompressionPlan(
            tuple(layers),
            self.config.rotary if rotary is None else rotary,
            config_hash(model.config),
            fingerprint(model),
            provenance,
            sinks=sinks,
        )


@dataclass(frozen=True)
class PreparedRanks(Prepared):
    """A run by a `Recipe`.

    Parameters
    ----------
    budget : Budget
        For the ranks of all layers.
    candidates : list of CandidateRanks
        Ranks that bases are found at, by layer.
    """

    recipe: Recipe
    budget: Budget
    candidates: list[CandidateRanks]


@dataclass(frozen=True)
class PreparedCodes(Prepared):
    """A run by a recipe that codes what a prediction leaves."""

    recipe: BitRecipe | StoredRecipe

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
        return min(self.recipe.sinks, (self.prompt or self.tokens.shape[1]) - 1)

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
        return 1 if self.recipe.below is None else ROUNDS

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
            Where they are stored, for a run that goes on.

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


def check_run(model: PreTrainedModel, config: CompressionConfig) -> None:
    """Refuse what no recipe can do, before the text is read."""
    if not 0 < config.ratio <= 1:
        raise ArgumentError(f"ratio {config.ratio:g} is not in (0, 1]")
    if config.context is not None:
        check_context(config.context)
    check_supported(model)
    check_finite(model)


def context_of(
    model: PreTrainedModel, tokens: Tensor | TextSource | str, config: CompressionConfig
) -> int:
    """Return the tokens that the ratio holds for, and refuse sequences too long for the model.

    No text is read.
    """
    length = calibration_length(model, tokens, config.length)
    return length if config.context is None else config.context


def read_text(
    model: PreTrainedModel, tokens: Tensor | TextSource | str, config: CompressionConfig
) -> tuple[str, Tensor]:
    """Return the name of the calibration text and its token ids."""
    return calibration_tokens(model, tokens, config.sequences, config.length)


def check_ranks(
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    config: CompressionConfig,
    recipe: Recipe,
) -> tuple[Budget, list[CandidateRanks]]:
    """Return the budget of a run by a `Recipe` and the ranks to find bases at.

    No text is read. All errors of `prepare_ranks` are raised here, except those of the text.
    """
    check_run(model, config)
    windows = sliding_windows(model.config)
    for index, window in enumerate(windows):
        check_layout(config.quantization, index, window)
    BasisFinder(recipe, config.rotary, config.seed)  # do objective and solver go together?
    head_dim = int(attention_of(decoder_layers(model)[0]).head_dim)
    context = context_of(model, tokens, config)
    budget = Budget(config.ratio, head_dim, windows, context)
    return budget, recipe.ranks.candidate_ranks(budget)


def prepare_ranks(
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    config: CompressionConfig,
    recipe: Recipe,
) -> PreparedRanks:
    """Read the text and return what a run starts from; its errors are raised here.

    Nothing here takes long. The recipe is the complete one of the run.
    """
    budget, candidates = check_ranks(model, tokens, config, recipe)
    text, ids = read_text(model, tokens, config)
    return PreparedRanks(config, recipe, text, ids, budget.context, budget, candidates)
