"""Latents in mixed widths: bits, steps and reconstruction."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from manifoldkv.core.basis import Basis
from manifoldkv.core.errors import PlanError
from manifoldkv.plan.formats.integers import PLANES
from manifoldkv.plan.formats.planes import BitPlanes
from manifoldkv.plan.formats.quantizer import (
    Quantizer,
    check_coded,
    check_numbers,
    straight_through,
)
from manifoldkv.plan.formats.scales import SMALLEST_SCALE, TOKEN_SCALE_BYTES, scale_codes, scales_of

WIDEST = 8
"""Most bits of a latent."""


@dataclass(frozen=True, eq=False)
class MixedWidths(Quantizer):
    """Bits and steps of the latents of a site, in one basis of all heads.

    A token's latents y are divided by its scale, the root mean square of ``y / deviation`` over the
    stored latents, which is stored in 8 bits. A scaled latent z of step s and b bits is stored as
    ``floor(z / s)``, clamped to ``[-2^(b - 1), 2^(b - 1) - 1]``, and reconstructed as the middle of
    its interval (the uniform mid-rise quantiser) times its gain and the scale of the token. A
    latent of 0 bits is not stored and reconstructed as 0.

    Parameters
    ----------
    bits : Tensor
        Bits of every latent, (features,), uint8, at most 8 and not increasing.
    step : Tensor
        (features,), float32, positive.
    deviation : Tensor
        Root mean squares of the latents on calibration text, (features,), float32, positive.
    gain : Tensor
        Factors of reconstructed latents, (features,), float32: middles of wide intervals are too
        close to 0, and attention adds up the shrinkage of all tokens.

    Raises
    ------
    PlanError
        If a tensor has another shape or dtype, is not finite, or bits increase.
    """

    name: ClassVar[str] = "mixed-widths"
    variable_width: ClassVar[bool] = True
    dtype_of_bits: ClassVar[torch.dtype] = torch.uint8

    bits: Tensor
    step: Tensor
    deviation: Tensor = field(repr=False)
    gain: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        bits = self.bits
        if bits.dtype != self.dtype_of_bits or bits.ndim != 1 or not len(bits):
            raise PlanError(
                f"bits of latents must be (features,) in {self.dtype_of_bits}, got "
                f"{tuple(bits.shape)} in {bits.dtype}"
            )
        possible = bool(((bits >= 0) & (bits <= WIDEST)).all())  # nor NaN
        if not possible or bool((bits.float().diff() > 0).any()):
            raise PlanError(f"bits of latents must not increase, and be at most {WIDEST}")
        for name in ("step", "deviation", "gain"):
            check_numbers(f"{name} of latents", getattr(self, name), (len(bits),))
        for name in ("step", "deviation"):
            if not bool((getattr(self, name) > 0).all()):
                raise PlanError(f"{name} of every latent must be positive")

    def check(self, name: str, basis: Basis, window: int | None) -> None:
        check_coded(name, basis, len(self.bits))

    @property
    def format(self) -> str:
        return "mixed widths"

    @property
    def stored(self) -> int:
        """Return the number of latents with bits: the first ones."""
        return int((self.bits > 0).sum())

    def layout(self) -> tuple[Tensor, Tensor]:
        """Return where kernels find the stored latents: fields and centres of `LatentTables`."""
        bits = self.bits[: self.stored].cpu()
        fields = BitPlanes(bits.tolist(), bits.device).fields()
        return fields, 2.0 ** (bits.float() - 1) - 0.5

    def latents(self, features: int) -> int:
        return self.stored

    @property
    def is_empty(self) -> bool:
        return not self.stored

    def reconstruct(self, latents: Tensor) -> Tensor:
        stored = self.stored
        x = latents[..., :stored]
        step, deviation = self.step[:stored].to(x), self.deviation[:stored].to(x)
        gain = self.gain[:stored].to(x)
        half = (2 ** (self.bits[:stored].long() - 1)).to(x)
        scale = (x / deviation).square().mean(dim=-1, keepdim=True).sqrt()
        scale = straight_through(scale, scales_of(scale_codes(scale)).to(x))
        scale = scale.clamp(min=SMALLEST_SCALE)
        scaled = x / scale / step
        codes = straight_through(scaled, scaled.floor()).clamp(min=-half).minimum(half - 1)
        found = (codes + 0.5) * step * scale * gain
        return torch.cat([found, torch.zeros_like(latents[..., stored:])], dim=-1)

    def nbytes(self, tokens: int, features: int, itemsize: int) -> int:
        planes = (ceil(int((self.bits & plane > 0).sum()) * plane / 8) for plane in PLANES)
        return tokens * (TOKEN_SCALE_BYTES + sum(planes))

    def token_bits(self, features: int) -> float:
        return float(self.bits.float().sum())
