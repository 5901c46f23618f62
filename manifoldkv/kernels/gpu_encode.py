"""Encoding and reading of trellis-coded latents on GPUs, in Triton.

A program searches the stream of one token, or a window of it, with the least costs of all states in
registers. The streams of few tokens are cut into windows that are searched at once. What comes
after a window is replaced by the bits that follow it, so that a search is almost the best one. Its
path is followed through all windows at once too: every window tells the state it is left in for
each state it is entered in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
from torch import Tensor
from torch.nn import functional
from triton import language as tl

from manifoldkv.coding.scales import INFINITY_CODE, LARGEST_SCALE, NAN_CODE, SMALLEST_SCALE
from manifoldkv.coding.trellis import STATES
from manifoldkv.coding.viterbi import LARGER_SCALES, WORST
from manifoldkv.kernels.gpu import LATENTS, TOKENS, Latents, scales_of, unpack

BRANCH_BYTES = STATES // 16
"""Bytes of the branches of a bit of a stream: one bit for every two states."""
WINDOW, FOLLOWING = 128, 64
"""Bits of a window, and of those that follow it."""
MANY_TOKENS = 512
"""Fewest tokens whose streams are searched whole, since they fill a GPU."""
HELD_BYTES = 1 << 28
"""Most bytes of branches at a time."""
BLOCK = tl.constexpr(64)  # bytes of a stream that a program packs
SIZE, LENGTH = tl.constexpr(STATES), tl.constexpr(STATES.bit_length() - 1)
UNREACHED = tl.constexpr(float(WORST))
LARGEST, SMALLEST = tl.constexpr(LARGEST_SCALE), tl.constexpr(SMALLEST_SCALE)
LAST_CODE, NOT_A_NUMBER = tl.constexpr(INFINITY_CODE - 1), tl.constexpr(NAN_CODE)
TRIALS = tl.constexpr(LARGER_SCALES)


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
    stream_bytes : int
        Bytes of the stream of a token.
    """

    latents: Latents
    own: Tensor
    numbers: Tensor
    codebooks: Tensor
    noise: float
    stream_bytes: int

    @cached_property
    def widths(self) -> Tensor:
        """Return the own bits on the device, (r,), int32."""
        return self.own.to(self.numbers.device, torch.int32)

    @cached_property
    def places(self) -> Tensor:
        """Return the latent of every bit of a stream, r beyond its end, and its right shift."""
        stop = self.own.cumsum(0)
        bit = torch.arange(8 * self.stream_bytes)
        latent = torch.searchsorted(stop, bit, right=True)
        right = functional.pad(stop, (0, 1))[latent] - 1 - bit
        return torch.stack([latent, right.clamp(min=0)]).to(self.numbers.device, torch.int32)

    @cached_property
    def whole(self) -> tuple[Tensor, int]:
        """Return a window of all latents, as `windows` does."""
        r, bits = len(self.own), int(self.own.sum())
        return torch.tensor([[0, r, r, bits]], dtype=torch.int32).to(self.numbers.device), bits

    @cached_property
    def windows(self) -> tuple[Tensor, int]:
        """Return the windows of a stream, (windows, 4), int32, and the bits of the longest one.

        Columns are its first latent, the one after its last, the one after those that follow, and
        its bits.
        """
        before = functional.pad(self.own.cumsum(0), (1, 0))
        first = torch.searchsorted(before[:-1], torch.arange(0, int(before[-1]), WINDOW)).unique()
        stop = functional.pad(first[1:], (0, 1), value=len(self.own))
        end = torch.searchsorted(before[:-1], before[stop] + FOLLOWING)
        bits = before[stop] - before[first]
        table = torch.stack([first, stop, end, bits], dim=1)
        return table.to(self.numbers.device, torch.int32), int(bits.max())


