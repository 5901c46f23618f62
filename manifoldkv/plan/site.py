"""Plan of the keys or of the values of one layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manifoldkv.core.basis import (
    ORTHONORMAL_TOLERANCE,
    Basis,
    HeadGrouping,
    equal,
    orthonormality_error,
)
from manifoldkv.core.errors import PlanError
from manifoldkv.plan.formats.mixed import MixedWidths
from manifoldkv.plan.formats.quantizer import Quantizer, check_numbers
from manifoldkv.plan.formats.quantizers import Unquantized, quantizer_from
from manifoldkv.plan.predictor import LinearPredictor, PredictorContext


@dataclass(frozen=True, eq=False)
class SitePlan:
    """Transform coding of the keys or values x of one layer: x ≈ e + up · Q(down · (x - e)).

    Parameters
    ----------
    basis : Basis
        `down` and `up`, float32 or float64, on the CPU.
    quantizer : Quantizer
        Q, the format of the latents.
    mean : Tensor or None
        (D,), float32, D being the features of all heads together; 0 if None. Only for a basis of
        all heads.
    predictor : LinearPredictor or None
        Expected x is e = mean + prediction from other sites; e = mean if None. Only for a basis of
        all heads, and keys before rotation.
    """

    basis: Basis
    quantizer: Quantizer = field(default_factory=Unquantized)
    mean: Tensor | None = field(default=None, repr=False)
    predictor: LinearPredictor | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SitePlan):
            return NotImplemented
        return (
            (self.basis, self.quantizer) == (other.basis, other.quantizer)
            and equal(self.mean, other.mean)
            and self.predictor == other.predictor
        )

    def __hash__(self) -> int:
        return hash((self.basis, self.quantizer))

    @property
    def grouping(self) -> HeadGrouping:
        """Return which heads share a basis."""
        return self.basis.grouping

    @property
    def rank(self) -> int:
        """Return the latents per token and KV head."""
        return self.basis.rank

    @property
    def head_dim(self) -> int:
        """Return the features of a head, d."""
        return self.basis.head_dim

    @property
    def features(self) -> int:
        """Return the features of all heads together, D."""
        return self.grouping.heads * self.head_dim

    @property
    def rank_only(self) -> bool:
        """Return whether the basis is all of it: nothing is quantised or subtracted."""
        plain = isinstance(self.quantizer, Unquantized)
        return plain and self.mean is None and self.predictor is None

    @property
    def packed(self) -> MixedWidths | None:
        """Return the quantizer if kernels attend to its packed latents, None otherwise."""
        return self.quantizer if isinstance(self.quantizer, MixedWidths) else None

    @property
    def of_all_heads(self) -> bool:
        """Return whether all heads share one basis."""
        return self.grouping.width == self.grouping.heads

    @property
    def latents(self) -> int:
        """Return the number of stored latents per token of a head group."""
        return self.quantizer.latents(self.basis.down.shape[2])

    @property
    def mean_bits(self) -> float:
        """Return the mean bits of an element, scales not counted; 16 for unquantised latents."""
        bits = self.quantizer.token_bits(self.basis.down.shape[2])
        return bits / self.basis.down.shape[1]

    def nbytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Return the bytes of the latents of `tokens` cached tokens of one sequence."""
        one = self.quantizer.nbytes(tokens, self.basis.down.shape[2], dtype.itemsize)
        return self._head_groups * one

    def bytes_per_token(self, dtype: torch.dtype) -> float:
        """Return the bytes that one more token of a long text takes."""
        one = self.quantizer.bytes_per_token(self.basis.down.shape[2], dtype.itemsize)
        return self._head_groups * one

    @property
    def _head_groups(self) -> int:
        return self.grouping.heads // self.grouping.width

    def expected(self, like: Tensor, context: PredictorContext | None = None) -> Tensor:
        """Return the expected keys or values, (D,) or (tokens, D).

        Parameters
        ----------
        like : Tensor
            Of the dtype and device to return.
        context : PredictorContext, optional
            Reconstructions of the sites before this one, (tokens, D) each.
        """
        mean = like.new_zeros(self.features) if self.mean is None else self.mean.to(like)
        if self.predictor is None:
            return mean
        assert context is not None  # the sites before are inputs
        return mean + self.predictor.predict(context.of(self.predictor.inputs)).to(like)

    def reconstruct(self, x: Tensor, context: PredictorContext | None = None) -> Tensor:
        """Return the reconstruction of keys or values, as the cache stores and reads them.

        Only for a basis of all heads together.

        Parameters
        ----------
        x : Tensor
            All heads side by side, (tokens, D); keys before rotation.
        context : PredictorContext, optional
            As in `expected`.

        Returns
        -------
        Tensor
            (tokens, D)
        """
        expected = self.expected(x, context)
        latents = (x - expected) @ self.basis.down[0].to(x)
        return self.quantizer.reconstruct(latents) @ self.basis.up[0].to(x).mT + expected

    def check(self, name: str, window: int | None) -> None:
        """Raise `PlanError` unless all parts fit each other and the window of a layer.

        Parameters
        ----------
        name : str
            Layer and site, for messages.
        window : int or None
            Sliding window of the layer, in tokens.
        """
        check_basis(name, self.basis)
        self.quantizer.check(name, self.basis, window)
        if self.mean is None and self.predictor is None:
            return
        if not self.of_all_heads:
            raise PlanError(f"{name}: means and predictors need a basis of all heads together")
        if self.mean is not None:
            check_numbers(f"{name}: mean", self.mean, (self.features,))
        if self.predictor is not None and self.predictor.features != self.features:
            raise PlanError(
                f"{name}: the predictor has {self.predictor.features} outputs, must be "
                f"{self.features}"
            )

    def describe(self) -> dict[str, Any]:
        """Return all that is no tensor."""
        predicted = {} if self.predictor is None else {"predictor": self.predictor.describe()}
        return predicted | {
            "grouping": self.grouping.name,
            "rank": self.rank,
            "orthonormal": self.basis.orthonormal,
            "quantizer": self.quantizer.describe(),
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name; `up` of an orthonormal basis is left out."""
        named = {"down": self.basis.down}
        if not self.basis.orthonormal:
            named["up"] = self.basis.up
        if self.mean is not None:
            named["mean"] = self.mean
        if self.predictor is not None:
            named |= self.predictor.tensors()
        return named | self.quantizer.tensors()

    @classmethod
    def of_parts(
        cls, description: dict[str, Any], tensors: dict[str, Tensor], kv_heads: int
    ) -> SitePlan:
        """Return the plan of a description and tensors, which are taken out of `tensors`.

        Parameters
        ----------
        description : dict
            From `describe`.
        tensors : dict of str to Tensor
            From `tensors`.
        kv_heads : int
            KV heads of the layer.

        Raises
        ------
        PlanError
            If the parts do not fit each other.
        KeyError
            If one is missing.
        """
        down = tensors.pop("down")
        up = down if description["orthonormal"] else tensors.pop("up")
        basis = Basis(down, up, HeadGrouping(description["grouping"], kv_heads))
        quantizer = quantizer_from(description["quantizer"], tensors)
        predictor = None
        if "predictor" in description:
            predictor = LinearPredictor.of_parts(description["predictor"], tensors)
        return cls(basis, quantizer, tensors.pop("mean", None), predictor)


def check_elements(name: str, tensor: Tensor) -> None:
    """Raise `PlanError` unless a tensor is finite, in float32 or float64."""
    if tensor.dtype not in (torch.float32, torch.float64):
        raise PlanError(f"{name}: dtype {tensor.dtype} is neither float32 nor float64")
    if not bool(tensor.isfinite().all()):
        raise PlanError(f"{name}: some elements are not finite")


def check_basis(name: str, basis: Basis) -> None:
    """Raise `PlanError` unless a basis fits its grouping and obeys the laws of its kind."""
    width, groups = basis.grouping.width, basis.grouping.groups
    for part in (basis.down, basis.up):
        check_elements(name, part)
        if part.ndim != 3 or part.shape != basis.down.shape:
            raise PlanError(f"{name}: a basis of shape {tuple(part.shape)}")
        size, columns = part.shape[1:]
        if part.shape[0] != groups or size % width or columns % width or not 0 < columns <= size:
            raise PlanError(
                f"{name}: shape {tuple(part.shape)} does not fit grouping {basis.grouping.name!r} "
                f"of {basis.grouping.heads} heads"
            )
    error = orthonormality_error(basis)
    if not error <= ORTHONORMAL_TOLERANCE:
        law = "PᵀP" if basis.orthonormal else "upᵀ down"
        raise PlanError(f"{name}: {law} is not the identity, largest difference {error:.1e}")
