"""Latents in mixed widths."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from manifoldkv.cache.storage import (
    GrowingTensor,
    Store,
    Tile,
    can_compile,
    check_latents,
    split_tiles,
)
from manifoldkv.coding.mixed import MixedWidths
from manifoldkv.coding.planes import BitPlanes
from manifoldkv.coding.scales import SMALLEST_SCALE, scale_codes, scales_of
from manifoldkv.kernels.decode import unpack
from manifoldkv.kernels.quantize import QuantizerTables, encode, quantize
from manifoldkv.kernels.tables import LatentTables
from manifoldkv.kernels.views import Packed, View


class WidthStore(Store):
    """Packed latents of several widths, tokens along the last dimension.

    The last byte of a token has its scale.

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
        self._codes = GrowingTensor(dim=3)  # (B, 1, bytes, n)
        self.parts = [self._codes]
        self._dtype = dtype
        self._stored, self._features = quantizer.stored, len(quantizer.bits)
        self._factor = (quantizer.step * quantizer.gain)[: self._stored].to(device)
        self._tables: LatentTables | None = None  # torch reconstructs latents
        if can_compile(dtype, device):
            self._tables = LatentTables.of_quantizer(quantizer)

    def __len__(self) -> int:
        return len(self._codes)

    @abstractmethod
    def _reconstruct(self, start: int, stop: int, out: Tensor) -> None:
        """Write the stored latents of some tokens to `out`, (B, 1, stored, m), by torch."""

    @abstractmethod
    def append_projected(self, x: Tensor, expected: Tensor, down: Tensor) -> Tensor:
        """Append a few tokens, and return their reconstructed latents that are stored.

        Parameters are as in `kernels.quantize.encode`.
        """

    def tiles(self, first: int, size: int) -> Iterator[Tile]:
        for start, stop in split_tiles(first, len(self), size):
            codes = self._codes.view
            x = codes.new_zeros(len(codes), 1, self._features, stop - start, dtype=self._dtype)
            if self._tables is None:
                self._reconstruct(start, stop, x[:, :, : self._stored])
            else:
                unpack(self.packed(start, stop), self._tables, self._factor, x[:, 0])
            yield start - first, stop - first, x.mT

    def append_packed(self, codes: Tensor) -> None:
        """Append packed tokens, (B, 1, bytes, m)."""
        self._codes.append(codes)

    def newest_packed(self, count: int) -> Tensor:
        """Return a view of the newest tokens, (B, 1, bytes, count)."""
        return self.visible(len(self) - count, len(self))

    def visible(self, start: int, stop: int) -> Tensor:
        """Return a view of some tokens, (B, 1, bytes, m)."""
        return self._codes.view[..., start:stop]

    def packed(self, start: int, stop: int) -> Packed:
        """Return some tokens as kernels take them; memory is shared."""
        batch, _, size, _ = self._codes.view.shape
        return Packed.of_view(self._codes.flat(start, stop - start), batch, size, stop - start)

    def _of_stored(self, latents: Tensor) -> Tensor:
        """Return the latents that are stored, (B, m, stored), float32, of those or of all."""
        alone = latents.shape[3] == self._stored
        check_latents(latents, 1, self._stored if alone else self._features)
        return latents[:, 0, :, : self._stored].float()

    def _allocate(self, size: int, batch: int, tokens: int, device: torch.device) -> None:
        """Append tokens (B, 1, size, m) that are to be written."""
        none = torch.empty(batch, 1, size, 0, dtype=torch.uint8, device=device)
        self._codes.extend(none, tokens)

    def _extend(self, size: int, batch: int, tokens: int) -> View:
        """Return new tokens (B, size, m) on a CPU, to be written."""
        first = len(self)
        self._allocate(size, batch, tokens, torch.device("cpu"))
        return self._codes.flat(first, tokens)


class MixedWidthStore(WidthStore):
    """Integers of mixed widths. Parameters are as in `WidthStore`."""

    def __init__(self, quantizer: MixedWidths, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(quantizer, dtype, device)
        stored = self._stored
        bits = quantizer.bits[:stored]
        self._planes = BitPlanes(bits.tolist(), device)
        self._half = (2 ** (bits.to(device, torch.int64) - 1)).float().unsqueeze(1)  # (stored, 1)
        self._step = quantizer.step[:stored].to(device).unsqueeze(1)  # (stored, 1)
        self._deviation = quantizer.deviation[:stored].to(device).unsqueeze(1)
        self._encoding: QuantizerTables | None = None
        if self._tables is not None:
            self._size = quantizer.nbytes(1, stored, 1)
            numbers = (quantizer.deviation[:stored], quantizer.step[:stored])
            gain = quantizer.gain[:stored]
            self._encoding = QuantizerTables(self._tables, *numbers, gain, self._size)

    def append(self, latents: Tensor) -> None:
        if self._encoding is not None:
            self.append_and_read(latents)
            return
        x = self._of_stored(latents).mT.unsqueeze(1)  # (B, 1, stored, m)
        scales = scale_codes((x / self._deviation).square().mean(dim=2, keepdim=True).sqrt())
        x = x / scales_of(scales).clamp(min=SMALLEST_SCALE)
        codes = (x / self._step).floor() + self._half
        codes = codes.clamp(min=0).minimum(2 * self._half - 1).to(torch.uint8)
        self._codes.append(torch.cat([self._planes.pack(codes), scales], dim=2))

    def append_and_read(self, latents: Tensor) -> Tensor:
        if self._encoding is None:
            return super().append_and_read(latents)
        stored = self._of_stored(latents)
        found = quantize(stored, self._encoding, self._extend(self._size, *stored.shape[:2]))
        found = functional.pad(found, (0, self._features - self._stored))
        return found.unsqueeze(1).to(self._dtype)

    def append_projected(self, x: Tensor, expected: Tensor, down: Tensor) -> Tensor:
        assert self._encoding is not None
        return encode(x, expected, down, self._encoding, self._extend(self._size, *x.shape[:2]))

    def _reconstruct(self, start: int, stop: int, out: Tensor) -> None:
        factor, middle = self._factor.to(self._dtype), (0.5 - self._half).to(self._dtype)
        packed = self.visible(start, stop)
        packed, scales = packed[:, :, :-1], packed[:, :, -1:]
        codes = torch.empty_like(out, dtype=torch.uint8)
        self._planes.unpack(packed, codes)
        out.copy_(codes).add_(middle).mul_(factor.unsqueeze(1))
        out.mul_(scales_of(scales).to(self._dtype))
