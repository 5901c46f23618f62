"""Saved slots and prompt caches of llama.cpp, packed with a codec.

A packed file is, little-endian ::

    8 bytes   magic
    uint32    version
    uint32    bytes of the compressed frame
    uint32    bytes of the frame, at most `LARGEST_EXPANSION` times as many
    16 bytes  BLAKE2b of all other bytes of the file
    frame     of `slots`, compressed by zlib
    blob      of `Codec`, float16

llama.cpp keeps keys and values in another basis than transformers. Models of architecture ``llama``
have rotated pairs of features next to each other, and transformers in two halves of a head. Caches
in q8_0 of heads that are a multiple of 64 wide are multiplied by a Hadamard matrix: keys by the
largest that divides a head, values by one of 64.
"""

from __future__ import annotations

import hashlib
import struct
import zlib

import torch
from scipy.linalg import hadamard
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from manifoldkv.codec.blob import LARGEST_EXPANSION
from manifoldkv.codec.codec import Codec
from manifoldkv.errors import CacheError
from manifoldkv.integrations.slots import Q8_0, Rows, Slot, read_frame, read_slot
from manifoldkv.models.decoder import Decoder
from manifoldkv.modes import in_own_modes
from manifoldkv.plan.plan import CompressionPlan

NEIGHBOURS = {"llama": True, "qwen2": False, "qwen3": False}
"""Whether llama.cpp rotates neighbouring features, by architecture; halves of a head otherwise."""
HADAMARD = 64
"""Smallest Hadamard matrix, and that of values."""
MAGIC = b"mkvslots"
VERSION = 1
LARGEST_EXCESS = 2
"""Largest size of a blob relative to the plan's estimate; keys in another order take 5 to 9."""

_FIXED = struct.Struct("<8sIII")
_CHECK_BYTES = 16


@in_own_modes
def pack_slot(content: bytes, model: PreTrainedModel, plan: CompressionPlan) -> bytes:
    """Return the packed bytes of a saved slot or prompt cache of llama.cpp.

    Parameters
    ----------
    content : bytes
        File of llama.cpp: one sequence at positions 0, 1, …, keys and values in f16 or q8_0.
    model : PreTrainedModel
        The same model in transformers, in float16. Its weights are compared with the plan's, and
        may stay on disk.
    plan : CompressionPlan
        Of recipe ``"stored"``.

    Raises
    ------
    ModelError, PlanError
        As `Codec`.
    CacheError
        If the file is damaged, of another version or model, or holds another cache.
    """
    codec, seat = Codec(model, plan), _Seat(model)
    slot, contents = read_slot(content)
    seat.check(slot)
    sites = [seat.read(rows, part, slot) for rows, part in zip(slot.rows, contents, strict=True)]
    cache = DynamicCache(config=seat.decoder.config)
    for index, device in enumerate(seat.decoder.devices):
        keys, values = sites[index], sites[len(slot.keys) + index]
        cache.update(keys.to(device), values.to(device), index)
    blob = codec.encode(cache)
    expected = plan.nbytes(len(slot.order), dtype=seat.decoder.dtype)
    if len(blob) > LARGEST_EXCESS * expected:
        raise CacheError(
            f"the slot would take {len(blob):,} bytes where the plan expects {expected:,}: save it "
            "without --rope-scaling, --rope-freq-base and LLAMA_ATTN_ROT_DISABLE, or calibrate the "
            "plan on such text"
        )
    frame = zlib.compress(slot.frame, 9)
    fixed = _FIXED.pack(MAGIC, VERSION, len(frame), len(slot.frame))
    return b"".join([fixed, _check(fixed, frame, blob), frame, blob])


@in_own_modes
def unpack_slot(packed: bytes, model: PreTrainedModel, plan: CompressionPlan) -> bytes:
    """Return the file of llama.cpp that was packed, with the errors of the codec in its numbers.

    All other bytes are those of the original file. Parameters are those of `pack_slot`.

    Raises
    ------
    ModelError, PlanError
        As `Codec`.
    CacheError
        If the packed bytes are damaged, or of another version, plan or model.
    """
    codec, seat = Codec(model, plan), _Seat(model)
    slot, blob = read_packed(packed)
    seat.check(slot)
    if codec.tokens(blob) != len(slot.order):
        raise CacheError(
            f"the packed slot is damaged: {codec.tokens(blob)} tokens for {len(slot.order)} cells"
        )
    cache = codec.decode(blob)
    if len(cache.layers[0].keys) != 1:
        raise CacheError(f"the packed slot holds {len(cache.layers[0].keys)} sequences, must be 1")
    sites = [layer.keys for layer in cache.layers] + [layer.values for layer in cache.layers]
    contents = [seat.write(rows, x, slot) for rows, x in zip(slot.rows, sites, strict=True)]
    return slot.file(contents)


