"""Encoding and reading of trellis-coded latents on GPUs, in Triton.

A program searches the stream of one token, or a window of it, with the least costs of all states in
registers. The streams of few tokens are cut into windows that are searched at once, each with some
bits that follow it in place of all of them, so that the path found is nearly the best one. For
every state in which a path enters a window, the state in which it leaves it is stored, so that the
path is followed in all windows at once too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

import torch
import triton
from torch import Tensor
from triton import language as tl

from manifoldkv.coding.scales import NAN_SHORT
from manifoldkv.coding.trellis import STATES, TrellisCoded
from manifoldkv.coding.viterbi import SCALES_TRIED, WORST
from manifoldkv.kernels.gpu_latents import (
    LATENTS,
    SHORT,
    TOKENS,
    Constant,
    in_words,
    on_device,
    scales_of,
    short_scale_of,
    unpack,
)
from manifoldkv.kernels.gpu_tables import Latents, tabulate_latents
from manifoldkv.kernels.tables import LatentTables
from manifoldkv.kernels.views import check_shape

WINDOW, FOLLOWING = 128, 64
"""Bits of a window, a multiple of 8, and of those that follow it."""
MANY_TOKENS = 512
"""Fewest tokens whose streams are searched whole, since they fill a GPU."""
HELD_BYTES = 1 << 28
"""Most bytes of branches at a time."""
ROW = Constant(STATES // 16)  # bytes of the branches of a bit: one bit for every two states
SIZE, LENGTH = Constant(STATES), Constant(STATES.bit_length() - 1)
UNREACHED = Constant(float(WORST))
FINITE, TRIED = Constant(NAN_SHORT), Constant(SCALES_TRIED)  # scales


@dataclass(frozen=True, eq=False)
class EncoderTables:
    """Numbers of a site's stored latents.

    Parameters
    ----------
    latents : Latents
        Positions and codes.
    own : Tensor
        Bits that every latent adds to the stream, (r,), int64, on the CPU.
    numbers : Tensor
        Deviation, step, factor of a codeword, largest latent that is no outlier, and weight of
        squared errors, (5, r), float32.
    codebooks : Tensor
        Codewords by own bits and state, (9, `STATES`), float32.
    noise : float
        Squared error of a token without outliers at a scale of one.
    """

    latents: Latents
    own: Tensor
    numbers: Tensor
    codebooks: Tensor
    noise: float

    @classmethod
    def of(cls, quantizer: TrellisCoded, device: torch.device) -> EncoderTables:
        """Return the tables of a site on a GPU."""
        own, numbers, codebooks, _, noise = quantizer.tables
        return cls(
            tabulate_latents(LatentTables.of_quantizer(quantizer), device),
            torch.from_numpy(own),
            torch.from_numpy(numbers).to(device),
            torch.from_numpy(codebooks).to(device),
            float(noise),
        )

    @cached_property
    def bits(self) -> int:
        """Return the bits of a stream."""
        return int(self.own.sum())

    @cached_property
    def positions(self) -> Tensor:
        """Return the first bit and the own bits of every latent, (r, 2), int32."""
        first = self.own.cumsum(0) - self.own
        return torch.stack([first, self.own], dim=1).to(self.numbers.device, torch.int32)

    def windows(self, size: int) -> Tensor:
        """Return the windows of some bits, (windows, 4), int32.

        Columns are the first bit, the bit after the last one, the first latent that begins in the
        window, and the one after the last that begins in it or in the bits that follow.
        """
        first = torch.arange(0, self.bits, size)
        stop = (first + size).clamp(max=self.bits)
        begins = self.own.cumsum(0) - self.own
        ends = torch.searchsorted(begins, (stop + FOLLOWING).clamp(max=self.bits))
        table = torch.stack([first, stop, torch.searchsorted(begins, first), ends], dim=1)
        return table.to(self.numbers.device, torch.int32)

    @cached_property
    def whole(self) -> Tensor:
        """Return a window of all bits."""
        return self.windows(self.bits)

    @cached_property
    def short(self) -> Tensor:
        """Return windows of `WINDOW` bits."""
        return self.windows(WINDOW)


@on_device
def encode(latents: Tensor, tables: EncoderTables, codes: Tensor) -> None:
    """Encode tokens.

    Parameters
    ----------
    latents : Tensor
        Stored latents, (B, m, r), in a floating dtype.
    tables : EncoderTables
        Of the latents.
    codes : Tensor
        Streams of tokens, (B, bytes, m), uint8, with stride 1 in tokens, which are written.
    """
    batch, per_text, r = latents.shape
    check_shape("latents", (r,), len(tables.own))
    tables.latents.check(codes.unsqueeze(1), batch, per_text)
    if not r:
        codes.zero_()
        return
    tokens, x = batch * per_text, latents.contiguous()
    is_whole = tokens >= MANY_TOKENS
    windows = tables.whole if is_whole else tables.short
    of_window = ROW.value * (tables.bits if is_whole else WINDOW)
    of_token = len(windows) * of_window
    at_a_time = max(1, min(tokens, HELD_BYTES // of_token))
    branches = codes.new_empty(at_a_time * of_token)
    left = codes.new_empty(at_a_time, len(windows) + 1, STATES, dtype=torch.int16)
    held = branches, of_window, left, windows
    of_codes = codes, codes.stride(0), codes.stride(1), codes.shape[1] - 1
    for first in range(0, tokens, at_a_time):
        grid = min(at_a_time, tokens - first), len(windows)
        _search_kernel[grid](
            *(x, first, per_text, *of_codes, *held, tables.positions),
            *(tables.numbers, tables.codebooks, tables.noise, tables.bits, r),
            1 << (r - 1).bit_length(),
            num_warps=2,
        )
        _follow_kernel[grid](*(*of_codes, first, per_text, *held), num_warps=1)


@on_device
def read(codes: Tensor, latents: Latents, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return reconstructed latents, (B, r, n).

    Parameters
    ----------
    codes : Tensor
        Packed latents, as in `manifoldkv.kernels.gpu.scores`.
    latents : Latents
        Tables of the latents.
    factor : Tensor
        Of every latent, (r,), float32.
    dtype : torch.dtype
        Of the latents.
    """
    batch, n, r = len(codes), codes.shape[3], len(factor)
    latents.check(codes, batch, n)
    check_shape("factors", factor.shape, len(latents.centres))
    out = torch.empty(batch, r, n, dtype=dtype, device=codes.device)
    words = in_words(codes)
    grid = ceil((n + words.before) / TOKENS.value), ceil(r / LATENTS.value), batch
    _read_kernel[grid](
        *(*words, latents.fields, latents.centres, latents.last, factor),
        *(out, r, n, latents.depth),
    )
    return out


