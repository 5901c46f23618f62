"""Format of a stored cache: a header and blocks of tokens, without executable content.

All numbers are little-endian. The header (`HEADER_BYTES`) is ::

    8 bytes   magic
    uint32    version
    uint32    dtype of uncompressed tokens, an index of DTYPES
    uint32    sequences
    uint32    tokens of each
    32 bytes  digest of the plan
    32 bytes  digest of the model
    8 bytes   reserved, 0
    16 bytes  BLAKE2b of the header so far

and each block is ::

    uint32    bytes of the payload
    uint32    tokens
    8 bytes   BLAKE2b, keyed by both digests, of: dtype, sequences, first token and number of tokens
              (uint32 each), the checksum of the previous block (0 for the first), and the payload
    payload

Checksums refuse blocks of other caches. They do not depend on the total number of tokens, so that
blocks can be appended without changes to earlier ones.

A payload is padded to 1 / `LARGEST_EXPANSION` of the bytes that it is decoded to, which bounds the
memory that a blob can request.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from manifoldkv.core.errors import CodecError
from manifoldkv.plan.formats.entropy import BLOCK_BYTES, BLOCK_TOKENS, HEADER_BYTES

MAGIC = b"mkvcache"
VERSION = 3
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LARGEST_EXPANSION = 1024
"""Largest ratio of the bytes of a cache to those of its blob."""
EMPTY_NAME = "the name of the stored cache's file is empty"

_HEADER = struct.Struct("<8sIIII32s32s8x")
_BLOCK = struct.Struct("<II8s")
_CHECK_BYTES = HEADER_BYTES - _HEADER.size
_FIRST = bytes(8)
"""Checksum in place of a previous block's in the first block."""


@dataclass(frozen=True)
class Header:
    """Header of a blob.

    Parameters
    ----------
    dtype : torch.dtype
        Dtype of the cache.
    sequences, tokens : int
        Number of sequences, and of tokens of each.
    plan, model : bytes
        Digests of plan and model, 32 bytes each.
    """

    dtype: torch.dtype
    sequences: int
    tokens: int
    plan: bytes
    model: bytes


@dataclass(frozen=True)
class Block:
    """Payload of the tokens from `start` to `stop` of all sequences."""

    start: int
    stop: int
    payload: bytes | memoryview


def read_blob(path: str | Path) -> bytes:
    """Return the bytes of a file.

    Raises
    ------
    CodecError
        If it cannot be read.
    """
    if not str(path):
        raise CodecError(EMPTY_NAME)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CodecError(f"cannot read {path}: {error.strerror}") from error


def write_blob(header: Header, blocks: list[Block]) -> bytes:
    """Return the bytes of a blob of consecutive blocks from token 0."""
    fixed = _HEADER.pack(
        MAGIC,
        VERSION,
        DTYPES.index(header.dtype),
        header.sequences,
        header.tokens,
        header.plan,
        header.model,
    )
    parts, check = [fixed, _check(fixed, _CHECK_BYTES)], _FIRST
    for block in blocks:
        check = _block_check(header, block, check)
        count = block.stop - block.start
        parts += [_BLOCK.pack(len(block.payload), count, check), bytes(block.payload)]
    return b"".join(parts)


def extended(header: Header, tokens: int) -> Header:
    """Return the header of a blob with `tokens` more tokens."""
    return replace(header, tokens=header.tokens + tokens)


def read_header(blob: bytes) -> Header:
    """Return the header of a blob.

    Raises
    ------
    CodecError
        If the bytes are not a stored cache of this version, or are damaged.
    """
    if len(blob) < HEADER_BYTES or blob[: len(MAGIC)] != MAGIC:
        raise CodecError("not a stored cache (bad magic)")
    fixed = blob[: _HEADER.size]
    _, version, dtype, sequences, tokens, plan, model = _HEADER.unpack(fixed)
    if version != VERSION:
        raise CodecError(
            f"the stored cache is of version {version}, and this manifoldkv reads {VERSION}: "
            "encode the cache again"
        )
    if blob[_HEADER.size : HEADER_BYTES] != _check(fixed, _CHECK_BYTES):
        raise CodecError("the header of the stored cache is damaged")
    if dtype >= len(DTYPES) or not sequences or not tokens:
        raise CodecError("the header of the stored cache is damaged")
    return Header(DTYPES[dtype], sequences, tokens, plan, model)


def read_blocks(blob: bytes, header: Header, token_bytes: int, stop: int) -> Iterator[Block]:
    """Yield the blocks of the tokens before `stop`, after a check of the lengths of all blocks.

    Parameters
    ----------
    blob : bytes
        Whole blob.
    header : Header
        Header of the blob.
    token_bytes : int
        Bytes of a token of one sequence in the uncompressed cache.
    stop : int
        Number of tokens to read, at most those of the blob.

    Raises
    ------
    CodecError
        If the length of the blob is not that of its blocks, or a block is damaged.
    """
    view, blocks, offset, start = memoryview(blob), [], HEADER_BYTES, 0
    while start < header.tokens:
        if len(blob) - offset < BLOCK_BYTES:
            raise CodecError(f"the stored cache ends after {start} of {header.tokens} tokens")
        size, count, check = _BLOCK.unpack_from(blob, offset)
        offset += BLOCK_BYTES
        if len(blob) - offset < size:
            raise CodecError(f"the stored cache ends after {start} of {header.tokens} tokens")
        if not 0 < count <= min(BLOCK_TOKENS, header.tokens - start):
            raise CodecError(f"the block at token {start} of the stored cache is damaged")
        if size < least_payload(header.sequences * count * token_bytes):
            raise CodecError(
                f"the block at token {start} of the stored cache requests too much memory"
            )
        blocks.append((start, count, offset, size, check))
        offset, start = offset + size, start + count
    if offset != len(blob):
        raise CodecError(f"{len(blob) - offset} bytes follow the stored cache")
    before = _FIRST
    for start, count, offset, size, check in blocks:
        if start >= stop:
            return
        block = Block(start, start + count, view[offset : offset + size])
        if check != _block_check(header, block, before):
            raise CodecError(
                f"the block at token {start} of the stored cache is damaged, or of another one"
            )
        before = check
        yield block


def least_payload(uncompressed_bytes: int) -> int:
    """Return the size of a padded payload in bytes."""
    return -(-uncompressed_bytes // LARGEST_EXPANSION)


def _check(content: bytes, size: int) -> bytes:
    return hashlib.blake2b(content, digest_size=size).digest()


def _block_check(header: Header, block: Block, before: bytes) -> bytes:
    """Return the checksum of a block after the checksum of the previous one."""
    count = block.stop - block.start
    dtype = DTYPES.index(header.dtype)
    position = struct.pack("<IIII", dtype, header.sequences, block.start, count)
    hashed = hashlib.blake2b(position, digest_size=8, key=header.plan[:32] + header.model[:32])
    hashed.update(before)
    hashed.update(block.payload)
    return hashed.digest()
