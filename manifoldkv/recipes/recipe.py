"""The contract of recipes: how a plan is made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from manifoldkv.core.description import ModelDescription
from manifoldkv.core.errors import ArgumentError
from manifoldkv.plan.plan import CompressionPlan

if TYPE_CHECKING:
    from manifoldkv.recipes.config import CompressionConfig
    from manifoldkv.recipes.run import Run

FIELDS = ("objective", "ranks", "compute")
"""Settings of a run that are fields of the recipes that have them."""


@dataclass(frozen=True)
class Recipe(ABC):
    """How a plan is made: inherit in a frozen dataclass, and give it a name by `register_recipe`.

    `compress` calls `check` before a text is read, then `calibrate`, then `fit`, then
    `manifoldkv.tune` for `tuning_steps` steps, and quantizes the plan if that is asked for.
    """

    in_sixteen_bits: ClassVar[bool] = False
    """Whether a ratio compares bytes to a cache in 16 bits, for any dtype of the model."""
    meets_nats: ClassVar[bool] = False
    """Whether a plan can be asked for by its loss."""
    tuning_steps = 0

    @abstractmethod
    def fit(self, statistics: Any, config: CompressionConfig) -> CompressionPlan:
        """Return a plan, neither tuned nor quantized.

        Parameters
        ----------
        statistics : Statistics
            What `calibrate` returns.
        config : CompressionConfig
            Settings, which `check` has accepted.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return all fields by name, methods by their names and fields, for the provenance.

        ``"objective"``, ``"solver"`` and ``"ranks"`` are dictionaries with a ``"name"``.
        """

    def calibrate(self, run: Run) -> Any:
        """Return what `fit` needs to know of the model and the text, by default `Statistics`."""
        return run.statistics()

    def check(self, model: ModelDescription, config: CompressionConfig, context: int) -> None:
        """Refuse unsupported models and settings, before a text is read; by default nothing.

        Parameters
        ----------
        model : ModelDescription
            The model.
        config : CompressionConfig
            Settings of the run.
        context : int
            Tokens that the ratio holds for.

        Raises
        ------
        ManifoldKVError
            Naming the value and the fix.
        """
        return

    def configured(self, config: CompressionConfig) -> Self:
        """Return the recipe with the settings of a run that are its own fields.

        Raises
        ------
        ArgumentError
            If the recipe has no such field.
        """
        given = {
            name: getattr(config, name) for name in FIELDS if getattr(config, name) is not None
        }
        own = {one.name for one in fields(self)}
        for name, value in given.items():
            if name not in own:
                raise ArgumentError(
                    f"{type(self).__name__} has no {name}: leave {name}={value!r} out, or take "
                    "another recipe"
                )
        return replace(self, **given)

    def frontier(self, statistics: Any, config: CompressionConfig) -> dict[str, float]:
        """Return the estimated loss by limit of compute, of a recipe that has such limits."""
        return {}

    def least_ratio(self, model: ModelDescription, context: int) -> float:
        """Return the smallest ratio of a plan that is asked for by its loss."""
        return 0.0

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
