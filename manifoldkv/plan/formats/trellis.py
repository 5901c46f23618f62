"""Trellis-coded latents: bits, computed codewords and reconstruction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil
from threading import local
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from manifoldkv.core.errors import PlanError
from manifoldkv.core.threads import run_in_parts
from manifoldkv.plan.formats.mixed import MixedWidths
from manifoldkv.plan.formats.quantizer import straight_through
from manifoldkv.plan.formats.scales import SHORT_BITS, short_scales
from manifoldkv.plan.formats.views import View, check_shape, check_view

STATES = 1024
"""States of the trellis. A search takes as long as there are states; with 256 the error is 1.03 to
1.1 times as large."""
GAUSSIAN_DISTORTION: dict[float, float] = {
    0: 1,
    0.5: 0.542,
    1: 0.2829,
    1.5: 0.1483,
    2: 0.0761,
    2.5: 0.0404,
    3: 0.0205,
    3.5: 0.01074,
    4: 5.59e-3,
    4.5: 2.95e-3,
    5: 1.56e-3,
    5.5: 8.29e-4,
    6: 4.35e-4,
    6.5: 2.51e-4,
    7: 1.42e-4,
    7.5: 8.15e-5,
    8: 3.8e-5,
}
"""Mean squared errors of a Gaussian of variance one, by bits."""
REACH = 1.15
"""Largest latent that is no outlier, relative to the largest codeword. Of 0.8, 1, 1.15, 1.35 and
1.7, SmolLM2 diverges least with 1.15 at an eighth and at a twelfth, and by 4 to 8 % more with 1
(one window of 1,024 tokens of each of two texts)."""
TOKENS_PER_THREAD = 8
"""Fewest tokens that a further thread is worth."""


class Code(NamedTuple):
    """Computed codewords: ``unit * (low + high)``.

    Low and high are the halves of ``(state * multiplier + offset) mod 2^32`` as signed integers of
    16 bits. As functions of the state they are as good as random, and their sum is spread like that
    of two uniform variables. That codewords may be computed instead of stored is shown by QTIP
    (Tseng et al. 2024), with other functions.

    Parameters
    ----------
    multiplier, offset : int
        0 to 2^32 - 1.
    unit : float
        Of codewords for a Gaussian of variance one.
    """

    multiplier: int
    offset: int
    unit: float

    def codewords(self) -> Tensor:
        """Return the codewords of all states, (`STATES`,), float32."""
        mixed = np.arange(STATES, dtype=np.uint32) * np.uint32(self.multiplier)
        halves = (mixed + np.uint32(self.offset)).astype("<u4").view("<i2").reshape(-1, 2)
        return torch.from_numpy(halves.sum(axis=1, dtype=np.float32) * np.float32(self.unit))


CODES = (
    Code(3297283680, 3097918984, 2.06136e-05),
    Code(866141347, 168276604, 3.27234e-05),
    Code(2436574081, 2833641068, 3.82359e-05),
    Code(2968743885, 1102983237, 4.39558e-05),
    Code(1573084571, 743971229, 5.30053e-05),
    Code(2427490590, 1079536997, 5.37722e-05),
    Code(2591398419, 3902644679, 5.76136e-05),
    Code(3611720204, 2027349928, 6.27123e-05),
    Code(4074583149, 509956342, 6.33329e-05),
)
"""Codes of latents that add 0 to 8 bits to the stream, chosen by `studies/train_codes.py`."""


@cache
def codebooks() -> Tensor:
    """Return the codewords for Gaussians of variance one, (9, `STATES`), float32, by own bits."""
    return torch.stack([code.codewords() for code in CODES])


def own_bits(bits: Tensor) -> Tensor:
    """Return the bits that each latent adds to the stream, (r,), int64.

    Of latents of half a bit more than b every second one adds b + 1, the others b. One that adds
    none has the state of the next latent, and so the last adds one at least.

    Parameters
    ----------
    bits : Tensor
        Bits of every latent, (r,), positive multiples of 1/2.
    """
    stop = (2 * bits).long().cumsum(0) // 2
    own = stop.diff(prepend=stop.new_zeros(1))
    own[-1:] = own[-1:].clamp(min=1)
    return own


def relative_steps(bits: Tensor, books: Tensor) -> Tensor:
    """Return the steps of latents of variance one, (r,), float32: 1 for a whole number of bits.

    Others have codewords of two codes by turns (`own_bits`). Their steps give both the same root
    mean square, the geometric mean.

    Parameters
    ----------
    bits : Tensor
        Bits of every latent, (r,), positive multiples of 1/2.
    books : Tensor
        Codewords by own bits and state, as `codebooks`.
    """
    spread, own = books.square().mean(dim=1).sqrt(), own_bits(bits)
    of_both = (spread[bits.floor().long()] * spread[bits.ceil().long()]).sqrt()
    return torch.where(bits == bits.floor(), torch.ones_like(of_both), of_both / spread[own])


@dataclass(frozen=True, eq=False)
class TrellisCoded(MixedWidths):
    """Latents in mixed widths whose reconstructions depend on the bits of later latents too.

    Gains are those of `MixedWidths`. So are scales of tokens, except those of tokens with outliers,
    but they have 4 bits. The bits of all latents of a token, widest first, form one stream, whose
    last four bits are the scale. A latent is reconstructed as
    ``codeword(state) * step`` times its gain and the scale of the token, where the state is the ten
    bits of the stream that begin with the latent's own, zeros beyond the latents, and codewords are
    those of the number of its own bits (`Code`): a trellis code of rate b for every latent
    (Marcellin and Fischer 1990; states of a stream as in QTIP, Tseng et al. 2024). Rates are
    multiples of half a bit, since states outlast a latent (`own_bits`). The Viterbi algorithm finds
    the bits of a token whose squared error is least. At equal bits the error is 0.78 (1 bit), 0.64
    (2 bits) and 0.55 (3 bits) times that of `MixedWidths` on Gaussians; the least possible ones are
    0.69, 0.53 and 0.42.

    A latent far beyond the largest codeword of its width, in units of step and scale, is an
    outlier: no codeword is near it. Tried are the root mean square, as in `MixedWidths`, and the 8
    next larger scales, up to about eight times as large. The one with the least estimated squared
    error is chosen: the squared distances of outliers from `REACH` times their largest codeword,
    and `GAUSSIAN_DISTORTION` times the squares of step and scale, summed over all latents.

    In one layer of SmolLM2, some keys that draw much attention, after the sink tokens, are
    outliers. With root mean squares the model diverges 1.6 times as much at an eighth of the
    cache, and 1.1 times at a twelfth; about 1 token of a site in 800 has a larger scale.

    Parameters
    ----------
    bits : Tensor
        Bits of every latent, (features,), float32, multiples of 1/2, at most 8 and not increasing.
    deviation, gain : Tensor
        As in `MixedWidths`.
    step : Tensor
        Unit of the codewords of every latent, (features,), float32, positive.
    """

    name: ClassVar[str] = "trellis-coded"
    dtype_of_bits: ClassVar[torch.dtype] = torch.float32

    def __post_init__(self) -> None:
        super().__post_init__()
        if not bool((2 * self.bits == (2 * self.bits).floor()).all()):
            raise PlanError("bits of trellis-coded latents must be multiples of 1/2")

    @property
    def format(self) -> str:
        return "trellis-coded mixed widths"

    def reconstruct(self, latents: Tensor) -> Tensor:
        x = latents.detach()[..., : self.stored].float().cpu().flatten(0, -2).unsqueeze(0)
        codes = np.empty(self.stream_bytes * x.shape[1], np.uint8), 0, x.shape[1]
        found = self.encode(x, codes).view(*latents.shape[:-1], -1).to(latents)
        found = torch.cat([found, torch.zeros_like(latents[..., self.stored :])], dim=-1)
        return straight_through(latents, found)

    def encode(self, latents: Tensor, codes: View) -> Tensor:
        """Encode tokens, and return their reconstructions, (B, m, r), float32.

        Parameters
        ----------
        latents : Tensor
            Stored latents, (B, m, r), float32, on the CPU.
        codes : View
            Of the streams of tokens (B, `stream_bytes`, m), uint8, which are written.
        """
        from manifoldkv.plan.formats import viterbi

        batch, per_text, stored = latents.shape
        check_shape("latents", (stored,), self.stored)
        check_view("codes", codes, batch, self.stream_bytes, per_text)
        tokens = batch * per_text
        found = torch.empty(tokens, stored)
        x = latents.reshape(tokens, stored).contiguous().numpy()
        arguments = x, per_text, self.tables, codes, found.numpy()

        def encode_part(first: int, stop: int) -> None:
            viterbi.encode(*arguments, _scratch(stored), first, stop)

        if tokens:
            run_in_parts(tokens, encode_part, tokens // TOKENS_PER_THREAD)
        return found.view(batch, per_text, stored)

    @cached_property
    def stream_bytes(self) -> int:
        """Return the bytes of the latents of a token and of its scale."""
        return ceil((int(self.own_bits.sum()) + SHORT_BITS) / 8)

    @cached_property
    def own_bits(self) -> Tensor:
        """Return the bits that each stored latent adds to the stream, (r,), int64."""
        return own_bits(self.bits[: self.stored])

    @cached_property
    def tables(self) -> tuple[Any, ...]:
        """Tables of `viterbi.encode`."""
        stored, books = self.stored, codebooks()
        bits, own, step = self.bits[:stored], self.own_bits, self.step[:stored]
        distortion = torch.tensor([GAUSSIAN_DISTORTION[width] for width in bits.tolist()])
        noise = (distortion * (step / relative_steps(bits, books)).square()).sum()
        numbers = [
            self.deviation[:stored],
            step,
            step * self.gain[:stored],
            REACH * books.amax(dim=1)[own] * step,
            normalize(step, dim=0).square(),
        ]
        arrays = own.numpy(), torch.stack(numbers).contiguous().numpy(), books.numpy()
        return *arrays, short_scales().numpy(), np.float32(noise)

    def layout(self) -> tuple[Tensor, Tensor]:
        return stream_layout(self.own_bits)

    def nbytes(self, tokens: int, features: int, itemsize: int) -> int:
        return tokens * self.stream_bytes


_HELD = local()


def _scratch(latents: int) -> tuple[NDArray[Any], ...]:
    """Return scratch of `viterbi` for that many latents at least, the same for all calls."""
    from manifoldkv.plan.formats.viterbi import SHORTEST

    held: tuple[NDArray[Any], ...] | None = getattr(_HELD, "scratch", None)
    if held is None or len(held[1]) < latents:
        # torch aligns memory to vector registers; without that a search takes a fifth longer.
        memory = (
            torch.empty(3, STATES + SHORTEST),
            torch.empty(latents, STATES, dtype=torch.uint8),
            torch.empty(latents),
            torch.empty(latents, dtype=torch.uint16),
        )
        held = _HELD.scratch = tuple(x.numpy() for x in memory)
    return held


def state_fields(bits: Tensor) -> Tensor:
    """Return where the states of latents of some own bits (r,) are in a stream, (r, 5), int64.

    Per latent: three bytes, the right shift of the integer that they make, first byte highest, and
    the mask that cuts the state out of it, 0 for bits beyond the end of the stream.
    """
    bits, length = bits.long(), STATES.bit_length() - 1
    stop = int(bits.sum())
    start = bits.cumsum(0) - bits
    last = max(0, ceil(stop / 8) - 1)
    rows = [(start // 8 + offset).clamp(max=last) for offset in range(3)]
    beyond = (start + length - stop).clamp(min=0)
    mask = STATES - (1 << beyond)
    return torch.stack([*rows, 24 - length - start % 8, mask], dim=1)


def stream_layout(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return fields and centres of `LatentTables` of latents of some own bits, (r,)."""
    found = state_fields(bits)
    fields = torch.zeros(len(bits), 4, 4, dtype=torch.int64)
    fields[:, 0] = found[:, :4]
    codes = [CODES[own] for own in bits.tolist()]
    fields[:, 1, 0], fields[:, 3, 0] = found[:, 4], 1
    fields[:, 1, 1:3] = torch.tensor([code[:2] for code in codes]).view(-1, 2)
    return fields, torch.tensor([code.unit for code in codes])


def search(scaled: Tensor, bits: Tensor, weights: Tensor, codebooks: Tensor) -> NDArray[np.uint16]:
    """Return the states whose codewords have the least weighted squared error, (n, r).

    Parameters
    ----------
    scaled : Tensor
        Latents in units of the codebooks, (n, r), float32.
    bits : Tensor
        Own bits of every latent, (r,), int64.
    weights : Tensor
        Weights of squared errors, (r,), float32.
    codebooks : Tensor
        Codewords by own bits and state, (9, `STATES`), float32.
    """
    from manifoldkv.plan.formats import viterbi

    found = np.empty(tuple(scaled.shape), np.uint16)
    arrays = [x.contiguous().numpy() for x in (scaled, bits, weights, codebooks)]
    viterbi.search(*arrays, _scratch(len(bits)), found)
    return found
