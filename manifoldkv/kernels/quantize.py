"""Rounding and packing of latents by a compiled kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType

import torch
from torch import Tensor

from manifoldkv.kernels.tables import Array, LatentTables


@dataclass(frozen=True, eq=False)
class QuantizerTables:
    """Numbers of a site's stored latents.

    Parameters
    ----------
    latents : LatentTables
        Positions of the integers.
    deviation, step, gain : Tensor
        As in `MixedWidths`, (r,) each.
    bytes_per_token : int
        Of the integers.
    """

    latents: LatentTables
    deviation: Tensor
    step: Tensor
    gain: Tensor
    bytes_per_token: int

    @cached_property
    def arrays(self) -> tuple[Array, Array]:
        """Return positions and numbers as NumPy arrays."""
        half = self.latents.centres + 0.5
        numbers = torch.stack([self.deviation, self.step, half, self.gain], dim=1)
        return self.latents.fields.numpy(), numbers.float().contiguous().numpy()


@cache
def _kernel() -> ModuleType:
    from manifoldkv.kernels import cpu_quantize

    return cpu_quantize


def project(x: Tensor, expected: Tensor, down: Tensor) -> Tensor:
    """Return the latents of a few tokens, (B, m, r), float32.

    Parameters
    ----------
    x : Tensor
        Keys or values with concatenated heads, (B, m, D), float32.
    expected : Tensor
        Expected ones, (1, D) or (B, m, D), float32.
    down : Tensor
        Projection by latent, (r, D), float32.
    """
    latents = torch.empty(*x.shape[:2], len(down))
    arrays = [y.flatten(0, -2).numpy() for y in (x, expected, down, latents)]
    _kernel().project(*arrays)
    return latents


def quantize(latents: Tensor, tables: QuantizerTables) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes, scales and reconstructions of latents.

    Parameters
    ----------
    latents : Tensor
        (B, m, r), float32, contiguous.
    tables : QuantizerTables
        Of the r latents.

    Returns
    -------
    tuple of Tensor
        Packed integers (B, bytes, m), uint8; scales (B, m), float16; reconstructions (B, m, r),
        float32.
    """
    batch, tokens, features = latents.shape
    codes = torch.zeros(batch, tables.bytes_per_token, tokens, dtype=torch.uint8)
    scales = torch.empty(batch * tokens)
    out = torch.empty(batch * tokens, features)
    flat = latents.reshape(batch * tokens, features).contiguous().numpy()
    _kernel().quantize(flat, *tables.arrays, codes.numpy(), scales.numpy(), out.numpy())
    return codes, scales.view(batch, tokens).half(), out.view(batch, tokens, features)
