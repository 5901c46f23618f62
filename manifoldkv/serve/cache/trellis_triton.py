"""Store of trellis-coded latents on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from manifoldkv.plan.formats.trellis import TrellisCoded
from manifoldkv.serve.cache.storage import Tile, split_tiles
from manifoldkv.serve.cache.trellis import TrellisStore
from manifoldkv.serve.kernels.triton.encode import EncoderTables, encode, read


class TritonTrellisStore(TrellisStore):
    """A `TrellisStore` that searches for bits, and reads them, by Triton kernels."""

    def __init__(self, quantizer: TrellisCoded, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(quantizer, dtype, device)
        self._encoder = EncoderTables.of(quantizer, device)

    def append(self, latents: Tensor) -> None:
        self._encode(self._of_stored(latents))

    def _append(self, latents: Tensor) -> Tensor:
        self._encode(latents)
        return self.read(len(self) - latents.shape[1], len(self))[:, 0, :, : self._stored]

    def _encode(self, latents: Tensor) -> None:
        """Append latents, (B, m, r)."""
        batch, tokens, _ = latents.shape
        self._allocate(self._quantizer.stream_bytes, batch, tokens, self._device)
        encode(latents, self._encoder, self.newest_packed(tokens)[:, 0])

    def tiles(self, first: int, size: int) -> Iterator[Tile]:
        for start, stop in split_tiles(first, len(self), size):
            numbers = self._encoder.latents, self._encoder.numbers[2]
            x = read(self.visible(start, stop), *numbers, self._dtype)
            x = functional.pad(x, (0, 0, 0, self._features - self._stored))
            yield start - first, stop - first, x.mT.unsqueeze(1)
