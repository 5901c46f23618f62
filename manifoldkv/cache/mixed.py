"""Latents in mixed widths."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from manifoldkv.cache.storage import GrowingTensor, Store, Tile, split_tiles
from manifoldkv.coding.mixed import MixedWidths
from manifoldkv.coding.planes import BitPlanes
from manifoldkv.coding.scales import SMALLEST_SCALE, TOKEN_SCALE_BYTES, scale_codes, scales_of
from manifoldkv.kernels.decode import is_available
from manifoldkv.kernels.quantize import QuantizerTables, encode, quantize
from manifoldkv.kernels.tables import LatentTables
from manifoldkv.kernels.views import Packed, View


class WidthStore(Store):
    """Packed latents of several widths and scales of tokens, tokens along the last dimension."""

    def __init__(self) -> None:
        self._codes = GrowingTensor(dim=3)  # (B, 1, bytes, n)
        self._scales = GrowingTensor(dim=3)  # (B, 1, 1, n)
        self.parts = [self._codes, self._scales]

    def __len__(self) -> int:
        return len(self._codes)

    @abstractmethod
    def append_projected(self, x: Tensor, expected: Tensor, down: Tensor) -> Tensor:
        """Append a few tokens, and return their reconstructed latents that are stored.

        Parameters are as in `kernels.quantize.encode`.
        """

    def append_packed(self, codes: Tensor, scales: Tensor) -> None:
        """Append packed tokens, codes (B, 1, bytes, m) and scales (B, 1, 1, m)."""
        self._codes.append(codes)
        self._scales.append(scales)

    def newest_packed(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the newest tokens, codes (B, 1, bytes, count) and scales (B, 1, 1, count)."""
        return self.visible(len(self) - count, len(self))

    def visible(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return views of some tokens, codes (B, 1, bytes, m) and scales (B, 1, 1, m)."""
        return self._codes.view[..., start:stop], self._scales.view[..., start:stop]

    def packed(self, start: int, stop: int) -> Packed:
        """Return some tokens as kernels take them; memory is shared."""
        return Packed(self._codes.flat(start), self._scales.flat(start), stop - start)

    def _allocate(self, size: int, batch: int, tokens: int, device: torch.device) -> None:
        """Append tokens with codes (B, 1, size, m) that are to be written."""
        none = torch.empty(batch, 1, 1, 0, dtype=torch.uint8, device=device)
        self._codes.extend(none.expand(batch, 1, size, 0), tokens)
        self._scales.extend(none, tokens)

    def _extend(self, size: int, batch: int, tokens: int) -> tuple[View, View]:
        """Return codes (B, size, m) and scales (B, 1, m) of new tokens on a CPU, to be written."""
        first = len(self)
        self._allocate(size, batch, tokens, torch.device("cpu"))
        return self._codes.flat(first), self._scales.flat(first)


class MixedWidthStore(WidthStore):
    """Integers of mixed widths.

    Parameters
    ----------
    quantizer : MixedWidths
        Bits and steps.
    dtype : torch.dtype
        In which latents are reconstructed.
    device : torch.device
        Of the layer.
    """

    def __init__(self, quantizer: MixedWidths, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._stored = stored = quantizer.stored
        self._features = len(quantizer.bits)
        bits = quantizer.bits[:stored]
        self._planes = BitPlanes(bits.tolist(), device)
        self._half = (2 ** (bits.to(device, torch.int64) - 1)).float().unsqueeze(1)  # (stored, 1)
        self._step = quantizer.step[:stored].to(device).unsqueeze(1)  # (stored, 1)
        self._deviation = quantizer.deviation[:stored].to(device).unsqueeze(1)
        self._factor = self._step * quantizer.gain[:stored].to(device).unsqueeze(1)
        self._dtype = dtype
        self._tables: QuantizerTables | None = None
        if device.type == "cpu" and dtype == torch.float32 and is_available():
            latents = LatentTables.of(self._planes, bits)
            self._size = quantizer.nbytes(1, stored, 1) - TOKEN_SCALE_BYTES
            numbers = (quantizer.deviation[:stored], quantizer.step[:stored])
            self._tables = QuantizerTables(latents, *numbers, quantizer.gain[:stored], self._size)

    def append(self, latents: Tensor) -> None:
        if self._tables is not None:
            self.append_and_read(latents)
            return
        x = latents.mT[:, :, : self._stored].float()  # (B, 1, stored, m)
        scales = scale_codes((x / self._deviation).square().mean(dim=2, keepdim=True).sqrt())
        self._scales.append(scales)
        x = x / scales_of(scales).clamp(min=SMALLEST_SCALE)
        codes = (x / self._step).floor() + self._half
        codes = codes.clamp(min=0).minimum(2 * self._half - 1).to(torch.uint8)
        self._codes.append(self._planes.pack(codes))

    def append_and_read(self, latents: Tensor) -> Tensor:
        if self._tables is None:
            return super().append_and_read(latents)
        stored = latents[:, 0, :, : self._stored].float()
        found = quantize(stored, self._tables, *self._extend(self._size, *stored.shape[:2]))
        found = functional.pad(found, (0, self._features - self._stored))
        return found.unsqueeze(1).to(self._dtype)

    def append_projected(self, x: Tensor, expected: Tensor, down: Tensor) -> Tensor:
        assert self._tables is not None
        return encode(x, expected, down, self._tables, *self._extend(self._size, *x.shape[:2]))

    def tiles(self, first: int, size: int) -> Iterator[Tile]:
        factor, middle = self._factor.to(self._dtype), (0.5 - self._half).to(self._dtype)
        for start, stop in split_tiles(first, len(self), size):
            packed = self._codes.view[..., start:stop]
            shape = *packed.shape[:2], self._features, stop - start
            x = torch.empty(shape, dtype=self._dtype, device=packed.device)
            stored = x[:, :, : self._stored]
            codes = torch.empty_like(stored, dtype=torch.uint8)
            self._planes.unpack(packed, codes)
            stored.copy_(codes).add_(middle).mul_(factor)
            stored.mul_(scales_of(self._scales.view[..., start:stop]).to(self._dtype))
            x[:, :, self._stored :] = 0
            yield start - first, stop - first, x.mT