def read_packed(packed: bytes) -> tuple[Slot, bytes]:
    """Return the slot and the blob of a packed file.

    Raises
    ------
    CacheError
        If it is damaged, or of another version.
    """
    if len(packed) < _FIXED.size + _CHECK_BYTES or packed[: len(MAGIC)] != MAGIC:
        raise CacheError("not a packed slot (bad magic)")
    _, version, size, whole = _FIXED.unpack_from(packed)
    if version != VERSION:
        raise CacheError(
            f"the packed slot is of version {version}, and this manifoldkv reads {VERSION}: pack "
            "the slot again"
        )
    start = _FIXED.size + _CHECK_BYTES
    frame, blob = packed[start : start + size], packed[start + size :]
    if packed[_FIXED.size : start] != _check(packed[: _FIXED.size], frame, blob):
        raise CacheError("the packed slot is damaged")
    if whole > LARGEST_EXPANSION * size:
        raise CacheError("the packed slot requests too much memory")
    reader = zlib.decompressobj()
    try:
        content = reader.decompress(frame, whole + 1)
    except zlib.error as error:
        raise CacheError("the packed slot is damaged") from error
    if len(content) != whole or not reader.eof or reader.unused_data:
        raise CacheError("the packed slot is damaged")
    return read_frame(content), blob


class _Seat:
    """Keys and values of a model as llama.cpp keeps them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.decoder = Decoder.of(model)
        self._family = self.decoder.config.model_type
        if self._family not in NEIGHBOURS:
            raise CacheError(
                f"slots of a model of type {self._family!r} cannot be packed: possible are "
                f"{', '.join(NEIGHBOURS)}"
            )
        self._neighbours = NEIGHBOURS[self._family]

    def check(self, slot: Slot) -> None:
        """Raise `CacheError` unless a file has the shape of the model."""
        if slot.architecture not in (None, self._family):
            raise CacheError(
                f"the prompt cache is of architecture {slot.architecture!r}, the model of "
                f"{self._family!r}"
            )
        layers, features = len(self.decoder.layers), self.decoder.features
        if len(slot.keys) != layers:
            raise CacheError(f"the slot has {len(slot.keys)} layers, the model {layers}")
        for rows in slot.rows:
            if rows.features != features:
                raise CacheError(
                    f"the slot has {rows.features} features per token and layer, the model "
                    f"{features}"
                )

    def read(self, rows: Rows, content: memoryview, slot: Slot) -> Tensor:
        """Return keys or values, (1, H_kv, n, d), in the dtype of the model."""
        x = rows.numbers(content)[slot.order].unflatten(1, (self.decoder.kv_heads, -1))
        x = self._turned(x, rows)
        if self._neighbours and rows.site == "key":
            x = x.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2)
        return x.transpose(0, 1).unsqueeze(0).to(self.decoder.dtype)

    def write(self, rows: Rows, x: Tensor, slot: Slot) -> bytes:
        """Return the content of rows of keys or values, (1, H_kv, n, d)."""
        x = x[0].transpose(0, 1).cpu()
        if self._neighbours and rows.site == "key":
            x = x.unflatten(2, (2, -1)).transpose(2, 3).flatten(2)
        flat = self._turned(x, rows).flatten(1)
        cells = torch.empty_like(flat)
        cells[slot.order] = flat
        return rows.content(cells)

    def _turned(self, x: Tensor, rows: Rows) -> Tensor:
        """Return heads, (n, H_kv, d), times the Hadamard matrix of q8_0, which is its inverse."""
        width = self.decoder.head_dim
        if rows.ggml_type != Q8_0 or width % HADAMARD:
            return x
        size = width & -width if rows.site == "key" else HADAMARD  # the largest power of 2 in width
        matrix = torch.from_numpy(hadamard(size)).float() / size**0.5
        return (x.float().unflatten(2, (-1, size)) @ matrix).flatten(2)


def _check(*parts: bytes) -> bytes:
    """Return the checksum of some bytes."""
    hashed = hashlib.blake2b(digest_size=_CHECK_BYTES)
    for part in parts:
        hashed.update(part)
    return hashed.digest()
