"""Linear prediction of keys and values from reconstructions of the same tokens."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manifoldkv.basis import SITES, Site, equal
from manifoldkv.coding.quantizer import LARGEST_INTEGER, check_numbers
from manifoldkv.errors import PlanError

Input = tuple[int, Site]
"""Layers below the predicted one, 0 for the same layer, and the site there."""


@dataclass(frozen=True, eq=False)
class LinearPredictor:
    """Weights of a linear prediction of the keys or values of a layer.

    Parameters
    ----------
    inputs : tuple of Input
        Sites that are predicted from.
    weights : Tensor
        (inputs · D, D), float32, D being the features of all heads together; (inputs · D, rank) of
        a predictor of low rank.
    expansion : Tensor or None
        Second factor of a predictor of low rank, (rank, D), float32.

    Raises
    ------
    PlanError
        If an input is impossible or named twice, or the weights do not fit the inputs, are not
        finite or are no matrices.
    """

    inputs: tuple[Input, ...]
    weights: Tensor = field(repr=False)
    expansion: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for below, site in self.inputs:
            possible = type(below) is int and 0 <= below <= LARGEST_INTEGER and site in SITES
            if not possible:
                raise PlanError(f"predictor has the impossible input {(below, site)!r}")
        if not self.inputs or len(set(self.inputs)) < len(self.inputs):
            raise PlanError(f"predictor must have different inputs, got {list(self.inputs)}")
        parts = [self.weights] if self.expansion is None else [self.weights, self.expansion]
        for part in parts:
            if part.ndim != 2 or not part.numel():
                raise PlanError(f"predictor must be (inputs, features), got {tuple(part.shape)}")
            check_numbers("predictor", part, tuple(part.shape))
        if self.expansion is not None and self.rank != len(self.expansion):
            raise PlanError(
                f"predictor has rank {self.rank}, its expansion {len(self.expansion)} rows"
            )
        if len(self.weights) != len(self.inputs) * self.features:
            raise PlanError(
                f"predictor of {self.features} features from {len(self.inputs)} sites must have "
                f"{len(self.inputs) * self.features} rows, got {len(self.weights)}"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LinearPredictor):
            return NotImplemented
        return (
            self.inputs == other.inputs
            and equal(self.weights, other.weights)
            and equal(self.expansion, other.expansion)
        )

    def __hash__(self) -> int:
        return hash((self.inputs, self.weights.shape))

    @property
    def rank(self) -> int:
        """Return the rank that the weights allow."""
        return self.weights.shape[1]

    @property
    def features(self) -> int:
        """Return the features of all heads together, D."""
        return (self.weights if self.expansion is None else self.expansion).shape[1]

    @property
    def depth(self) -> int:
        """Return how many layers below the deepest input is."""
        return max(below for below, _ in self.inputs)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Return the rows of the weights by input, (D, D) or (D, rank) each."""
        return self.weights.split(self.features)

    def predict(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the prediction of tokens, (…, D).

        Parameters
        ----------
        inputs : sequence of Tensor
            `PredictorContext.of` the inputs, (…, D) each.
        """
        joined = torch.cat(list(inputs), dim=-1)
        predicted = joined @ self.weights.to(joined)
        return predicted if self.expansion is None else predicted @ self.expansion.to(joined)

    def check(self, name: str, site: Site, layers_below: int) -> None:
        """Raise `PlanError` unless the inputs are sites before this one that hold the same tokens.

        Parameters
        ----------
        name : str
            Layer and site, for messages.
        site : {"key", "value"}
            Predicted site.
        layers_below : int
            `layers_below` of the layer.
        """
        for below, of_input in self.inputs:
            before = below > 0 or (site == "value" and of_input == "key")
            if not before or below > layers_below:
                raise PlanError(
                    f"{name}: predicted from the {of_input}s {below} layers below, must be from "
                    f"at most {layers_below} layers below"
                    f"{', or the keys of the layer' if site == 'value' else ''}"
                )

    def describe(self) -> list[list[Any]]:
        """Return the inputs for a plan's description."""
        return [list(one) for one in self.inputs]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        named = {"predictor": self.weights}
        return named if self.expansion is None else named | {"expansion": self.expansion}

    @classmethod
    def of_parts(cls, inputs: Any, tensors: dict[str, Tensor]) -> LinearPredictor:
        """Return the predictor of `describe` and `tensors`, which are taken out of `tensors`."""
        named = tuple((below, site) for below, site in inputs)
        return cls(named, tensors.pop("predictor"), tensors.pop("expansion", None))


class PredictorContext:
    """Reconstructions of the same tokens at the sites before one, as inputs of its predictor.

    Sites are visited in the order of the model, keys before values. Keys are those before rotation.

    Parameters
    ----------
    depth : int or None
        Layers below that are held; 0 for the keys of the same layer only, None if nothing is
        predicted.
    layers : sequence of Hashable
        What distinguishes the tokens of layers, windows for instance: the context is reset between
        neighbouring layers that differ in it.
    """

    def __init__(self, depth: int | None, layers: Sequence[Hashable]) -> None:
        self._depth = depth
        self._kinds = layers
        self._layers: list[list[Tensor]] = [[]]
        """Reconstructions of the current layer, then of those below."""

    def begin(self, index: int) -> None:
        """Begin a layer."""
        if not index or self._kinds[index] != self._kinds[index - 1]:
            self._layers = []
        self._layers = [[], *self._layers][: 1 + (self._depth or 0)]

    def add(self, x: Tensor) -> None:
        """Add the reconstruction of the next site, all heads side by side."""
        if self._depth is not None:
            self._layers[0].append(x)

    def of(self, inputs: Sequence[Input]) -> list[Tensor]:
        """Return the reconstructions of some inputs, as they were added."""
        return [self._layers[below][SITES.index(site)] for below, site in inputs]


def layers_below(layers: Sequence[Hashable], index: int) -> int:
    """Return how many layers right below a layer hold the same tokens.

    Parameters
    ----------
    layers : sequence of Hashable
        As in `PredictorContext`.
    index : int
        Of the layer.
    """
    count = 0
    while count < index and layers[index - count - 1] == layers[index]:
        count += 1
    return count


def index_of(site: int, one: Input) -> int:
    """Return the index of an input of a site, keys and values of all layers counted."""
    below, of_input = one
    return site - site % 2 - 2 * below + SITES.index(of_input)


def sources_of(
    site: int, inputs: Sequence[Input], sources: Sequence[frozenset[int]]
) -> frozenset[int]:
    """Return the sites whose latents a prediction depends on: its inputs, and what predicts these.

    Parameters
    ----------
    site : int
        Index of the predicted site, keys and values of all layers counted.
    inputs : sequence of Input
        Sites that it is predicted from.
    sources : sequence of frozenset of int
        Indices of the sites that each site before depends on: itself, and the sources of its
        prediction.
    """
    return frozenset().union(*(sources[index_of(site, one)] for one in inputs))


def stored_inputs(
    inputs: Sequence[tuple[Input, ...]], empty: Sequence[bool]
) -> list[tuple[Input, ...]]:
    """Return the inputs of all sites without those that nothing is stored of.

    Their reconstructions are constants, or predictions from other inputs.
    """
    return [
        tuple(one for one in of_site if not empty[index_of(site, one)])
        for site, of_site in enumerate(inputs)
    ]


def all_inputs(site: Site, depth: int) -> tuple[Input, ...]:
    """Return all sites of a layer and of `depth` layers below that come before a site."""
    same_layer: tuple[Input, ...] = ((0, "key"),) if site == "value" else ()
    lower = ((below, other) for below in range(1, depth + 1) for other in SITES)
    return same_layer + tuple(lower)
