"""Stored caches cut into chunks of tokens, each under a key that names all tokens up to its end.

A blob of a `Codec` is a chain of blocks whose payloads can be decoded in any chain with the same
tokens. Stored one by one, the chunks of a prefix are shared by all texts that begin with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from manifoldkv.plan.formats.entropy import BLOCK_TOKENS
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.serve.codec.blob import VERSION, Block, Header, read_blocks, read_header, write_blob

CHUNK_TOKENS = BLOCK_TOKENS
KEY_BYTES = 32


@dataclass(frozen=True)
class Chunks:
    """Chunks of `CHUNK_TOKENS` tokens of caches of one text each.

    Parameters
    ----------
    plan : CompressionPlan
        Of the codec.
    dtype : torch.dtype
        Of the caches.
    """

    plan: CompressionPlan
    dtype: torch.dtype

    def keys(self, ids: Sequence[int], salt: str = "") -> list[str]:
        """Return the keys of the whole chunks of a text, hashes chained from its first token.

        Other plans, models, dtypes and formats have other keys.

        Parameters
        ----------
        ids : sequence of int
            Token ids.
        salt : str
            Anything else that separates caches of the same tokens.
        """
        described = f"{VERSION} {self.plan.digest()} {self.dtype} {salt}".encode()
        digest = _hashed(self.plan.model_digest() + described)
        tokens, keys = np.asarray(ids, dtype="<u4"), []
        for end in range(CHUNK_TOKENS, len(tokens) + 1, CHUNK_TOKENS):
            digest = _hashed(digest + tokens[end - CHUNK_TOKENS : end].tobytes())
            keys.append(digest.hex())
        return keys

    def split(self, blob: bytes) -> list[bytes]:
        """Return the chunks of a blob of one text, whose tokens fill all of them."""
        header = read_header(blob)
        return [bytes(block.payload) for block in read_blocks(blob, header, 0, header.tokens)]

    def joined(self, chunks: Sequence[bytes]) -> bytes:
        """Return the blob of the first chunks of a text."""
        digest = bytes.fromhex(self.plan.digest())
        tokens = len(chunks) * CHUNK_TOKENS
        header = Header(self.dtype, 1, tokens, digest, self.plan.model_digest())
        starts = range(0, tokens, CHUNK_TOKENS)
        blocks = [Block(s, s + CHUNK_TOKENS, c) for s, c in zip(starts, chunks, strict=True)]
        return write_blob(header, blocks)


def _hashed(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=KEY_BYTES).digest()
