"""Files of llama.cpp, written from the description of their format, one number at a time."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

Q8_BLOCK = 32


def slot_file(
    cache: DynamicCache,
    *,
    keys: str = "f16",
    values: str = "f16",
    transposed: bool = False,
    architecture: str | None = None,
    neighbours: bool = True,
    positions: Sequence[int] | None = None,
    streams: tuple[int, int] = (1, 0),
    prompt: bytes = b"words of a prompt   ",
    sequence: int = 0,
) -> bytes:
    """Return the slot of a cache (1 sequence), or the prompt cache of an architecture.

    `neighbours` says that keys are rotated in pairs of neighbours; `positions` are those of the
    cells, in their order; `streams` are the number of streams and the one with cells.
    """
    tokens = cache.get_seq_length()
    positions = range(tokens) if positions is None else positions
    parts = [struct.pack("<II", *((0x67677371, 3) if architecture is None else (0x6767736E, 10)))]
    parts.append(struct.pack("<I", len(prompt) // 4) + prompt)
    if architecture is not None:
        parts.append(struct.pack("<I", len(architecture)) + architecture.encode())
    parts.append(struct.pack("<I", streams[0]))
    for stream in range(streams[0]):
        parts.append(struct.pack("<I", tokens if stream == streams[1] else 0))
        if stream != streams[1]:
            continue
        parts += [struct.pack("<iIi", position, 1, sequence) for position in positions]
        parts.append(struct.pack("<II", transposed, len(cache.layers)))
        for layer in cache.layers:
            rows = neighbouring(layer.keys) if neighbours else layer.keys
            parts.append(plain(rows, keys, positions, layer.keys.shape[-1]))
        for layer in cache.layers:
            if transposed:
                rows = flat(layer.values, positions)
                parts.append(struct.pack("<iII", 1, 2, rows.shape[1]) + half(rows.T))
            else:
                parts.append(plain(layer.values, values, positions, 64))
    return b"".join(parts)


def neighbouring(keys: Tensor) -> Tensor:
    """Keys whose features i and i + d/2 of a head become 2i and 2i + 1."""
    moved, half_width = torch.empty_like(keys), keys.shape[-1] // 2
    for i in range(half_width):
        moved[..., 2 * i], moved[..., 2 * i + 1] = keys[..., i], keys[..., i + half_width]
    return moved


def plain(x: Tensor, kind: str, positions: Sequence[int], turned: int) -> bytes:
    """Rows of keys or values; heads of multiples of 64 are turned in q8_0."""
    if kind == "f16":
        rows = flat(x, positions)
        return struct.pack("<iQ", 1, 2 * rows.shape[1]) + half(rows)
    rows = flat(x.float(), positions)
    if x.shape[-1] % 64 == 0:
        matrix = torch.ones(1, 1)
        while len(matrix) < turned:
            matrix = torch.cat([torch.cat([matrix, matrix]), torch.cat([matrix, -matrix])], dim=1)
        rows = (rows.unflatten(1, (-1, turned)) @ matrix).flatten(1) / turned**0.5
    return struct.pack("<iQ", 8, rows.shape[1] // 32 * 34) + quantized(rows)


def flat(x: Tensor, positions: Sequence[int]) -> Tensor:
    """Rows of cells, (cells, features), of (1, heads, tokens, width)."""
    return x[0].transpose(0, 1).flatten(1)[list(positions)]


def half(x: Tensor) -> bytes:
    return np.ascontiguousarray(x.half().numpy()).astype("<f2").tobytes()


def quantized(x: Tensor) -> bytes:
    """Blocks of 32 numbers in q8_0."""
    parts = []
    for block in x.flatten().split(Q8_BLOCK):
        largest = block.abs().max()
        levels = torch.round(block * (127 / largest)) if largest else torch.zeros(Q8_BLOCK)
        parts.append(half(largest[None] / 127) + levels.to(torch.int8).numpy().tobytes())
    return b"".join(parts)
