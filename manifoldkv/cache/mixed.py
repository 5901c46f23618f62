"""Latents in mixed widths."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from manifoldkv.cache.packed import pack, unpack
from manifoldkv.cache.storage import GrowingTensor, Store, Tile, split_tiles
from manifoldkv.plan.coding import Coding
from manifoldkv.plan.quantization import packed_bytes


class MixedWidthStore(Store):
    """Latents of the bits that a coding gives them.

    Parameters
    ----------
    coding : Coding
        Bits and steps.
    dtype : torch.dtype
        In which latents are given back.
    device : torch.device
        Of the layer.
    """

    def __init__(self, coding: Coding, dtype: torch.dtype, device: torch.device) -> None:
        self._runs = coding.runs
        self._stored = sum(count for _, count in self._runs)
        self._features = len(coding.bits)
        bits = coding.bits[: self._stored].to(device, torch.int64)
        self._half = (2 ** (bits - 1)).float()  # (stored,)
        self._step = coding.step[:, : self._stored].to(device).unsqueeze(1)  # (G, 1, stored)
        self._given_back = self._step
        if coding.gain is not None:
            self._given_back = self._step * coding.gain[:, : self._stored].to(device).unsqueeze(1)
        self._dtype = dtype
        self._codes = GrowingTensor()  # (B, G, n, bytes)
        self._norms = GrowingTensor()  # (B, G, n, 1)
        self._deviation = None
        self.parts = [self._codes]
        if coding.deviation is not None:
            self._deviation = coding.deviation[:, : self._stored].to(device).unsqueeze(1)
            self.parts.append(self._norms)

    def __len__(self) -> int:
        return len(self._codes)

    def append(self, latents: Tensor) -> None:
        x = latents[..., : self._stored].float()
        if self._deviation is not None:
            norms = (x / self._deviation).square().mean(dim=-1, keepdim=True).sqrt().half()
            self._norms.append(norms)
            x = x / norms.float().clamp(min=torch.finfo(torch.float16).tiny)
        codes = (x / self._step).floor() + self._half
        codes = codes.clamp(min=0).minimum(2 * self._half - 1).to(torch.uint8)
        self._codes.append(self._packed(codes))

    def tiles(self, first: int, size: int) -> Iterator[Tile]:
        packed = self._codes.view
        step, middle = self._given_back.to(self._dtype), (0.5 - self._half).to(self._dtype)
        for start, stop in split_tiles(first, len(self), size):
            x = (self._unpacked(packed[:, :, start:stop]).to(self._dtype) + middle) * step
            if self._deviation is not None:
                x = x * self._norms.view[:, :, start:stop].to(self._dtype)
            yield (
                start - first,
                stop - first,
                functional.pad(x, (0, self._features - self._stored)),
            )

    def _packed(self, codes: Tensor) -> Tensor:
        """Return codes (B, G, m, stored) as bytes, run by run."""
        runs = codes.split([count for _, count in self._runs], dim=-1)
        parts = [pack(run, bits) for (bits, _), run in zip(self._runs, runs, strict=True)]
        return torch.cat(parts, dim=-1) if parts else codes

    def _unpacked(self, packed: Tensor) -> Tensor:
        """Return the codes that `_packed` was given."""
        runs = packed.split([packed_bytes(count, bits) for bits, count in self._runs], dim=-1)
        parts = [unpack(run, *of_run) for run, of_run in zip(runs, self._runs, strict=True)]
        return torch.cat(parts, dim=-1) if parts else packed
