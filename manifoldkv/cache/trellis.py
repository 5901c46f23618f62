"""Store of trellis-coded latents."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from manifoldkv.cache.mixed import WidthStore
from manifoldkv.coding.scales import NAN_SHORT, short_scales
from manifoldkv.coding.trellis import TrellisCoded, codebooks, state_fields
from manifoldkv.kernels.views import flat_view


class TrellisStore(WidthStore):
    """Streams of bits of trellis-coded latents, which are searched for on a CPU in any case.

    Parameters are as in `WidthStore`.
    """

    def __init__(self, quantizer: TrellisCoded, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(quantizer, dtype, device)
        self._quantizer, self._device = quantizer, device
        self._bits = quantizer.own_bits
        self._codebooks = codebooks().to(device)
        self._scales = functional.pad(short_scales(), (0, 1), value=torch.nan).to(device)

    @cached_property
    def _fields(self) -> Tensor:
        """`state_fields` of the stored latents, for reconstructions by torch."""
        return state_fields(self._bits).to(self._device)

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

    def _reconstruct(self, start: int, stop: int, out: Tensor) -> None:
        upper, middle, lower, right, mask = (x.unsqueeze(1) for x in self._fields.unbind(1))
        widths = self._bits.to(self._device).unsqueeze(1)
        codes = self.visible(start, stop).int()  # (B, 1, bytes, m)
        three = (codes[:, :, x.squeeze(1)] << place for x, place in ((upper, 16), (middle, 8)))
        stream = sum(three, codes[:, :, lower.squeeze(1)])  # (B, 1, stored, m)
        states = (stream >> right) & mask
        factor = self._factor.to(self._dtype).unsqueeze(1)
        torch.mul(self._codebooks[widths, states].to(self._dtype), factor, out=out)
        out.mul_(self._scales[codes[:, :, -1:] & NAN_SHORT].to(self._dtype))
