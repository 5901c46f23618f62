"""All quantizers by name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor

from manifoldkv.core.basis import Basis
from manifoldkv.core.errors import PlanError
from manifoldkv.plan.formats.entropy import EntropyCoded
from manifoldkv.plan.formats.integers import StaticIntegers, TokenIntegers
from manifoldkv.plan.formats.mixed import MixedWidths
from manifoldkv.plan.formats.quantizer import LARGEST_INTEGER, Quantizer
from manifoldkv.plan.formats.trellis import TrellisCoded


@dataclass(frozen=True, eq=False)
class Unquantized(Quantizer):
    """Latents in the dtype of the model."""

    name: ClassVar[str] = "unquantized"

    def check(self, name: str, basis: Basis, window: int | None) -> None:
        return

    @property
    def format(self) -> str:
        return "unquantised"

    def reconstruct(self, latents: Tensor) -> Tensor:
        return latents

    def nbytes(self, tokens: int, features: int, itemsize: int) -> int:
        return tokens * features * itemsize

    def token_bits(self, features: int) -> float:
        return 16.0 * features


QUANTIZERS: dict[str, type[Quantizer]] = {
    kind.name: kind
    for kind in (
        Unquantized,
        StaticIntegers,
        TokenIntegers,
        MixedWidths,
        TrellisCoded,
        EntropyCoded,
    )
}


def quantizer_from(description: dict[str, Any], tensors: dict[str, Tensor]) -> Quantizer:
    """Return the quantizer of a description and tensors, which are taken out of `tensors`.

    Parameters
    ----------
    description : dict
        From `Quantizer.describe`.
    tensors : dict of str to Tensor
        Those of `Quantizer.tensors`, and others.

    Raises
    ------
    PlanError
        If the name is unknown, a field is missing or unknown, or a number is not an integer
        in its bounds.
    """
    arguments = dict(description)
    name = arguments.pop("name")
    if name not in QUANTIZERS:
        raise PlanError(f"unknown quantizer {name!r}; known: {', '.join(QUANTIZERS)}")
    for field, value in arguments.items():
        if type(value) is not int or not 0 <= value <= LARGEST_INTEGER:
            raise PlanError(
                f"{field} of quantizer {name} must be an integer in [0, {LARGEST_INTEGER}], got "
                f"{value!r}"
            )
    kind = QUANTIZERS[name]
    for part in fields(kind):  # type: ignore[arg-type]
        if part.type == "Tensor":
            arguments[part.name] = tensors.pop(part.name)
    return kind(**arguments)
