"""The contract of quantizers: formats in which the latents of a site are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from manifoldkv.basis import Basis, equal
from manifoldkv.errors import PlanError

LARGEST = 1e8
"""Bound of the numbers of a quantizer, mean or predictor: a product of a few is finite in
float32."""
LARGEST_INTEGER = 1 << 20
"""Bound of the integers in the description of a plan."""
SCALE_BYTES = 2
"""Bytes of a scale or an offset that is computed while decoding: float16."""


class Quantizer(ABC):
    """Format of the latents of a site: inherit in a frozen dataclass with ``eq=False``.

    Fields that are tensors are saved in the tensor file of a plan, the others in its description.
    """

    name: ClassVar[str]
    """Name in the description of a plan."""
    attended: ClassVar[bool] = True
    """Whether attention can read the stored latents; if not, a `Codec` decodes them."""
    variable_width: ClassVar[bool] = False
    """Whether latents differ in bits, so that a ratio compares bytes instead of elements."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Quantizer):
            return NotImplemented
        mine, others = self.tensors(), other.tensors()
        return self.describe() == other.describe() and all(
            equal(tensor, others[name]) for name, tensor in mine.items()
        )

    def __hash__(self) -> int:
        return hash(tuple(self.describe().items()))

    @abstractmethod
    def check(self, name: str, basis: Basis, window: int | None) -> None:
        """Raise `PlanError` unless the quantizer fits a basis and the window of a layer.

        Parameters
        ----------
        name : str
            Layer and site, for messages.
        basis : Basis
            Of the site.
        window : int or None
            Sliding window of the layer, in tokens.
        """

    @abstractmethod
    def reconstruct(self, latents: Tensor) -> Tensor:
        """Return the reconstruction of latents (..., n, features) once all n tokens are stored.

        Rounding has the gradient of the identity (the straight-through estimator).
        """

    def latents(self, features: int) -> int:
        """Return how many of a head group's latents are stored."""
        return features

    @property
    def is_empty(self) -> bool:
        """Return whether the latents of all tokens that it was fitted to are reconstructed as 0."""
        return False

    @abstractmethod
    def nbytes(self, tokens: int, features: int, itemsize: int) -> int:
        """Return the bytes of `tokens` tokens of one head group.

        Parameters
        ----------
        tokens : int
            Cached tokens of one sequence.
        features : int
            Latents of the head group.
        itemsize : int
            Bytes of an element in the dtype of the model.
        """

    def bytes_per_token(self, features: int, itemsize: int) -> float:
        """Return the bytes that one more token of a long text takes. Parameters as in `nbytes`."""
        return self.nbytes(1, features, itemsize)

    @abstractmethod
    def token_bits(self, features: int) -> float:
        """Return the bits of the latents of a token of one head group, scales not counted."""

    @property
    @abstractmethod
    def format(self) -> str:
        """Return the format in words, such as ``"mixed widths"``."""

    @property
    def run(self) -> int | None:
        """Return the tokens that are rounded together; None if every token is rounded alone.

        Runs exclude padded batches, crops, sliding windows and predictors.
        """
        return None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by field."""
        return {name: value for name, value in self._values() if isinstance(value, Tensor)}

    def describe(self) -> dict[str, Any]:
        """Return name and all fields that are no tensors."""
        numbers = {name: value for name, value in self._values() if not isinstance(value, Tensor)}
        return {"name": self.name} | numbers

    def _values(self) -> list[tuple[str, Any]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]  # type: ignore[arg-type]


def straight_through(exact: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded` with the gradient of `exact`."""
    return _StraightThrough.apply(exact, rounded)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def check_numbers(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise `PlanError` unless a tensor has a shape, is float32 and within ±`LARGEST`."""
    if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
        raise PlanError(
            f"{name} must be {shape} in float32, got {tuple(tensor.shape)} in {tensor.dtype}"
        )
    if not bool((tensor.abs() <= LARGEST).all()):  # nor NaN
        raise PlanError(f"{name} must be finite, at most {LARGEST:g}")


def check_coded(name: str, basis: Basis, latents: int) -> None:
    """Raise `PlanError` unless a basis of all heads together has a number of latents."""
    if basis.grouping.width != basis.grouping.heads:
        raise PlanError(f"{name}: latents of several widths need a basis of all heads together")
    if basis.down.shape[2] != latents:
        raise PlanError(
            f"{name}: a quantizer of {latents} latents does not fit a basis of shape "
            f"{tuple(basis.down.shape)}"
        )
