"""The bases of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.basis import (
    ORTHONORMAL_TOLERANCE,
    Basis,
    Site,
    equal,
    orthonormality_error,
)
from manifoldkv.coding.entropy import EntropyCoding
from manifoldkv.coding.integers import SCALE_BYTES, Quantization
from manifoldkv.coding.mixed import Coding
from manifoldkv.commuting import check_commuting
from manifoldkv.errors import PlanError
from manifoldkv.models.support import (
    attention_of,
    cached_tokens,
    decoder_layers,
    sliding_windows,
)


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """Bases of one layer.

    Parameters
    ----------
    key, value : Basis
        float32 or float64, on the CPU.
    window : int or None
        Sliding window of the layer, in tokens; it caches ``window - 1`` of them.
    key_range : Tensor or None
        Smallest and largest key latent per head group and group of features,
        (head groups, feature groups, 2); only for a plan in the static layout.
    key_coding, value_coding : Coding, EntropyCoding or None
        Bits of every latent, or tables of the symbols that they are stored as; in the dtype of the
        model if None.
    """

    key: Basis
    value: Basis
    window: int | None = None
    key_range: Tensor | None = field(default=None, repr=False)
    key_coding: Coding | EntropyCoding | None = None
    value_coding: Coding | EntropyCoding | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayerPlan):
            return NotImplemented
        same_bases = self.key == other.key and self.value == other.value
        same_codes = (self.key_coding, self.value_coding) == (other.key_coding, other.value_coding)
        same_ranges = equal(self.key_range, other.key_range)
        return same_bases and same_codes and same_ranges and self.window == other.window

    def __hash__(self) -> int:
        return hash((self.key, self.value, self.window))

    @property
    def sites(self) -> tuple[tuple[Site, Basis], tuple[Site, Basis]]:
        """Return both sites with their bases."""
        return ("key", self.key), ("value", self.value)

    @property
    def codings(self) -> dict[Site, Coding]:
        """Return the bits of latents of the sites that have some."""
        return {site: coding for site, coding in self._codings if isinstance(coding, Coding)}

    @property
    def entropy_codings(self) -> dict[Site, EntropyCoding]:
        """Return the tables of symbols of the sites that have some."""
        return {site: coding for site, coding in self._codings if isinstance(coding, EntropyCoding)}

    def coding(self, site: Site) -> Coding | EntropyCoding | None:
        """Return the coding of a site, of whichever kind."""
        return self.key_coding if site == "key" else self.value_coding

    @property
    def _codings(self) -> tuple[tuple[Site, Coding | EntropyCoding | None], ...]:
        return ("key", self.key_coding), ("value", self.value_coding)

    @property
    def mean_bits(self) -> dict[Site, float]:
        """Return the mean bits of an element of keys and of values, norms left out.

        Latents without a coding count as 16 bits.
        """
        return {site: self._bits(site, basis) / basis.down.shape[1] for site, basis in self.sites}

    def _bits(self, site: Site, basis: Basis) -> float:
        if site in self.codings:
            return float(self.codings[site].bits.float().sum())
        if site in self.entropy_codings:
            return self.entropy_codings[site].token_bits
        return 16.0 * basis.down.shape[2]

    def cached_tokens(self, tokens: int) -> int:
        """Return how many of `tokens` tokens seen the layer caches."""
        return cached_tokens(tokens, self.window)

    def sink_tokens(self, sinks: int) -> int:
        """Return how many of the `sinks` first tokens of a text are kept beside their latents.

        None of them in a layer with a window, which they leave.
        """
        return sinks if self.window is None else 0

    def elements(self, tokens: int, sinks: int = 0) -> int:
        """Return the elements cached of `tokens` tokens of one sequence."""
        projected = self.cached_tokens(tokens) * (self.key.rank + self.value.rank)
        uncompressed = min(tokens, self.sink_tokens(sinks)) * 2 * self.key.head_dim
        return self.key.grouping.heads * (uncompressed + projected)

    def full_elements(self, tokens: int) -> int:
        """Return the elements that the uncompressed model caches of `tokens` tokens."""
        return self.cached_tokens(tokens) * 2 * self.key.grouping.heads * self.key.head_dim


def site_nbytes(
    basis: Basis,
    site: Site,
    tokens: int,
    dtype: torch.dtype,
    quantization: Quantization | None,
    coding: Coding | EntropyCoding | None,
) -> int:
    """Return the bytes of the latents of `tokens` cached tokens of one sequence at one site."""
    if isinstance(coding, EntropyCoding):
        return ceil(tokens * coding.token_bits / 8)
    if coding is not None:
        return tokens * coding.token_bytes
    if quantization is None:
        return tokens * _elements_per_token(basis) * dtype.itemsize
    groups = basis.grouping.heads // basis.grouping.width
    features = basis.rank * basis.grouping.width
    exact = quantization.exact_tokens(tokens)
    rounded = tokens - exact
    codes = rounded * quantization.code_bytes(features)
    if site == "value" or quantization.layout == "token":
        ranges = rounded * quantization.groups(features)
    elif quantization.layout == "kivi":
        ranges = rounded // quantization.group_size * features
    else:
        ranges = 0  # static: constant bytes, part of the plan
    return groups * (codes + ranges * 2 * SCALE_BYTES + exact * features * dtype.itemsize)


def _elements_per_token(basis: Basis) -> int:
    """Return the elements cached per token, of all heads."""
    return basis.rank * basis.grouping.heads


def parts(basis: Basis) -> list[Tensor]:
    """Return the tensors that are stored of a basis: one if it is orthonormal, else two."""
    return [basis.down] if basis.orthonormal else [basis.down, basis.up]


def check_coding(name: str, basis: Basis, coding: Coding | EntropyCoding) -> None:
    """Raise `PlanError` unless a coding is one of the latents of a basis of all heads."""
    if basis.grouping.width != basis.grouping.heads:
        raise PlanError(f"{name}: coded latents need a basis of all heads together")
    if basis.down.shape[1:] != (len(coding.mean), len(coding.gain)):
        raise PlanError(
            f"{name}: a coding of {len(coding.mean)} features and {len(coding.gain)} latents does "
            f"not fit a basis of shape {tuple(basis.down.shape)}"
        )


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
    check_commuting(name, basis)


def check_layers(layers: Sequence[LayerPlan], model: PreTrainedModel) -> None:
    """Raise `PlanError` unless layers have the windows and sizes of those of a model."""
    heads = model.config.get_text_config().num_key_value_heads
    of_model = zip(sliding_windows(model.config), decoder_layers(model), strict=True)
    for index, (layer, (window, module)) in enumerate(zip(layers, of_model, strict=True)):
        if layer.window != window:
            raise PlanError(
                f"layer {index} has a window of {layer.window} tokens in the plan, {window} in the "
                "model: make the plan again for this model"
            )
        found = layer.key.grouping.heads, layer.key.head_dim
        expected = heads, attention_of(module).head_dim
        if found != expected:
            raise PlanError(
                f"layer {index} has {found[0]} KV heads of {found[1]} in the plan, {expected[0]} "
                f"of {expected[1]} in the model: make the plan again for this model"
            )
