"""Packed latents as Triton kernels read them.

Bytes are loaded for four neighbouring tokens at once, and their bits are cut out in words of 32
bits. So programs begin at a multiple of four tokens in memory, up to three before the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from math import ceil
from typing import Any, NamedTuple, TypeVar, cast

import torch
import triton
from torch import Tensor
from triton import language as tl

from manifoldkv.plan.formats.scales import LOWEST_SHORT, NAN_SHORT, SHORT_STEP

Function = TypeVar("Function", bound=Callable[..., Any])


class Constant(tl.constexpr):
    """A constant of kernels.

    At each launch Triton compares the constants of a kernel with those at the time of compilation.
    The comparison of `tl.constexpr` itself takes a tenth of the host time of a decode step.
    """

    def __ne__(self, other: object) -> bool:
        return self.value != getattr(other, "value", None)


TOKENS, LATENTS = Constant(128), Constant(32)  # of a tile
FIRST, STEP, SHORT = (Constant(x) for x in (LOWEST_SHORT, SHORT_STEP, NAN_SHORT))


def on_device(function: Function) -> Function:
    """Return a function whose kernels run on the device of its first argument."""

    @wraps(function)
    def on_its_device(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device_of(first):
            return function(first, *args, **kwargs)

    return cast(Function, on_its_device)


class Words(NamedTuple):
    """Packed latents as kernels take them.

    Parameters
    ----------
    codes : Tensor
        Memory of the latents from its start on, int32, four tokens each.
    first : int
        Words before those of the first token.
    batch, row : int
        Strides in words.
    scales : Tensor
        The same memory, uint8.
    scale_first, scale_batch : int
        Bytes before the last byte of the first token, which has its scale, rounded down to a
        multiple of 4, and stride.
    before : int
        Tokens of the first word that are before the first token, 0 to 3.
    """

    codes: Tensor
    first: int
    batch: int
    row: int
    scales: Tensor
    scale_first: int
    scale_batch: int
    before: int


def in_words(codes: Tensor) -> Words:
    """Return packed latents as kernels take them.

    Parameters
    ----------
    codes : Tensor
        (B, 1, bytes, n), uint8, a view with rows of multiples of 4 tokens in memory.
    """
    offset, size = int(codes.storage_offset()), codes.shape[2]
    before, batch, row = offset % 4, codes.stride(0), codes.stride(2)
    assert codes.stride(3) == 1
    assert not batch % 4
    assert not row % 4
    memory, first = start_of(codes), offset - before
    last = first + (size - 1) * row
    words = memory.view(torch.int32), first // 4, batch // 4, row // 4
    return Words(*words, memory, last, batch, before)


def zeros_beside(codes: Tensor, rows: int) -> Tensor:
    """Return zeros (B, rows, n), float32, aligned in memory as codes (B, 1, bytes, n) are."""
    before, n = codes.storage_offset() % 4, codes.shape[3]
    room = codes.new_zeros(len(codes), rows, ceil((before + n) / 16) * 16, dtype=torch.float32)
    return room[..., before : before + n]


def start_of(view: Tensor) -> Tensor:
    """Return the memory of a view from its start on."""
    return view.as_strided((view.untyped_storage().nbytes() // view.itemsize,), (1,), 0)


@triton.jit
def _joined(a, b, c, d):
    """Return every fourth token's numbers, (latents, words) each, as (latents, tokens)."""
    both = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(both, (a.shape[0], 4 * a.shape[1]))


@triton.jit
def _codeword(first, second, third, place, right, mask, multiplier, offset, unit):
    """Return the codewords whose states are in the bytes of three words at a place, 0 to 24."""
    upper = (first >> place & 255) << 16
    stream = upper | (second >> place & 255) << 8 | third >> place & 255
    mixed = (stream >> right & mask) * multiplier + offset
    return (((mixed << 16) >> 16) + (mixed >> 16)).to(tl.float32) * unit


@triton.jit
def unpack(
    codes, row, word, near, fields, centres, last, latent, chosen,
    depth: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return latents before their scales, (latents, tokens); 0 for those that are not chosen.

    Parameters are the packed latents and their tables, then the words and latents that are loaded.
    """
    there = chosen[:, None] & near[None, :]
    centre = tl.load(centres + latent, mask=chosen, other=0.0)[:, None]
    if depth == 0:
        table = tl.load(fields + latent * 3, mask=chosen, other=0)
        multiplier = tl.load(fields + latent * 3 + 1, mask=chosen, other=0)[:, None]
        offset = tl.load(fields + latent * 3 + 2, mask=chosen, other=0)[:, None]
        byte, right, beyond = table & 65535, (table >> 16 & 15)[:, None], table >> 20 & 15
        mask = ((1023 >> beyond) << beyond)[:, None]
        one = tl.load(codes + byte[:, None] * row + word[None, :], mask=there, other=0)
        byte = tl.minimum(byte + 1, last)
        two = tl.load(codes + byte[:, None] * row + word[None, :], mask=there, other=0)
        byte = tl.minimum(byte + 1, last)
        three = tl.load(codes + byte[:, None] * row + word[None, :], mask=there, other=0)
        a = _codeword(one, two, three, 0, right, mask, multiplier, offset, centre).to(dtype)
        b = _codeword(one, two, three, 8, right, mask, multiplier, offset, centre).to(dtype)
        c = _codeword(one, two, three, 16, right, mask, multiplier, offset, centre).to(dtype)
        d = _codeword(one, two, three, 24, right, mask, multiplier, offset, centre).to(dtype)
    else:
        code = latent[:, None] * 0 + word[None, :] * 0
        for field in tl.static_range(depth):
            table = tl.load(fields + latent * depth + field, mask=chosen, other=0)
            address = codes + (table & 65535)[:, None] * row + word[None, :]
            packed = tl.load(address, mask=there, other=0) >> (table >> 16 & 7)[:, None]
            bits = (table >> 22) * 0x01010101  # of the same field of four tokens
            code |= (packed & bits[:, None]) << (table >> 19 & 7)[:, None]
        a = ((code & 255).to(tl.float32) - centre).to(dtype)
        b = ((code >> 8 & 255).to(tl.float32) - centre).to(dtype)
        c = ((code >> 16 & 255).to(tl.float32) - centre).to(dtype)
        d = ((code >> 24 & 255).to(tl.float32) - centre).to(dtype)
    return _joined(a, b, c, d)


@triton.jit
def scale_of(code):
    """Return the scale of a code: the first bits of float16 behind its sign."""
    return (code.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def short_scale_of(code):
    """Return the scale of a code of 4 bits."""
    scale = scale_of(code * STEP + FIRST)  # in this order for the interpreter
    return tl.where(code == SHORT, float("nan"), scale)


@triton.jit
def scales_of(address, valid, depth: tl.constexpr):
    """Return the scales of tokens, which are short if the tokens are trellis-coded (depth 0)."""
    code = tl.load(address, mask=valid, other=0)
    return short_scale_of((code & SHORT).to(tl.int32)) if depth == 0 else scale_of(code)
