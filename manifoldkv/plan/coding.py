"""How many bits each latent of a site is stored in, and what its codes stand for."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

import torch
from torch import Tensor

from manifoldkv.basis import equal
from manifoldkv.errors import PlanError
from manifoldkv.plan.quantization import PLANES

EXACT = 16
"""Bits of a latent that is stored as it is, in the dtype of the model."""
WIDEST = 8
"""Bits of a coded latent, at most."""
NORM_BYTES = 2
"""Of a token's norm, in float16."""


@dataclass(frozen=True, eq=False)
class Coding:
    """Bits per latent, with steps that are known beforehand.

    A latent y of a step s and b bits is stored as ``floor(y / s)``, clamped to
    ``[-2^(b - 1), 2^(b - 1) - 1]``, and given back as the middle of its interval: the uniform
    mid-rise quantiser; multiplied by a gain if there are some. A latent of 0 bits is not stored and
    given back as 0. One of 16 bits is stored and given back as it is, in the dtype of the model: it
    needs no step, gain or norm, and what it has of these is not used.

    Parameters
    ----------
    bits : Tensor
        Of every latent of a head group, (features,), uint8, falling: 16, or 8 down to 0.
    step : Tensor
        By head group and latent, (head groups, features), float32, positive.
    mean : Tensor or None
        What is taken from keys or values before they are projected, and added again, by head group,
        (head groups, w·d), float32; nothing if None.
    deviation : Tensor or None
        Root mean squares of the latents, (head groups, features), float32. With them a token's
        latents are divided by its norm, the root mean square of ``y / deviation`` over the latents
        that are coded, which is stored too, in float16; steps are those of what is left.
    gain : Tensor or None
        What is given back is multiplied by it: middles of wide intervals are too close to 0, and
        attention adds up what all tokens miss. (head groups, features), float32.
    prediction : Tensor or None
        Keys or values of a token are expected to be the mean and this times what the cache gives
        back of the same token elsewhere; only what is left is projected and stored. (inputs, w·d)
        for one head group, float32; inputs are all heads side by side of, first, the keys of the
        same layer (where values are expected), then the keys and the values of the layer below, of
        the one below that, and so on; keys before rotation.
    """

    bits: Tensor
    step: Tensor
    mean: Tensor | None = field(default=None, repr=False)
    deviation: Tensor | None = field(default=None, repr=False)
    gain: Tensor | None = field(default=None, repr=False)
    prediction: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.bits.dtype != torch.uint8 or self.bits.ndim != 1 or not len(self.bits):
            raise PlanError(f"bits of latents are (features,) in uint8, not {_said(self.bits)}")
        none = (self.bits > WIDEST) & (self.bits != EXACT)
        if bool(none.any()) or bool((self.bits.int().diff() > 0).any()):
            raise PlanError(f"bits of latents fall: {EXACT}, or at most {WIDEST}")
        shape = self.step.shape
        _check("steps", self.step, (*shape[:1], len(self.bits)))
        if not bool((self.step > 0).all()):
            raise PlanError("a step of a quantiser is not positive")
        if self.mean is not None:
            _check("means", self.mean, (*shape[:1], *self.mean.shape[1:2]))
        if self.deviation is not None:
            _check("deviations", self.deviation, tuple(shape))
            if not bool((self.deviation > 0).all()):
                raise PlanError("a deviation of a latent is not positive")
        if self.gain is not None:
            _check("gains", self.gain, tuple(shape))
        if self.prediction is not None:
            if self.mean is None or len(self.mean) != 1:
                raise PlanError("latents that are predicted have a mean, of one head group")
            _check("predictions", self.prediction, (*self.prediction.shape[:1], len(self.mean[0])))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Coding):
            return NotImplemented
        return (
            equal(self.bits, other.bits)
            and equal(self.step, other.step)
            and equal(self.mean, other.mean)
            and equal(self.deviation, other.deviation)
            and equal(self.gain, other.gain)
            and equal(self.prediction, other.prediction)
        )

    def __hash__(self) -> int:
        return hash(tuple(self.bits.tolist()))

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields by their names, those that are there."""
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
    def exact(self) -> int:
        """Return how many latents are stored as they are: the first ones."""
        return int((self.bits == EXACT).sum())

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a token in one head group of a model in a dtype.

        They are packed latents, those that are stored as they are, and its norm.
        """
        coded = self.bits[self.exact :]
        latents = sum(ceil(int((coded & plane > 0).sum()) * plane / 8) for plane in PLANES)
        exact = self.exact * dtype.itemsize
        return latents + exact + (NORM_BYTES if self.deviation is not None else 0)


def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape or tensor.ndim != 2 or tensor.dtype != torch.float32:
        raise PlanError(f"{name} of latents are {shape} in float32, not {_said(tensor)}")
    if not bool(tensor.isfinite().all()):
        raise PlanError(f"{name} of latents are not all finite")


def _said(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} in {tensor.dtype}"
