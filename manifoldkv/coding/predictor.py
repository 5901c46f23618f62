"""Linear prediction of keys and values from reconstructions of the same tokens."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from manifoldkv.basis import Site, equal
from manifoldkv.coding.quantizer import check_numbers
from manifoldkv.errors import PlanError


@dataclass(frozen=True, eq=False)
class LinearPredictor:
    """Weights of a linear prediction of the keys or values of a layer.

    Parameters
    ----------
    weights : Tensor
        (inputs, D), float32, D being the features of all heads together. Inputs are those of a
        `PredictorContext`, or its first ones.

    Raises
    ------
    PlanError
        If the weights are no such matrix, or not finite.
    """

    weights: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        if self.weights.ndim != 2 or not self.weights.numel():
            raise PlanError(
                f"predictor must be (inputs, features), got {tuple(self.weights.shape)}"
            )
        check_numbers("predictor", self.weights, tuple(self.weights.shape))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LinearPredictor):
            return NotImplemented
        return equal(self.weights, other.weights)

    def __hash__(self) -> int:
        return hash(self.weights.shape)

    @property
    def depth(self) -> int:
        """Return how many layers below are inputs."""
        inputs, features = self.weights.shape
        return inputs // (2 * features)

    def predict(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the prediction of tokens, (tokens, D).

        Parameters
        ----------
        inputs : sequence of Tensor
            `PredictorContext.inputs`, (tokens, D) each.
        """
        joined = torch.cat(list(inputs), dim=1)[:, : len(self.weights)]
        return joined @ self.weights.to(joined)

    def check(self, name: str, site: Site, layers_below: int) -> None:
        """Raise `PlanError` unless the inputs are whole layers that hold the same tokens.

        Parameters
        ----------
        name : str
            Layer and site, for messages.
        site : {"key", "value"}
            Predicted site.
        layers_below : int
            `layers_below` of the layer.
        """
        inputs, features = self.weights.shape
        own_keys = features if site == "value" else 0
        if inputs not in [own_keys + 2 * features * depth for depth in range(layers_below + 1)]:
            raise PlanError(
                f"{name}: predictor has {inputs} inputs, must be keys and values of at most "
                f"{layers_below} layers below, {2 * features} each"
                f"{f', and the {own_keys} keys of the layer' if own_keys else ''}"
            )


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
        self._layers = layers
        self._has_keys = False
        self.inputs: list[Tensor] = []
        """Keys of the same layer, if the next site is one of values; then keys and values of the
        layer below, and of those below that."""

    def begin(self, index: int) -> None:
        """Begin a layer."""
        self._has_keys = False
        if not index or self._layers[index] != self._layers[index - 1]:
            self.inputs = []

    def add(self, x: Tensor) -> None:
        """Add the reconstruction of the next site, all heads side by side."""
        if self._depth is None:
            return
        if not self._has_keys:
            self._has_keys, self.inputs = True, [x, *self.inputs]
            return
        keys, *older = self.inputs
        self.inputs = [keys, x, *older][: 2 * self._depth]


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