def encode(latents: Tensor, tables: EncoderTables, codes: Tensor, scales: Tensor) -> None:
    """Encode tokens.

    Parameters
    ----------
    latents : Tensor
        Stored latents, (B, m, r), float32.
    tables : EncoderTables
        Of the latents.
    codes : Tensor
        Streams of tokens, (B, bytes, m), uint8, with stride 1 in tokens, which are written.
    scales : Tensor
        Codes of scales, (B, 1, m), uint8, with stride 1 in tokens, which are written.
    """
    batch, per_text, r = latents.shape
    tokens = batch * per_text
    scaled = torch.empty_like(latents, memory_format=torch.contiguous_format)
    _scale_kernel[(tokens,)](
        *(latents.contiguous(), scaled, scales, scales.stride(0), per_text),
        *(tables.numbers, tables.noise, r, triton.next_power_of_2(r)),
    )
    windows, most_bits = tables.whole if tokens >= MANY_TOKENS else tables.windows
    of_token = len(windows) * most_bits * BRANCH_BYTES
    at_a_time = max(1, min(tokens, HELD_BYTES // of_token))
    branches = codes.new_empty(at_a_time, len(windows), most_bits * BRANCH_BYTES)
    left = branches.new_empty(at_a_time, len(windows), STATES, dtype=torch.int16)
    entries = left.new_empty(at_a_time)
    found, by_token = codes.new_empty(tokens, r), scaled.view(tokens, r)
    for first in range(0, tokens, at_a_time):
        part = by_token[first : first + at_a_time]
        grid = len(part), len(windows)
        held = branches, left, entries, branches.shape[2], windows, tables.widths
        _search_kernel[grid](part, *held, tables.numbers, tables.codebooks, r)
        _follow_kernel[grid](found[first:], *held, r, num_warps=1)
    _pack_kernel[tokens, triton.cdiv(tables.stream_bytes, BLOCK.value)](
        *(found, codes, codes.stride(0), codes.stride(1), per_text),
        *(tables.places, tables.stream_bytes, r),
    )


def read(
    codes: Tensor, scales: Tensor, latents: Latents, factor: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return reconstructed latents, (B, r, n).

    Parameters
    ----------
    codes, scales : Tensor
        Packed latents (B, bytes, n) and codes of their scales (B, 1, n), uint8, with stride 1 in
        tokens.
    latents : Latents
        Tables of the latents.
    factor : Tensor
        Of every latent, (r,), float32.
    dtype : torch.dtype
        Of the latents.
    """
    batch, _, n = codes.shape
    out = torch.empty(batch, len(factor), n, dtype=dtype, device=codes.device)
    grid = triton.cdiv(n, TOKENS.value), triton.cdiv(len(factor), LATENTS.value), batch
    _read_kernel[grid](
        *(codes, codes.stride(0), codes.stride(1), scales, scales.stride(0)),
        *(latents.fields, latents.centres, factor, out, len(factor), n, latents.depth),
    )
    return out


@triton.jit
def _scale_kernel(
    latents, scaled, codes, code_batch, per_text, numbers, noise, r, size: tl.constexpr
):  # fmt: skip
    """Choose the scale of a token as `coding.viterbi` does, and divide its latents by it."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, size)
    there = i < r
    x = tl.load(latents + token * r + i, mask=there, other=0.0)
    ratio = x / tl.load(numbers + i, mask=there, other=1.0)
    deviation = tl.sqrt(tl.sum(ratio * ratio, axis=0) / r)
    bits = tl.minimum(deviation, LARGEST).to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - 8 * 112
    small = tl.floor(tl.minimum(deviation, SMALLEST) / SMALLEST * 8 + 0.5).to(tl.int32)
    smallest = tl.where(deviation < SMALLEST, small, normal)
    limit = tl.load(numbers + 3 * r + i, mask=there, other=0.0)
    best, least = smallest, float("inf")
    for trial in tl.static_range(TRIALS):
        code = tl.minimum(smallest + 2 * trial, LAST_CODE)
        scale = (code << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        beyond = tl.maximum(tl.abs(x) - scale * limit, 0.0)
        error = tl.sum(beyond * beyond, axis=0) + noise * scale * scale
        best = tl.where(error < least, code, best)
        least = tl.minimum(error, least)
    is_number = deviation == deviation
    best = tl.where(is_number, best, NOT_A_NUMBER)
    tl.store(codes + token // per_text * code_batch + token % per_text, best.to(tl.uint8))
    scale = (best << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    divisor = tl.where(scale < SMALLEST, SMALLEST, scale)
    step = tl.load(numbers + r + i, mask=there, other=1.0)
    tl.store(scaled + token * r + i, x / divisor / step, mask=there)


@triton.jit
def _before(state, bit, branches):
    """Return the state whose successor is a state, one bit of the stream later."""
    kept = state & (SIZE // 2 - 1)
    byte = tl.load(branches + bit * (SIZE // 16) + kept // 8).to(tl.int32)
    return 2 * kept + (byte >> (kept % 8) & 1)


@triton.jit
def _search_kernel(
    scaled, branches, left, entries, of_window, windows, widths, numbers, codebooks, r
):  # fmt: skip
    """Search a window of the stream of a token for the least weighted squared error.

    The search runs from the last latent to the first, as in `coding.viterbi`. Stored are the better
    branches of every bit, the state in which a window is left for every state in which it is
    entered, if there are several windows, and the best state of the first latent.
    """
    token, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    window = token * tl.num_programs(1) + index
    first, stop = tl.load(windows + 4 * index), tl.load(windows + 4 * index + 1)
    end = tl.load(windows + 4 * index + 2)
    branches += window * of_window
    scaled += token * r
    weights = numbers + 4 * r
    state = tl.arange(0, SIZE)
    eighth, place = tl.arange(0, SIZE // 16), tl.arange(0, 8)
    costs = tl.where((end < r) | (state == 0), 0.0, UNREACHED)
    bit = 0
    for back in range(0, end - first):
        i = end - 1 - back
        width = tl.load(widths + i)
        x, weight = tl.load(scaled + i), tl.load(weights + i)
        error = x - tl.load(codebooks + width * SIZE + state)
        for _ in range(0, width):
            even, odd = tl.split(tl.reshape(costs, (SIZE // 2, 2)))
            taken = tl.reshape((odd < even).to(tl.int32), (SIZE // 16, 8))
            packed = tl.sum(taken << place[None, :], axis=1).to(tl.uint8)
            address = branches + bit * (SIZE // 16) + eighth
            tl.store(address, packed, mask=(eighth >= 0) & (i < stop))
            least = tl.minimum(even, odd)
            costs = tl.reshape(tl.broadcast_to(least[None, :], (2, SIZE // 2)), (SIZE,))
            bit += (i < stop).to(tl.int32)
        costs += weight * error * error
    tl.debug_barrier()  # branches are read by other threads than wrote them
    if tl.num_programs(1) > 1:
        for _ in range(0, bit):
            bit -= 1
            state = _before(state, bit, branches)
        tl.store(left + window * SIZE + tl.arange(0, SIZE), state.to(tl.int16))
    if index == 0:
        tl.store(entries + token, tl.argmin(costs, axis=0).to(tl.int16))


@triton.jit
def _follow_kernel(found, branches, left, entries, of_window, windows, widths, r):
    """Write the own bits of the latents of a window on the best path."""
    token, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    window = token * tl.num_programs(1)
    state = tl.load(entries + token).to(tl.int32)
    for _ in range(0, index):
        state = tl.load(left + window * SIZE + state).to(tl.int32)
        window += 1
    branches += window * of_window
    first, stop = tl.load(windows + 4 * index), tl.load(windows + 4 * index + 1)
    bit = tl.load(windows + 4 * index + 3)
    for i in range(first, stop):
        width = tl.load(widths + i)
        tl.store(found + token * r + i, (state >> (LENGTH - width)).to(tl.uint8))
        for _ in range(0, width):
            bit -= 1
            state = _before(state, bit, branches)


@triton.jit
def _pack_kernel(found, codes, code_batch, code_stride, per_text, places, stream_bytes, r):
    """Write some bytes of the stream of a token."""
    token = tl.program_id(0).to(tl.int64)
    byte, place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, 8)
    bit = byte[:, None] * 8 + place[None, :]
    inside = bit < 8 * stream_bytes
    latent = tl.load(places + bit, mask=inside, other=0)
    right = tl.load(places + 8 * stream_bytes + bit, mask=inside, other=0)
    own = tl.load(found + token * r + latent, mask=inside & (latent < r), other=0).to(tl.int32)
    packed = tl.sum((own >> right & 1) << (7 - place)[None, :], axis=1)
    address = codes + token // per_text * code_batch + byte * code_stride + token % per_text
    tl.store(address, packed.to(tl.uint8), mask=byte < stream_bytes)


@triton.jit(do_not_specialize=["n"])
def _read_kernel(
    codes, code_batch, code_stride, scales, scale_batch, fields, centres, factor, out, r, n,
    depth: tl.constexpr,
):  # fmt: skip
    """Reconstruct a tile of latents and tokens."""
    sequence = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    latent = tl.program_id(1) * LATENTS + tl.arange(0, LATENTS)
    valid, chosen = token < n, latent < r
    codes += sequence * code_batch
    z = unpack(codes, code_stride, token, valid, fields, centres, latent, chosen, depth)
    z *= tl.load(factor + latent, mask=chosen, other=0.0)[:, None]
    z *= scales_of(scales + sequence * scale_batch + token, valid)[None, :]
    address = out + (sequence * r + latent[:, None]) * n + token[None, :]
    tl.store(address, z.to(out.dtype.element_ty), mask=chosen[:, None] & valid[None, :])