@triton.jit
def _scale_code(x, numbers, noise, r, i, there):
    """Return the code of the scale of a token, chosen as `coding.viterbi` does."""
    ratio = x / tl.load(numbers + i, mask=there, other=1.0)
    deviation = tl.sqrt(tl.sum(ratio * ratio, axis=0) / r)
    smallest = r * 0
    for code in tl.static_range(FINITE - 1):
        here, after = short_scale_of(r * 0 + code), short_scale_of(r * 0 + code + 1)
        middle = (here + after) / 2
        smallest += ((deviation > middle) | ((deviation == middle) & (code % 2 == 1))).to(tl.int32)
    limit = tl.load(numbers + 3 * r + i, mask=there, other=0.0)
    best, least = smallest, float("inf")
    for trial in tl.static_range(TRIED):
        code = tl.minimum(smallest + trial, FINITE - 1)
        scale = short_scale_of(code)
        beyond = tl.maximum(tl.abs(x) - scale * limit, 0.0)
        error = tl.sum(beyond * beyond, axis=0) + noise * scale * scale
        best = tl.where(error < least, code, best)
        least = tl.minimum(error, least)
    return tl.where(deviation == deviation, best, FINITE)


@triton.jit(do_not_specialize=["first"])
def _search_kernel(
    latents, first, per_text, codes, code_batch, code_row, end, branches, of_window, left, windows,
    positions, numbers, codebooks, noise, bits, r, size: tl.constexpr,
):  # fmt: skip
    """Search a window of the stream of a token for the least weighted squared error.

    The search runs from the last latent to the first, as in `coding.viterbi`. Stored are the better
    branches of every bit, the state in which a window is left for every state in which it is
    entered, if there are several windows, and the best state of the first latent.
    """
    place, index, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = first + place
    latents += token * r
    i = tl.arange(0, size)
    x = tl.load(latents + i, mask=i < r, other=0.0).to(tl.float32)
    code = _scale_code(x, numbers, noise, r, i, i < r)
    if index == 0:
        codes += token // per_text * code_batch + token % per_text
        tl.store(codes + end * code_row, code.to(tl.uint8))
    scale = short_scale_of(code)
    begin, stop = tl.load(windows + 4 * index), tl.load(windows + 4 * index + 1)
    latent, last = tl.load(windows + 4 * index + 2), tl.load(windows + 4 * index + 3)
    branches += (place * count + index) * of_window
    state = tl.arange(0, SIZE)
    column, shift = tl.arange(0, ROW), tl.arange(0, 8)
    # Beyond the last latent bits are 0; beyond the bits that follow a window they are free.
    costs = tl.where((last < r) | (state == 0), 0.0, UNREACHED)
    bit = bits
    if last < r:
        bit = tl.load(positions + 2 * last)
    for back in range(0, last - latent + 1):
        j = last - 1 - back
        start = begin  # after the last latent, the bits of one that begins before the window
        if j >= latent:
            start = tl.load(positions + 2 * j)
        for _ in range(start, bit):
            bit -= 1
            even, odd = tl.split(tl.reshape(costs, (SIZE // 2, 2)))
            taken = tl.reshape((odd < even).to(tl.int32), (ROW, 8))
            packed = tl.sum(taken << shift[None, :], axis=1).to(tl.uint8)
            address = branches + (bit - begin) * ROW + column
            tl.store(address, packed, mask=(column >= 0) & (bit < stop))
            least = tl.minimum(even, odd)
            costs = tl.reshape(tl.broadcast_to(least[None, :], (2, SIZE // 2)), (SIZE,))
        if j >= latent:
            width = tl.load(positions + 2 * j + 1)
            y = tl.load(latents + j).to(tl.float32) / scale / tl.load(numbers + r + j)
            error = y - tl.load(codebooks + width * SIZE + state)
            costs += tl.load(numbers + 4 * r + j) * error * error
    tl.debug_barrier()  # branches are read by other threads than wrote them
    left += place * (count + 1) * SIZE
    if count > 1:
        for bit in range(0, stop - begin):
            kept = state & (SIZE // 2 - 1)
            byte = tl.load(branches + bit * ROW + kept // 8).to(tl.int32)
            state = 2 * kept + (byte >> (kept % 8) & 1)
        tl.store(left + (index + 1) * SIZE + tl.arange(0, SIZE), state.to(tl.int16))
    if index == 0:
        tl.store(left, tl.argmin(costs, axis=0).to(tl.int16))


@triton.jit(do_not_specialize=["first"])
def _follow_kernel(
    codes, code_batch, code_row, end, first, per_text, branches, of_window, left, windows
):  # fmt: skip
    """Write the bits of a window on the best path: the first one of every state.

    The last four bits of a stream, its scale, are not changed.
    """
    place, index, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = first + place
    left += place * (count + 1) * SIZE
    state = tl.load(left).to(tl.int32)
    for window in range(0, index):
        state = tl.load(left + (window + 1) * SIZE + state).to(tl.int32)
    branches += (place * count + index) * of_window
    begin, stop = tl.load(windows + 4 * index), tl.load(windows + 4 * index + 1)
    codes += token // per_text * code_batch + token % per_text
    row, column = tl.arange(0, 8)[:, None], tl.arange(0, ROW)[None, :]
    for byte in range(0, (stop - begin + 7) // 8):
        # Rows of eight bits at once, since to wait for a row takes longer than to use it.
        inside = 8 * byte + row < stop - begin
        eight = tl.load(branches + (8 * byte + row) * ROW + column, mask=inside, other=0)
        eight = eight.to(tl.int32)
        packed = state * 0
        for bit in tl.static_range(8):
            packed = 2 * packed + (state >> (LENGTH - 1))
            kept = state & (SIZE // 2 - 1)
            chosen = (row == bit) & (column == kept // 8)
            branch = tl.sum(tl.sum(tl.where(chosen, eight, 0), axis=1), axis=0)
            state = 2 * kept + (branch >> (kept % 8) & 1)
        address = codes + (begin // 8 + byte) * code_row
        packed |= tl.load(address, mask=begin // 8 + byte == end, other=0).to(tl.int32) & SHORT
        tl.store(address, packed.to(tl.uint8))


@triton.jit(do_not_specialize=["n", "before"])
def _read_kernel(
    codes, code_first, code_batch, code_row, scales, scale_first, scale_batch, before,
    fields, centres, last, factor, out, r, n, depth: tl.constexpr,
):  # fmt: skip
    """Reconstruct a tile of latents and tokens."""
    sequence = tl.program_id(2).to(tl.int64)
    slot = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    word = tl.program_id(0) * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
    latent = tl.program_id(1) * LATENTS + tl.arange(0, LATENTS)
    token, near, chosen = slot - before, word < (n + before + 3) // 4, latent < r
    valid = (token >= 0) & (token < n)
    codes += sequence * code_batch + code_first
    scales += sequence * scale_batch + scale_first
    z = unpack(
        codes, code_row, word, near, fields, centres, last, latent, chosen, depth, tl.float32
    )
    z *= tl.load(factor + latent, mask=chosen, other=0.0)[:, None]
    z *= scales_of(scales + slot, valid, depth)[None, :]
    address = out + (sequence * r + latent[:, None]) * n + token[None, :]
    tl.store(address, z.to(out.dtype.element_ty), mask=chosen[:, None] & valid[None, :])
