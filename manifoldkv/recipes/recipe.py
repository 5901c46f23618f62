"""The contract of recipes: how a plan is made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor

from manifoldkv.errors import ArgumentError
from manifoldkv.models.decoder import Decoder
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.ranks import RankRule
from manifoldkv.runs.executors import Executor
from manifoldkv.text.sources import TextSource

if TYPE_CHECKING:
    from manifoldkv.recipes.config import CompressionConfig
    from manifoldkv.recipes.run import Run


@dataclass(frozen=True)
class Recipe(ABC):
    """How a plan is made: inherit in a frozen dataclass, and give it a name by `register_recipe`.

    `compress` calls `check` before a text is read, then `fit`, then `manifoldkv.tune` for
    `tuning_steps` steps, and rounds the plan if that is asked for.
    """

    in_sixteen_bits: ClassVar[bool] = False
    """Whether a ratio compares bytes to a cache in 16 bits, for any dtype of the model."""
    meets_nats: ClassVar[bool] = False
    """Whether a plan can be asked for by its loss."""
    tuning_steps = 0

    def with_ranks(self, ranks: RankRule | str) -> Self:
        """Return the recipe with another rank rule.

        Raises
        ------
        ArgumentError
            If the recipe has no rank rule.
        """
        raise ArgumentError(
            f"{type(self).__name__} has no ranks to choose: leave the rank rule out, or take "
            "another recipe (low-rank)"
        )

    def with_work(self, work: float) -> Self:
        """Return the recipe with another budget of work.

        Raises
        ------
        ArgumentError
            If the recipe has none.
        """
        raise ArgumentError(
            f"{type(self).__name__} has no budget of work: leave work out, or take another recipe "
            "(bits)"
        )

    def check_config(self, config: CompressionConfig) -> None:
        """Refuse settings of a run that contradict the recipe, for any model.

        Raises
        ------
        PlanError
            Naming the setting.
        """
        return

    @abstractmethod
    def check(
        self, decoder: Decoder, tokens: Tensor | TextSource | str, config: CompressionConfig
    ) -> None:
        """Refuse a run that the recipe cannot do, before a text is read.

        Parameters
        ----------
        decoder : Decoder
            View of the model.
        tokens : Tensor, TextSource or str
            Calibration data, of which nothing is read but the length of windows.
        config : CompressionConfig
            Settings of the run.

        Raises
        ------
        ManifoldKVError
            Naming the value and the fix.
        """

    @abstractmethod
    def fit(
        self, decoder: Decoder, run: Run, folder: str | Path | None, executor: Executor
    ) -> CompressionPlan:
        """Return the plan of a run, neither tuned nor rounded.

        Parameters
        ----------
        decoder : Decoder
            View of the model.
        run : Run
            Settings and calibration tokens, which `check` has accepted.
        folder : str or Path, optional
            Where finished parts are stored, for a run that resumes.
        executor : Executor
            Where independent tasks run.
        """

    def frontier(self, decoder: Decoder, run: Run) -> dict[str, float]:
        """Return the loss by limit of work, in nats per token, estimated on a few sequences.

        Nothing is returned by recipes without a limit of work.
        """
        return {}

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return all fields by name, methods by their names and fields, for the provenance.

        ``"objective"``, ``"solver"`` and ``"ranks"`` are dictionaries with a ``"name"``.
        """

    def bytes_beyond_ratio(self, elements: int, itemsize: int, tokens: int) -> int:
        """Return bytes that a cache in another dtype takes beyond its ratio.

        Parameters
        ----------
        elements : int
            Of the keys and values of a token, in all layers without a sliding window.
        itemsize : int
            Bytes of an element in the dtype of the model.
        tokens : int
            Of the sequence.
        """
        return 0
