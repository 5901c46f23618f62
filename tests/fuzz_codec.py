"""Fuzzing of stored caches: mutated blocks with right checksums are refused or decoded.

    NUMBA_BOUNDSCHECK=1 python -m tests.fuzz_codec 1000000

With Numba's checks of bounds, any read or write outside an array ends the run, as does any
exception but `CodecError`; the seed and the mutations that caused it are printed.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from tqdm import trange
from transformers import DynamicCache

from manifoldkv import Codec
from manifoldkv.core.errors import CodecError
from manifoldkv.serve.codec import blob as blobs
from tests.stored import TOKENS, filled, stored_model, stored_plan


def corpus(codec: Codec) -> list[tuple[blobs.Header, bytes]]:
    """Headers and payloads of blocks: with ids and without, outliers, sequences, few tokens."""
    found, plan = [], stored_plan()
    digests = bytes.fromhex(plan.digest()), plan.model_digest()
    for sequences, tokens, ids, outlier in (
        (1, 12, True, 1.0),
        (2, 7, False, 1.0),
        (1, 5, True, 1e4),
        (2, 30, True, 100.0),
        (1, 3, False, 1.0),
    ):
        text = TOKENS[:sequences, :tokens]
        stock = filled(stored_model(), text)
        cache = DynamicCache(config=stored_model().config)
        for index, layer in enumerate(stock.layers):
            cache.update(layer.keys * outlier ** (index == 1), layer.values, index)
        blob = codec.encode(cache, text if ids else None)
        payload = blob[blobs.HEADER_BYTES + blobs.BLOCK_BYTES :]
        found.append((blobs.Header(torch.float32, sequences, tokens, *digests), payload))
    return found


def mutated(payload: bytes, random: np.random.Generator) -> bytes:
    """Change, drop or repeat bytes, half of the time among the first, which hold lengths."""
    changed = bytearray(payload)
    for _ in range(random.integers(1, 5)):
        place = int(random.integers(0, len(changed) if random.random() < 0.5 else 64))
        kind = random.integers(0, 3)
        if kind == 0:
            changed[place % len(changed)] = int(random.integers(0, 256))
        elif kind == 1:
            size = int(random.integers(1, 9))
            changed[place : place + size] = random.bytes(size)
        elif len(changed) > 1:
            stop = place + int(random.integers(1, 40))
            changed[place:stop] = changed[place:stop] * int(random.integers(0, 3))
            changed = changed or bytearray(1)
    return bytes(changed)


def main(count: int, seed: int = 0) -> None:
    codec = Codec(stored_model(), stored_plan())
    blocks, random, refused = corpus(codec), np.random.default_rng(seed), 0
    for index in trange(count):
        header, payload = blocks[index % len(blocks)]
        tried = mutated(payload, random)
        blob = blobs.write_blob(header, [blobs.Block(0, header.tokens, tried)])
        try:
            cache = codec.decode(blob)
        except CodecError:
            refused += 1
            continue
        assert cache.get_seq_length() == header.tokens, (seed, index)
    print(f"{count} mutated blocks, seed {seed}: {refused} refused, {count - refused} decoded")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
