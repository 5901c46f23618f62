"""Latents in mixed widths: bits, steps and reconstruction."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

import torch
from torch import Tensor

from manifoldkv.basis import Basis, equal
from manifoldkv.coding.integers import PLANES
from manifoldkv.errors import PlanError

WIDEST = 8
"""Most bits of a latent."""
LARGEST = 1e8
"""Magnitude of any number of a coding: products of a few must stay finite in float32."""
SCALE_BYTES = 2
"""Of a token's scale, in float16."""


@dataclass(frozen=True, eq=False)
class Coding:
    """Bits and steps of the latents of a site, in one basis of all heads.

    A token's latents y are divided by its scale, the root mean square of ``y / deviation`` over the
    stored latents, which is stored in float16. A scaled latent z of step s and b bits is stored as
    ``floor(z / s)``, clamped to ``[-2^(b - 1), 2^(b - 1) - 1]``, and reconstructed as the middle of
    its interval (the uniform mid-rise quantiser) times its gain and the scale of the token. A
    latent of 0 bits is not stored and reconstructed as 0.

    Parameters
    ----------
    bits : Tensor
        Of every latent, (features,), uint8, at most 8 and not increasing.
    step : Tensor
        (features,), float32, positive.
    mean : Tensor
        Subtracted from keys or values before projection, all heads side by side, (D,), float32.
    deviation : Tensor
        Root mean squares of the latents on calibration text, (features,), float32, positive.
    gain : Tensor
        Factors of reconstructed latents, (features,), float32: middles of wide intervals are too
        close to 0, and attention adds up the shrinkage of all tokens.
    prediction : Tensor or None
        Weights of a linear prediction, (inputs, D), float32. Keys or values are expected to be the
        mean and this times the reconstruction of the same token elsewhere; the rest is projected
        and stored. Inputs are all heads side by side of, first, the keys of the same layer (where
        values are predicted), then the keys and the values of the layer below, of the one below
        that, and so on; keys before rotation.

    Raises
    ------
    PlanError
        If a tensor has another shape or dtype, is not finite, or bits increase.
    """

    bits: Tensor
    step: Tensor
    mean: Tensor = field(repr=False)
    deviation: Tensor = field(repr=False)
    gain: Tensor = field(repr=False)
    prediction: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.bits.dtype != torch.uint8 or self.bits.ndim != 1 or not len(self.bits):
            raise PlanError(f"bits of latents must be (features,) in uint8, got {_said(self.bits)}")
        if bool((self.bits > WIDEST).any()) or bool((self.bits.int().diff() > 0).any()):
            raise PlanError(f"bits of latents must not increase, and be at most {WIDEST}")
        for name in ("step", "deviation", "gain"):
            _check(name, getattr(self, name), (len(self.bits),))
        for name in ("step", "deviation"):
            if not bool((getattr(self, name) > 0).all()):
                raise PlanError(f"the {name} of every latent must be positive")
        _check("mean", self.mean, (self.mean.numel(),))
        if self.prediction is not None:
            _check("prediction", self.prediction, (*self.prediction.shape[:1], len(self.mean)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Coding):
            return NotImplemented
        mine, its = self.tensors(), other.tensors()
        return mine.keys() == its.keys() and all(equal(mine[name], its[name]) for name in mine)

    def __hash__(self) -> int:
        return hash(tuple(self.bits.tolist()))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by the names of their fields."""
        named = {
            "bits": self.bits,
            "step": self.step,
            "mean": self.mean,
            "deviation": self.deviation,
            "gain": self.gain,
            "prediction": self.prediction,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def stored(self) -> int:
        """Return the number of latents with bits: the first ones."""
        return int((self.bits > 0).sum())

    @property
    def token_bytes(self) -> int:
        """Return the bytes of a token: packed latents and its scale."""
        return SCALE_BYTES + sum(
            ceil(int((self.bits & plane > 0).sum()) * plane / 8) for plane in PLANES
        )


def reconstructed(basis: Basis, coding: Coding, x: Tensor, inputs: Tensor | None = None) -> Tensor:
    """Return the reconstruction of keys or values, as the cache stores and reads them.

    Parameters
    ----------
    basis : Basis
        Of all heads together.
    coding : Coding
        Of its latents.
    x : Tensor
        All heads side by side, (tokens, D).
    inputs : Tensor, optional
        What the coding predicts from, (tokens, inputs); only for one with a prediction.

    Returns
    -------
    Tensor
        (tokens, D)
    """
    stored = coding.stored
    down, up = (part[0, :, :stored].to(x) for part in (basis.down, basis.up))
    expected = coding.mean.to(x)
    if coding.prediction is not None:
        assert inputs is not None
        expected = expected + inputs.to(x) @ coding.prediction.to(x)
    latents = (x - expected) @ down
    step, deviation, gain = (
        tensor[:stored].to(x) for tensor in (coding.step, coding.deviation, coding.gain)
    )
    half = (2 ** (coding.bits[:stored].long() - 1)).to(x)
    held = torch.finfo(torch.float16)
    scale = (latents / deviation).square().mean(dim=-1, keepdim=True).sqrt()
    scale = scale.clamp(max=held.max).half().to(x).clamp(min=held.tiny)
    codes = (latents / scale / step).floor().clamp(min=-half).minimum(half - 1)
    return ((codes + 0.5) * step * scale * gain) @ up.mT + expected


def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
        raise PlanError(f"{name} of latents must be {shape} in float32, got {_said(tensor)}")
    if not bool((tensor.abs() <= LARGEST).all()):  # nor NaN
        raise PlanError(f"{name} of latents must be finite, at most {LARGEST:g}")


def _said(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} in {tensor.dtype}"
