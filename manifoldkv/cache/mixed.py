"""Latents in mixed widths."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from manifoldkv.cache.planes import BitPlanes
from manifoldkv.cache.storage import GrowingTensor, Store, Tile, split_tiles
from manifoldkv.plan.coding import Coding


class MixedWidthStore(Store):
    """Latents of the bits that a coding gives them, tokens along the last dimension.

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
        stored = int((coding.bits > 0).sum())
        self._coded = coded = slice(coding.exact, stored)
        self._features = len(coding.bits)
        bits = coding.bits[coded]
        self._planes = BitPlanes(bits.tolist(), device)
        self._half = (2 ** (bits.to(device, torch.int64) - 1)).float().unsqueeze(1)  # (coded, 1)
        self._step = coding.step[:, coded].to(device).unsqueeze(2)  # (G, coded, 1)
        self._given_back = self._step
        if coding.gain is not None:
            self._given_back = self._step * coding.gain[:, coded].to(device).unsqueeze(2)
        self._dtype = dtype
        self._codes = GrowingTensor(dim=3)  # (B, G, bytes, n)
        self._norms = GrowingTensor(dim=3)  # (B, G, 1, n)
        self._exact = GrowingTensor(dim=3)  # (B, G, exact, n)
        self._deviation = None
        self.parts = [self._codes]
        if coding.deviation is not None:
            self._deviation = coding.deviation[:, coded].to(device).unsqueeze(2)
            self.parts.append(self._norms)
        if coding.exact:
            self.parts.append(self._exact)

    def __len__(self) -> int:
        return len(self._codes)

    def append(self, latents: Tensor) -> None:
        latents, coded = latents.mT, self._coded  # (B, G, features, m)
        if coded.start:
            self._exact.append(latents[:, :, : coded.start])
        x = latents[:, :, coded].float()
        if self._deviation is not None:
            norms = (x / self._deviation).square().mean(dim=2, keepdim=True).sqrt()
            norms = norms.clamp(max=torch.finfo(torch.float16).max).half()
            self._norms.append(norms)
            x = x / norms.float().clamp(min=torch.finfo(torch.float16).tiny)
        codes = (x / self._step).floor() + self._half
        codes = codes.clamp(min=0).minimum(2 * self._half - 1).to(torch.uint8)
        self._codes.append(self._planes.pack(codes))

    def tiles(self, first: int, size: int) -> Iterator[Tile]:
        step, middle = self._given_back.to(self._dtype), (0.5 - self._half).to(self._dtype)
        for start, stop in split_tiles(first, len(self), size):
            packed = self._codes.view[..., start:stop]
            shape = *packed.shape[:2], self._features, stop - start
            x = torch.empty(shape, dtype=self._dtype, device=packed.device)
            own = x[:, :, self._coded]
            codes = torch.empty_like(own, dtype=torch.uint8)
            self._planes.unpack(packed, codes)
            own.copy_(codes).add_(middle).mul_(step)
            if self._deviation is not None:
                own.mul_(self._norms.view[..., start:stop].to(self._dtype))
            if self._coded.start:
                x[:, :, : self._coded.start] = self._exact.view[..., start:stop]
            x[:, :, self._coded.stop :] = 0
            yield start - first, stop - first, x.mT
