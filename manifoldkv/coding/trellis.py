"""Trellis-coded latents: bits, codebooks and reconstruction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import normalize

from manifoldkv.coding.mixed import MixedWidths
from manifoldkv.coding.quantizer import straight_through
from manifoldkv.coding.scales import (
    INFINITY_CODE,
    SMALLEST_SCALE,
    TOKEN_SCALE_BYTES,
    scale_codes,
    scales_of,
)
from manifoldkv.runs.threads import run_in_parts

WINDOW = 10
"""Bits of the stream that a latent is reconstructed from."""
GAUSSIAN_DISTORTION = (1, 0.2845, 0.0776, 0.0209, 5.63e-3, 1.58e-3, 4.9e-4, 1.7e-4, 8e-5)
"""Mean squared errors of a Gaussian of variance one, for 0 to 8 bits."""
REACH = 1.15
"""Largest latent that is no outlier, relative to the largest codeword. Of 0.8, 1, 1.15, 1.35 and
1.7, SmolLM2 diverges least with 1.15 at an eighth and at a twelfth, and by 4 to 8 % more with 1
(one window of 1,024 tokens of each of two texts)."""
LARGER_SCALES = torch.arange(0, 25, 2)
"""Codes of the scales that are tried, less that of the root mean square; eight double a scale."""
TOKENS_AT_ONCE = 1024
"""Tokens whose scales are tried at once."""
TOKENS_PER_THREAD = 8
"""Fewest tokens that a further thread is worth."""
CODEBOOKS = Path(__file__).with_name("codebooks.safetensors")


@cache
def codebooks() -> Tensor:
    """Return the codebooks for Gaussians of variance one, (9, 2^`WINDOW`), float32, by width."""
    return load_file(CODEBOOKS)["codebooks"]


@dataclass(frozen=True, eq=False)
class TrellisCoded(MixedWidths):
    """Latents in mixed widths whose reconstructions depend on the bits of later latents too.

    Widths and gains are those of `MixedWidths`. So are scales of tokens, except those of tokens
    with outliers (`chosen_scales`). The bits of all latents of a token, widest first, form one
    stream. A latent is reconstructed as ``codebook[window] · step`` times its gain and the scale of
    the token, where the window is the `WINDOW` bits of the stream that begin with the latent's own,
    zeros beyond the end, and the codebook that of its width: a trellis code of rate b for every
    latent (Marcellin and Fischer 1990; windows of a stream as in QTIP, Tseng et al. 2024). The
    Viterbi algorithm finds the bits of a token whose squared error is least. At equal bits the
    error is 0.78 (1 bit), 0.65 (2 bits) and 0.56 (3 bits) times that of `MixedWidths` on Gaussians;
    the least possible ones are 0.69, 0.53 and 0.42.

    Parameters
    ----------
    bits, deviation, gain : Tensor
        As in `MixedWidths`.
    step : Tensor
        Unit of the codewords of every latent, (features,), float32, positive.
    """

    name: ClassVar[str] = "trellis-coded"

    @property
    def format(self) -> str:
        return "trellis-coded mixed widths"

    def reconstruct(self, latents: Tensor) -> Tensor:
        x = latents.detach()[..., : self.stored].float().cpu().flatten(0, -2)
        _, _, found = self.search(x)
        found = found.view(*latents.shape[:-1], -1).to(latents)
        found = torch.cat([found, torch.zeros_like(latents[..., self.stored :])], dim=-1)
        return straight_through(latents, found)

    def search(self, latents: Tensor) -> tuple[NDArray[np.uint16], Tensor, Tensor]:
        """Return the windows of latents, the codes of scales and the reconstructions.

        Parameters
        ----------
        latents : Tensor
            Stored latents of some tokens, (n, r), float32.

        Returns
        -------
        windows : ndarray
            (n, r), uint16.
        scales : Tensor
            Codes of the scales of tokens, (n, 1), uint8.
        reconstructions : Tensor
            (n, r), float32.
        """
        codes = torch.cat([self.chosen_scales(x) for x in latents.split(TOKENS_AT_ONCE)])
        scales, step = scales_of(codes), self.step[: self.stored]
        scaled = latents / scales.clamp(min=SMALLEST_SCALE) / step
        bits = self.bits[: self.stored].long()
        windows = search(scaled, bits, normalize(step, dim=0).square(), codebooks())
        codewords = codebooks()[bits, torch.from_numpy(windows.astype(np.int64))]
        return windows, codes, codewords * step * self.gain[: self.stored] * scales

    def chosen_scales(self, latents: Tensor) -> Tensor:
        """Return the codes of the scales of tokens, (n, 1), uint8.

        A latent far beyond the largest codeword of its width, in units of step and scale, is an
        outlier: no codeword is near it. Tried are the root mean square, as in `MixedWidths`, and
        larger scales. The one with the least estimated squared error is chosen: the squared
        distances of outliers from `REACH` times their largest codeword, and `GAUSSIAN_DISTORTION`
        times the squares of step and scale, summed over all latents.

        In one layer of SmolLM2, some keys that draw much attention, after the sink tokens, are
        outliers. With root mean squares the model diverges 1.6 times as much at an eighth of the
        cache, and 1.1 times at a twelfth; about 1 token of a site in 800 has a larger scale.

        Parameters
        ----------
        latents : Tensor
            As in `search`.
        """
        step, bits = self.step[: self.stored], self.bits[: self.stored].long()
        deviation = self.deviation[: self.stored]
        smallest = scale_codes((latents / deviation).square().mean(dim=-1, keepdim=True).sqrt())
        codes = smallest.int() + LARGER_SCALES
        codes = codes.clamp(max=INFINITY_CODE - 1).to(torch.uint8)  # (n, scales)
        scales = scales_of(codes)
        largest = REACH * codebooks().amax(dim=1)[bits] * step
        beyond = latents.abs().unsqueeze(1) - scales.unsqueeze(2) * largest  # (n, scales, r)
        noise = (torch.tensor(GAUSSIAN_DISTORTION)[bits] * step.square()).sum()
        errors = beyond.clamp(min=0).square().sum(dim=2) + noise * scales.square()
        best = codes.gather(1, errors.argmin(dim=1, keepdim=True))
        return torch.where(smallest < INFINITY_CODE, best, smallest)

    def nbytes(self, tokens: int, features: int, itemsize: int) -> int:
        return tokens * (TOKEN_SCALE_BYTES + ceil(int(self.bits.long().sum()) / 8))


def pack(windows: NDArray[np.uint16], bits: Tensor) -> Tensor:
    """Return the streams of tokens, (bytes, n), uint8, from windows (n, r) and bits (r,), int64."""
    widths = bits.numpy()
    latent = np.arange(len(widths)).repeat(widths)
    place = np.arange(len(latent)) - (widths.cumsum() - widths)[latent]  # of a bit in its latent
    stream = windows[:, latent] >> (WINDOW - 1 - place).astype(np.uint16) & 1
    return torch.from_numpy(np.packbits(stream.astype(np.uint8), axis=1)).mT.contiguous()


def window_fields(bits: Tensor) -> Tensor:
    """Return where the windows of latents of some bits (r,) are in a stream, (r, 5), int64.

    Per latent: three bytes, the right shift of the integer that they make, first byte highest, and
    the mask that cuts the window out of it, 0 for bits beyond the end of the stream.
    """
    bits = bits.long()
    stop = int(bits.sum())
    start = bits.cumsum(0) - bits
    last = max(0, ceil(stop / 8) - 1)
    rows = [(start // 8 + offset).clamp(max=last) for offset in range(3)]
    beyond = (start + WINDOW - stop).clamp(min=0)
    mask = (1 << WINDOW) - (1 << beyond)
    return torch.stack([*rows, 24 - WINDOW - start % 8, mask], dim=1)


def search(scaled: Tensor, bits: Tensor, weights: Tensor, codebooks: Tensor) -> NDArray[np.uint16]:
    """Return the windows of the codewords whose weighted squared error is least, (n, r).

    Parameters
    ----------
    scaled : Tensor
        Latents in units of the codebooks, (n, r), float32.
    bits : Tensor
        Bits of every latent, (r,), int64.
    weights : Tensor
        Weights of squared errors, (r,), float32.
    codebooks : Tensor
        Codewords of every width and window, (9, 2^`WINDOW`), float32.
    """
    from manifoldkv.coding import viterbi

    tokens, latents = scaled.shape
    windows = np.empty((tokens, latents), np.uint16)
    arrays = [scaled.contiguous().numpy(), bits.numpy(), weights.contiguous().numpy()]
    books = codebooks.contiguous().numpy()

    def search_part(first: int, stop: int) -> None:
        scratch = [np.empty(1 << WINDOW, np.float32) for _ in range(3)]
        branches = np.empty((latents, 1 << WINDOW), np.uint8)
        part = arrays[0][first:stop], *arrays[1:], books, windows[first:stop]
        viterbi.search(*part, *scratch, branches)

    if tokens and latents:
        run_in_parts(tokens, search_part, tokens // TOKENS_PER_THREAD)
    return windows
