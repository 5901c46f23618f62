"""Stored caches and caches to be stored that are refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from manifoldkv import Codec, CompressionPlan
from manifoldkv.core.errors import CacheError, PlanError
from manifoldkv.models.decoder import Decoder
from manifoldkv.serve.codec import blob as blobs
from tests.families import tiny_model
from tests.plans import random_plan
from tests.stored import TOKENS, filled, some_tokens, stored_model, stored_plan, tensors


@pytest.mark.parametrize("cut", [0, 5, 111, 112, 120, 400, -1])
def test_what_is_cut_off(codec: Codec, blob: bytes, cut: int) -> None:
    with pytest.raises(CacheError, match=r"not a stored cache|ends after"):
        codec.decode(blob[:cut])


def test_what_ends_with_a_block(codec: Codec, blob: bytes) -> None:
    (size,) = struct.unpack_from("<I", blob, 112)
    with pytest.raises(CacheError, match="ends after 256 of 300 tokens"):
        codec.decode(blob[: 112 + 16 + size])


def test_what_follows(codec: Codec, blob: bytes) -> None:
    with pytest.raises(CacheError, match="3 bytes follow"):
        codec.decode(blob + b"abc")


@given(st.data())
@settings(max_examples=60)
def test_any_damaged_byte(data: st.DataObject) -> None:
    codec, tokens = Codec(stored_model(), stored_plan()), TOKENS[:1, :30]
    blob = bytearray(codec.encode(filled(stored_model(), tokens), tokens))
    place = data.draw(st.integers(0, len(blob) - 1))
    blob[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CacheError):
        codec.decode(bytes(blob))


def test_another_model_or_plan(blob: bytes) -> None:
    other = tiny_model("llama", torch.float32, seed=1, max_position_embeddings=1024)
    plan = stored_plan().transferred_to(Decoder.of(other))
    with pytest.raises(CacheError, match="that of another model"):
        Codec(other, plan).decode(blob)
    with pytest.raises(CacheError, match="another plan for this model"):
        Codec(stored_model(), stored_plan(ratio=0.3)).decode(blob)
    with pytest.raises(PlanError, match="other weights"):
        Codec(other, stored_plan())


@pytest.mark.parametrize("version", [0, 2, 4])
def test_another_version(codec: Codec, blob: bytes, version: int) -> None:
    other = blob[:8] + struct.pack("<I", version) + blob[12:]
    with pytest.raises(CacheError, match=rf"version {version}.* reads 3: encode .* again$"):
        codec.decode(other)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_block_of_another_cache_of_the_plan(codec: Codec, place: int) -> None:
    texts = [some_tokens(2, 600, seed) for seed in (3, 4)]
    stored = [codec.encode(filled(stored_model(), text), text) for text in texts]
    (header, *mine), (_, *other) = (parts_of(blob) for blob in stored)
    assert header + b"".join(mine) == stored[0]
    mine[place] = other[place]
    with pytest.raises(CacheError, match=r"the block at token \d+ of the stored cache is dama"):
        codec.decode(header + b"".join(mine))
    if place:  # what comes before it is read
        assert codec.decode(header + b"".join(mine), 256).get_seq_length() == 256


def test_an_appended_block_of_another_cache(codec: Codec) -> None:
    """Blocks are chained through `append` too."""
    model, texts = stored_model(), [some_tokens(1, 40, seed) for seed in (3, 4)]
    stored = []
    for text in texts:
        blob = codec.encode(filled(model, text[:, :20]), text)
        stored.append(codec.append(blob, filled(model, text), text))
        assert torch.equal(codec.input_ids(stored[-1]), text)
    (header, first, _), (_, _, second) = (parts_of(blob) for blob in stored)
    with pytest.raises(CacheError, match="the block at token 20 of the stored cache is damag"):
        codec.decode(header + first + second)


def test_plans_of_other_recipes() -> None:
    model = stored_model()
    with pytest.raises(PlanError, match="no tables of symbols"):
        Codec(model, random_plan(model))


def test_caches_that_cannot_be_stored(codec: Codec, stock: DynamicCache) -> None:
    with pytest.raises(CacheError, match="holds no tokens"):
        codec.encode(DynamicCache(config=stored_model().config))
    with pytest.raises(CacheError, match="DynamicCache"):
        codec.encode("a cache")
    for wrong in (torch.nan, torch.inf, 1e30):
        cache = filled(stored_model(), TOKENS[:, :20])
        cache.layers[2].keys[0, 1, 9, 3] = wrong
        with pytest.raises(CacheError, match="not finite, or far too large"):
            codec.encode(cache)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("site", ["keys", "values"])
@pytest.mark.parametrize("token", [0, 3])
def test_first_tokens_that_are_not_finite(
    codec: Codec, token: int, site: str, wrong: float
) -> None:
    cache = filled(stored_model(), TOKENS[:, :20])
    getattr(cache.layers[1], site)[1, 0, token, 2] = wrong
    with pytest.raises(CacheError, match="not finite"):
        codec.encode(cache)


def test_tokens_that_are_not_there(codec: Codec, blob: bytes) -> None:
    for tokens in (0, 301, -1, 1.5, 2.0, True, "5"):
        with pytest.raises(CacheError, match=f"1 to 300 tokens, not {tokens!r}"):
            codec.decode(blob, tokens)
    assert codec.decode(blob, np.int64(5)).get_seq_length() == 5


def parts_of(blob: bytes) -> list[bytes]:
    """Header and blocks of a blob."""
    place, parts = blobs.HEADER_BYTES, [blob[: blobs.HEADER_BYTES]]
    while place < len(blob):
        (size,) = struct.unpack_from("<I", blob, place)
        parts.append(blob[place : place + blobs.BLOCK_BYTES + size])
        place += len(parts[-1])
    return parts


def forged(codec: Codec, payload: bytes, sequences: int, tokens: int, dtype: int) -> bytes:
    """A blob with right checksums, as a stranger would make it."""
    plan: CompressionPlan = stored_plan()
    header = blobs.Header(
        blobs.DTYPES[dtype], sequences, tokens, bytes.fromhex(plan.digest()), plan.model_digest()
    )
    return blobs.write_blob(header, [blobs.Block(0, tokens, payload)])


@given(
    st.binary(max_size=600) | st.integers(0, 400),
    st.integers(1, 2**32 - 1) | st.integers(1, 3),
    st.integers(1, 2**32 - 1) | st.integers(1, 300),
    st.integers(0, 3),
)
@settings(max_examples=300)
def test_a_strangers_blob_is_refused_or_small(
    payload: bytes | int, sequences: int, tokens: int, dtype: int
) -> None:
    codec = Codec(stored_model(), stored_plan())
    if isinstance(payload, int):  # an own payload, with a byte changed
        own = codec.encode(filled(stored_model(), TOKENS[:1, :12]), TOKENS[:1])[112 + 16 :]
        changed = bytearray(own)
        changed[payload % len(own)] ^= 1 + payload % 255
        payload = bytes(changed)
    blob = forged(codec, payload, sequences, tokens, dtype)
    try:
        cache = codec.decode(blob)
    except CacheError:
        return
    assert sum(x.nbytes for x in tensors(cache)) <= 1024 * len(blob)


def test_a_blob_cannot_ask_for_unbounded_memory(codec: Codec) -> None:
    for sequences, tokens in ((2**31, 256), (1, 256), (2**20, 1)):
        blob = forged(codec, bytes(8), sequences, tokens, 0)
        with pytest.raises(CacheError, match="requests too much memory"):
            codec.decode(blob)


def test_a_cache_of_zeros_is_padded_and_read(codec: Codec) -> None:
    cache = DynamicCache(config=stored_model().config)
    for index in range(3):
        cache.update(torch.zeros(9, 2, 256, 8), torch.zeros(9, 2, 256, 8), index)
    blob = codec.encode(cache)
    assert len(blob) >= sum(x.nbytes for x in tensors(cache)) / 1024
    assert codec.decode(blob).get_seq_length() == 256
