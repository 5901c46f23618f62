"""Store of trellis-coded latents."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from manifoldkv.cache.mixed import WidthStore
from manifoldkv.cache.storage import Tile, split_tiles
from manifoldkv.coding.scales import NAN_SHORT, short_scales
from manifoldkv.coding.trellis import TrellisCoded, codebooks, state_fields
from manifoldkv.kernels.views import flat_view


class TrellisStore(WidthStore):
    """Streams of bits of trellis-coded latents.

    Parameters
    ----------
    quantizer : TrellisCoded
        Bits and steps.
    dtype : torch.dtype
        In which latents are reconstructed.
    device : torch.device
        Of the layer. Bits are searched for on a CPU in any case.
    """

    def __init__(self, quantizer: TrellisCoded, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._quantizer = quantizer
        self._stored = stored = quantizer.stored
        self._features = len(quantizer.bits)
        self._bits = quantizer.own_bits
        self._fields = state_fields(self._bits).to(device)
        self._codebooks = codebooks().to(device)
        factor = quantizer.step[:stored] * quantizer.gain[:stored]
        self._factor = factor.to(device, dtype).unsqueeze(1)  # (stored, 1)
        self._scales = functional.pad(short_scales(), (0, 1), value=torch.nan).to(device)
        self._dtype = dtype
        self._device = device

    def append(self, latents: Tensor) -> None:
        self._append(latents[:, 0])

    def append_and_read(self, latents: Tensor) -> Tensor:
        found = self._append(latents[:, 0])
        found = functional.pad(found, (0, self._features - self._stored))
        return found.unsqueeze(1).to(latents.device, self._dtype)

    def append_projected(self, x: Tensor, expected: Tensor, down: Tensor) -> Tensor:
        return self._append((x - expected) @ down.mT)

    def _append(self, latents: Tensor) -> Tensor:
        """Append latents (B, m, r or more), and return their reconstructions, (B, m, r)."""
        batch, tokens = latents.shape[:2]
        size = self._quantizer.stream_bytes
        x = latents[..., : self._stored].float().cpu()
        if self._device.type == "cpu":
            return self._quantizer.encode(x, self._extend(size, batch, tokens))
        codes = torch.empty(batch, size, tokens, dtype=torch.uint8)
        found = self._quantizer.encode(x, flat_view(codes))
        self.append_packed(codes.unsqueeze(1).to(self._device))
        return found

    def tiles(self, first: int, size: int) -> Iterator[Tile]:
        upper, middle, lower, right, mask = (x.unsqueeze(1) for x in self._fields.unbind(1))
        widths = self._bits.to(self._device).unsqueeze(1)
        for start, stop in split_tiles(first, len(self), size):
            codes = self.visible(start, stop).int()  # (B, 1, bytes, n)
            three = (codes[:, :, x.squeeze(1)] << place for x, place in ((upper, 16), (middle, 8)))
            stream = sum(three, codes[:, :, lower.squeeze(1)])  # (B, 1, stored, n)
            states = (stream >> right) & mask
            stored = self._codebooks[widths, states].to(self._dtype) * self._factor
            stored = stored * self._scales[codes[:, :, -1:] & NAN_SHORT].to(self._dtype)
            x = functional.pad(stored, (0, 0, 0, self._features - self._stored))
            yield start - first, stop - first, x.mT
