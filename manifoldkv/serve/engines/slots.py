"""Files of llama.cpp with a KV cache: saved slots and prompt caches.

`llama_state_seq_save_file` writes slots and `llama_state_save_file` prompt caches. All numbers are
little-endian ::

    uint32    magic, "ggsq" of a slot, "ggsn" of a prompt cache
    uint32    version, 3 of a slot, 10 of a prompt cache
    uint32    number of words of the prompt, and these words, uint32 each
    string    architecture, of a prompt cache only: uint32 length, and bytes
    uint32    number of streams, and for each stream
        uint32    number of cells; nothing follows 0
        12 bytes  of each cell: int32 position, uint32 number of sequences, int32 sequence
        uint32    1 if values are transposed, as without flash attention
        uint32    number of layers
        keys      of each layer: int32 type, uint64 bytes of a row, and a row for each cell
        values    of each layer: as keys; or transposed: int32 type, uint32 bytes of an element,
                  uint32 number of features, and the elements of all cells for each feature

A *frame* is such a file without the rows, from `type` to `type`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manifoldkv.core.errors import CacheError

VERSIONS = {0x67677371: ("slot", 3), 0x6767736E: ("prompt cache", 10)}
"""Kind and version of a file by its magic."""
MOST_STREAMS = 256
BLOCKS = {1: (1, 2), 8: (32, 34)}
"""Elements and bytes of a block of a ggml type: f16, and q8_0, a scale in f16 and 32 int8."""
F16, Q8_0 = 1, 8

_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_BLOCK = np.dtype([("scale", "<f2"), ("levels", "i1", 32)])


@dataclass(frozen=True)
class Rows:
    """Where and how the keys or the values of a layer stand in a file.

    Parameters
    ----------
    site : str
        ``"key"`` or ``"value"``.
    offset : int
        Bytes of the frame before them.
    cells, features : int
        Number of tokens, and of features of each.
    ggml_type : int
        `F16` or `Q8_0`.
    transposed : bool
        Whether features are rows and tokens columns.
    """

    site: str
    offset: int
    cells: int
    features: int
    ggml_type: int
    transposed: bool

    @property
    def nbytes(self) -> int:
        """Return the bytes of all rows."""
        elements, nbytes = BLOCKS[self.ggml_type]
        return self.cells * self.features // elements * nbytes

    def numbers(self, content: memoryview) -> Tensor:
        """Return the numbers of these rows, (cells, features), float32 or float16."""
        if self.ggml_type == Q8_0:
            blocks = np.frombuffer(content, _BLOCK)
            scales = torch.from_numpy(blocks["scale"].astype(np.float32))
            x = torch.from_numpy(blocks["levels"].astype(np.float32)) * scales[:, None]
            return x.reshape(self.cells, self.features)
        halves = torch.from_numpy(np.frombuffer(content, "<f2").astype(np.float16))
        if self.transposed:
            return halves.reshape(self.features, self.cells).T
        return halves.reshape(self.cells, self.features)

    def content(self, numbers: Tensor) -> bytes:
        """Return the bytes of numbers, (cells, features)."""
        if self.ggml_type == Q8_0:
            return _quantized(numbers.float().numpy())
        halves = numbers.half().numpy().astype("<f2")
        return (halves.T if self.transposed else halves).tobytes()


@dataclass(frozen=True)
class Slot:
    """A file without its keys and values.

    Parameters
    ----------
    frame : bytes
        All other bytes of the file.
    architecture : str or None
        Of the model, in llama.cpp's words; None in a slot.
    order : Tensor
        Cell of each position, 0, 1, …, (n,), int64.
    keys, values : list of Rows
        By layer.
    """

    frame: bytes
    architecture: str | None
    order: Tensor
    keys: list[Rows]
    values: list[Rows]

    @property
    def rows(self) -> list[Rows]:
        """Return all rows, in the order of the file."""
        return self.keys + self.values

    def file(self, contents: list[bytes]) -> bytes:
        """Return the file with the contents of all rows, in their order."""
        parts, place = [], 0
        for rows, content in zip(self.rows, contents, strict=True):
            parts += [self.frame[place : rows.offset], content]
            place = rows.offset
        return b"".join([*parts, self.frame[place:]])


def read_slot(content: bytes) -> tuple[Slot, list[memoryview]]:
    """Return a file's description and the contents of its rows, in their order.

    Raises
    ------
    CacheError
        If it is not a slot or prompt cache of a known version, damaged, or holds something else
        than one sequence at positions 0, 1, … with keys and values in f16 or q8_0.
    """
    reader = _Reader(content, whole=True)
    return _slot(reader), reader.rows


def read_frame(frame: bytes) -> Slot:
    """Return the description of a file without its rows. Raises `CacheError` as `read_slot`."""
    return _slot(_Reader(frame, whole=False))


class _Reader:
    """Reads a file, or a frame, from its first byte to its last."""

    def __init__(self, content: bytes, whole: bool) -> None:
        self._rest, self._whole = memoryview(content), whole
        self._frame: list[memoryview] = []
        self.offset = 0
        self.rows: list[memoryview] = []

    def take(self, nbytes: int, what: str) -> memoryview:
        """Return the next bytes of the frame."""
        taken = self._next(nbytes, what)
        self._frame.append(taken)
        self.offset += nbytes
        return taken

    def number(self, form: str, what: str) -> Any:
        """Return the next number of the frame, in a form of `struct`."""
        return struct.unpack("<" + form, self.take(struct.calcsize(form), what))[0]

    def skip(self, rows: Rows, what: str) -> Rows:
        """Return some rows after a step over their content, which a frame has not."""
        if self._whole:
            self.rows.append(self._next(rows.nbytes, what))
        return rows

    def frame(self) -> bytes:
        """Return the frame, or refuse what follows it."""
        if self._rest:
            raise CacheError(f"{len(self._rest)} bytes follow the cells of the slot")
        return b"".join(self._frame)

    def _next(self, nbytes: int, what: str) -> memoryview:
        if nbytes > len(self._rest):
            raise CacheError(f"the slot ends within its {what}: save it again")
        taken, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return taken


def _slot(reader: _Reader) -> Slot:
    magic = reader.number("I", "magic")
    if magic not in VERSIONS:
        raise CacheError("not a saved slot or prompt cache of llama.cpp (bad magic)")
    (kind, expected), version = VERSIONS[magic], reader.number("I", "version")
    if version != expected:
        raise CacheError(
            f"the {kind} is of version {version}, readable is {expected}: save it with the "
            "llama.cpp of llama-cpp-python 0.3.36"
        )
    reader.take(4 * reader.number("I", "prompt"), "prompt")
    architecture = None
    if kind == "prompt cache":
        name = reader.take(reader.number("I", "architecture"), "architecture")
        architecture = bytes(name).decode("ascii", "replace")
    streams, found = reader.number("I", "streams"), []
    if not 0 < streams <= MOST_STREAMS:
        raise CacheError(f"the slot has {streams} streams, llama.cpp 1 to {MOST_STREAMS}")
    for _ in range(streams):
        cells = reader.number("I", "cells")
        if cells:
            order = _order(reader.take(_CELL.itemsize * cells, "cells"))
            found.append((order, *_rows(reader, cells)))
    if len(found) != 1:
        raise CacheError(f"the slot holds {len(found)} sequences: save one with tokens")
    return Slot(reader.frame(), architecture, *found[0])


def _order(content: memoryview) -> Tensor:
    """Return the cell of each position, refused unless they are 0, 1, … of one sequence."""
    cells = np.frombuffer(content, _CELL)
    if (cells["sequences"] != 1).any() or (cells["sequence"] != cells["sequence"][0]).any():
        raise CacheError("the slot holds cells of several sequences: save one sequence as a slot")
    order = np.argsort(cells["position"], kind="stable")
    positions = cells["position"][order]
    if (positions != np.arange(len(cells))).any():
        raise CacheError(
            f"the slot holds {len(cells)} tokens at positions {positions[0]} to {positions[-1]}, "
            "must be 0, 1, … without gaps: save it before llama.cpp shifts its context"
        )
    return torch.from_numpy(order)


def _rows(reader: _Reader, cells: int) -> tuple[list[Rows], list[Rows]]:
    """Return the rows of keys and of values, by layer."""
    transposed = reader.number("I", "layers")
    if transposed > 1:
        raise CacheError(f"the slot is damaged: values are transposed or not, got {transposed}")
    layers, of_values = range(reader.number("I", "layers")), _transposed if transposed else _plain
    keys = [_plain(reader, cells, "key", layer) for layer in layers]
    return keys, [of_values(reader, cells, "value", layer) for layer in layers]


def _plain(reader: _Reader, cells: int, site: str, layer: int) -> Rows:
    what = f"{site}s of layer {layer}"
    kind, nbytes = _type(reader, what), reader.number("Q", what)
    elements, block = BLOCKS[kind]
    if not nbytes or nbytes % block:
        raise CacheError(
            f"the {what} of the slot have rows of {nbytes} bytes, must be a multiple of {block}"
        )
    rows = Rows(site, reader.offset, cells, nbytes // block * elements, kind, transposed=False)
    return reader.skip(rows, what)


def _transposed(reader: _Reader, cells: int, site: str, layer: int) -> Rows:
    what = f"{site}s of layer {layer}"
    kind, nbytes = _type(reader, what), reader.number("I", what)
    features = reader.number("I", what)
    if (kind, nbytes) != (F16, 2) or not features:
        raise CacheError(
            f"the {what} of the slot are transposed and not f16: save it with flash attention"
        )
    return reader.skip(Rows(site, reader.offset, cells, features, kind, transposed=True), what)


def _type(reader: _Reader, what: str) -> int:
    kind = int(reader.number("i", what))
    if kind not in BLOCKS:
        raise CacheError(
            f"the {what} of the slot are of ggml type {kind}, readable are f16 (1) and q8_0 (8): "
            "start llama.cpp with these types of cache"
        )
    return kind


def _quantized(x: np.ndarray) -> bytes:
    """Return numbers in q8_0: of 32 each, the largest is ±127 steps."""
    x = x.reshape(-1, 32)
    largest = np.abs(x).max(axis=1, keepdims=True)
    blocks = np.empty(len(x), _BLOCK)
    blocks["scale"] = (largest / 127)[:, 0]
    blocks["levels"] = np.rint(x * np.divide(127, largest, where=largest > 0, out=0 * largest))
    return blocks.tobytes()
