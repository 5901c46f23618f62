"""Rounding and packing of latents by a compiled kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType

import torch
from torch import Tensor

from manifoldkv.kernels.tables import LatentTables
from manifoldkv.kernels.views import Array, View, check_shape, check_view


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
        Of the integers and the scale.
    """

    latents: LatentTables
    deviation: Tensor
    step: Tensor
    gain: Tensor
    bytes_per_token: int

    @cached_property
    def arrays(self) -> tuple[Array, Array, int]:
        """Return positions and numbers as NumPy arrays, and the bytes of a token."""
        half = self.latents.centres + 0.5
        numbers = torch.stack([self.deviation, self.step, half, self.gain], dim=1)
        numbers = numbers.float().contiguous()
        return self.latents.fields.numpy(), numbers.numpy(), self.bytes_per_token


@cache
def _kernels() -> ModuleType:
    from manifoldkv.kernels import cpu_quantize

    return cpu_quantize


def encode(
    x: Tensor, expected: Tensor, down: Tensor, tables: QuantizerTables, codes: View
) -> Tensor:
    """Project and quantize a few tokens, and return their reconstructed latents, (B, m, r).

    Parameters
    ----------
    x : Tensor
        Keys or values with concatenated heads, (B, m, D), float32.
    expected : Tensor
        Expected ones, (1, D) or (B, m, D), float32.
    down : Tensor
        Projection by latent, (r, D), float32.
    tables : QuantizerTables
        Of the r latents.
    codes : View
        Of packed integers and codes of scales (B, bytes, m), uint8, which are written.
    """
    batch, tokens, features = x.shape
    out = torch.empty(batch, tokens, len(down))
    _check(out, tables, codes)
    check_shape("projections", down.shape, len(down), features)
    means = _rows(expected)
    check_shape("expected ones", means.shape, 1 if len(means) == 1 else batch * tokens, features)
    arrays = _rows(x), means, down.numpy(), tokens, tables.arrays
    _kernels().encode(*arrays, codes, _rows(out))
    return out


def quantize(latents: Tensor, tables: QuantizerTables, codes: View) -> Tensor:
    """Quantize latents (B, m, r), float32, and return their reconstructions.

    Other parameters are as in `encode`.
    """
    out = torch.empty_like(latents, memory_format=torch.contiguous_format)
    _check(latents, tables, codes)
    arrays = _rows(latents), latents.shape[1], tables.arrays
    _kernels().quantize(*arrays, codes, _rows(out))
    return out


def _check(latents: Tensor, tables: QuantizerTables, codes: View) -> None:
    """Raise `CacheError` unless latents (B, m, r) and codes fit the tables."""
    batch, tokens, count = latents.shape
    check_shape("latents", (count,), len(tables.deviation))
    check_view("codes", codes, batch, tables.bytes_per_token, tokens)


def _rows(x: Tensor) -> Array:
    """Return the rows of x (…, features)."""
    return x.flatten(0, -2).contiguous().numpy()
