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
        In which latents are given back. Those of 16 bits are stored as they come.
    device : torch.device
        Of the layer.
    """

    def __init__(self, coding: Coding, dtype: torch.dtype, device: torch.device) -> None:
        self._runs = coding.runs
        self._stored = coding.exact + sum(count for _, count in self._runs)
        self._features = len(coding.bits)
        self._coded = coded = slice(coding.exact, self._stored)
        bits = coding.bits[coded].to(device, torch.int64)
        self._half = (2 ** (bits - 1)).float()  # (coded,)
        self._step = coding.step[:, coded].to(device).unsqueeze(1)  # (G, 1, coded)
        self._given_back = self._step
        if coding.gain is not None:
            self._given_back = self._step * coding.gain[:, coded].to(device).unsqueeze(1)
        self._dtype = dtype
        self._codes = GrowingTensor()  # (B, G, n, bytes)
        self._norms = GrowingTensor()  # (B, G, n, 1)
        self._exact = GrowingTensor()  # (B, G, n, exact)
        self._deviation = None
        self.parts = [self._codes]
        if coding.deviation is not None:
            self._deviation = coding.deviation[:, coded].to(device).unsqueeze(1)
            self.parts.append(self._norms)
        if coding.exact:
            self.parts.append(self._exact)

    def __len__(self) -> int:
        return len(self._codes)

    def append(self, latents: Tensor) -> None:
        coded = self._coded
        if coded.start:
            self._exact.append(latents[..., : coded.start])
        x = latents[..., coded].float()
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
            if self._coded.start:
                exact = self._exact.view[:, :, start:stop].to(self._dtype)
                x = torch.cat([exact, x], dim=-1)
            yield (
                start - first,
                stop - first,
                functional.pad(x, (0, self._features - self._stored)),
            )

    def _packed(self, codes: Tensor) -> Tensor:
        """Return codes (B, G, m, coded) as bytes, run by run."""
        runs = codes.split([count for _, count in self._runs], dim=-1)
        parts = [pack(run, bits) for (bits, _), run in zip(self._runs, runs, strict=True)]
        return torch.cat(parts, dim=-1) if parts else codes

    def _unpacked(self, packed: Tensor) -> Tensor:
        """Return the codes that `_packed` was given."""
        runs = packed.split([packed_bytes(count, bits) for bits, count in self._runs], dim=-1)
        parts = [unpack(run, *of_run) for run, of_run in zip(runs, self._runs, strict=True)]
        return torch.cat(parts, dim=-1) if parts else packed
