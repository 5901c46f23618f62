"""Chunks of a KV cache at positions that their store does not know, packed with a codec.

A packed chunk is, little-endian ::

    8 bytes   magic
    uint32    version
    uint32    position of the first token
    uint32    bytes of the blob
    16 bytes  BLAKE2b of the numbers above
    blob      of `Codec`, of keys rotated to the positions 0, 1, …
"""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from manifoldkv.core.errors import CacheError
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.rotary import Angles, rotation_of_keys
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.serve.codec.codec import Codec

MAGIC = b"mkvchunk"
VERSION = 1
MARGIN = 1.5
"""Bytes kept for a chunk over those of the plan's estimate.

With a plan of SmolLM2 for web text such text takes 1.05 to 1.07 times the estimate, an encyclopedia
1.11 to 1.14 and Python code 1.3 to 1.6.
"""

_FIXED = struct.Struct("<8sIII")
_CHECK_BYTES = 16
_HEADER_BYTES = _FIXED.size + _CHECK_BYTES


class ChunkCodec:
    """Packs chunks, keys and values of all layers for as many tokens each.

    Chunks begin at multiples of their length. A chunk's own place is found by its keys: of all
    places, rotating back from the right one gives the keys of the first layer that the plan
    describes best.

    Parameters
    ----------
    model : PreTrainedModel
        The model of the chunks.
    plan : CompressionPlan
        Of recipe ``"stored"``. Its sink tokens are uncompressed in every chunk.

    Raises
    ------
    ModelError, PlanError
        As `Codec`.
    """

    def __init__(self, model: PreTrainedModel, plan: CompressionPlan) -> None:
        self._codec, self._plan, self._decoder = Codec(model, plan), plan, Decoder.of(model)

    def nbytes(self, tokens: int) -> int:
        """Return the bytes that are kept for a packed chunk, its largest size."""
        expected = self._plan.nbytes(tokens, dtype=self._decoder.dtype)
        return _HEADER_BYTES + int(MARGIN * expected)

    def pack(self, chunk: Tensor) -> bytes:
        """Return the bytes of a chunk, (2, layers, n, features): keys and values of n tokens.

        Raises
        ------
        CacheError
            If it is of another shape, holds elements that are not finite, or takes more than
            `nbytes`.
        """
        tokens = self._check(chunk.shape)
        heads = chunk.to(self._decoder.dtype).cpu().unflatten(3, (self._decoder.kv_heads, -1))
        keys, values = heads.transpose(2, 3).unsqueeze(2)  # (L, 1, H_kv, n, d)
        start = self._start(keys[0])
        cache = DynamicCache(config=self._decoder.config)
        for index, device in enumerate(self._decoder.devices):
            moved = self._moved(index, keys[index], start, 0)
            cache.update(moved.to(device), values[index].to(device), index)
        blob = self._codec.encode(cache)
        fixed = _FIXED.pack(MAGIC, VERSION, start, len(blob))
        packed = b"".join([fixed, _check(fixed), blob])
        if len(packed) > self.nbytes(tokens):
            raise CacheError(
                f"a chunk of {tokens} tokens takes {len(packed):,} bytes, more than the "
                f"{self.nbytes(tokens):,} possible: calibrate the plan on such text"
            )
        return packed

    def unpack(self, packed: bytes, tokens: int) -> Tensor:
        """Return a chunk of `tokens` tokens, (2, layers, n, features).

        Parameters
        ----------
        packed : bytes
            From `pack`; bytes that follow are ignored.
        tokens : int
            Number of tokens of the chunk.

        Raises
        ------
        CacheError
            If the bytes are damaged, or of another version, plan, model or number of tokens.
        """
        start, blob = _parts(packed)
        if self._codec.tokens(blob) != tokens:
            raise CacheError(
                f"the packed chunk has {self._codec.tokens(blob)} tokens, not {tokens}"
            )
        cache = self._codec.decode(blob)
        if len(cache.layers[0].keys) != 1:
            raise CacheError(f"the packed chunk holds {len(cache.layers[0].keys)} sequences, not 1")
        keys = [self._moved(i, x.keys.cpu(), 0, start) for i, x in enumerate(cache.layers)]
        heads = torch.stack([*keys, *(layer.values.cpu() for layer in cache.layers)])[:, 0]
        return heads.transpose(1, 2).flatten(2).unflatten(0, (2, -1))

    def _check(self, shape: torch.Size) -> int:
        """Return the number of tokens of a chunk of all heads of the model."""
        layers, features = len(self._decoder.layers), self._decoder.features
        if len(shape) != 4 or shape[0] != 2 or shape[1] != layers or shape[3] != features:
            raise CacheError(
                f"a chunk of shape {tuple(shape)}, where the model has (2, {layers}, tokens, "
                f"{features}): a rank of tensor parallelism holds some heads only, and the plan "
                "is for all of them"
            )
        return shape[2]

    def _start(self, keys: Tensor) -> int:
        """Return the place of the first layer's keys, (1, H_kv, n, d), at which they cost least."""
        site, tokens = self._plan.layers[0].key, keys.shape[2]
        down = site.basis.down[0].float()
        mean = torch.zeros(site.features) if site.mean is None else site.mean
        costs = []
        for start in range(0, self._decoder.config.max_position_embeddings, tokens):
            plain = self._angles(0, start, tokens).inverse().tile(keys.float(), 0, tokens)
            rows = plain[0, :, self._plan.sinks :].transpose(0, 1).flatten(1)
            costs.append(float(((rows - mean) @ down).square().log1p().sum()))
        return tokens * min(range(len(costs)), key=costs.__getitem__)

    def _moved(self, layer: int, keys: Tensor, start: int, to: int) -> Tensor:
        """Return the keys of a layer, (1, H_kv, n, d), rotated from one first position to another.

        A scale of the rotation stays.
        """
        tokens = keys.shape[2]
        if start == to:
            return keys
        plain = self._angles(layer, start, tokens).inverse().tile(keys.float(), 0, tokens)
        return self._angles(layer, to, tokens).tile(plain, 0, tokens).to(keys.dtype)

    def _angles(self, layer: int, start: int, tokens: int) -> Angles:
        """Return the rotation of keys of a layer at consecutive positions."""
        like = torch.zeros((), device=self._decoder.devices[0])
        positions = torch.arange(start, start + tokens, device=like.device).unsqueeze(0)
        cos, sin = self._decoder.angles(layer, positions, like)
        rotate = rotation_of_keys(self._decoder.layers[layer], cos.shape[-1])
        return Angles(cos.cpu(), sin.cpu(), rotate)


def _parts(packed: bytes) -> tuple[int, bytes]:
    """Return the first position and the blob of a packed chunk."""
    if len(packed) < _HEADER_BYTES or packed[: len(MAGIC)] != MAGIC:
        raise CacheError("not a packed chunk (bad magic)")
    fixed = packed[: _FIXED.size]
    _, version, start, size = _FIXED.unpack(fixed)
    if version != VERSION:
        raise CacheError(
            f"the packed chunk is of version {version}, and this manifoldkv reads {VERSION}: pack "
            "it again"
        )
    if packed[_FIXED.size : _HEADER_BYTES] != _check(fixed):
        raise CacheError("the packed chunk is damaged")
    return start, packed[_HEADER_BYTES : _HEADER_BYTES + size]


def _check(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECK_BYTES).digest()
