"""Blobs as chunks under chained keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from manifoldkv import Codec
from manifoldkv.serve.engines.chunks import CHUNK_TOKENS, Chunks
from tests.stored import filled, some_tokens, stored_model, stored_plan, tensors

IDS = some_tokens(1, 3 * CHUNK_TOKENS)


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec(stored_model(), stored_plan())


@pytest.fixture(scope="module")
def chunks() -> Chunks:
    return Chunks(stored_plan(), torch.float32)


@pytest.fixture(scope="module")
def blob(codec: Codec) -> bytes:
    return codec.encode(filled(stored_model(), IDS))


def same(found: DynamicCache, expected: DynamicCache) -> bool:
    return all(map(torch.equal, tensors(found), tensors(expected)))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_first_chunks_are_the_first_tokens(
    codec: Codec, chunks: Chunks, blob: bytes, count: int
) -> None:
    made = chunks.split(blob)
    assert len(made) == 3
    first = chunks.joined(made[:count])
    assert codec.tokens(first) == count * CHUNK_TOKENS
    assert same(codec.decode(first), codec.decode(blob, count * CHUNK_TOKENS))
    assert chunks.joined(made) == blob


def test_chunks_that_were_encoded_apart_are_joined(
    codec: Codec, chunks: Chunks, blob: bytes
) -> None:
    """As when a chunk was evicted and computed again, with other errors of rounding."""
    cache = filled(stored_model(), IDS)
    for layer in cache.layers:
        layer.values[:, :, CHUNK_TOKENS : 2 * CHUNK_TOKENS] += 1e-2
    first, other, _ = chunks.split(codec.encode(cache))
    _, own, last = chunks.split(blob)
    assert other != own
    found = codec.decode(chunks.joined([first, other, last]))
    for mine, expected in zip(tensors(found), tensors(codec.decode(blob)), strict=True):
        assert torch.equal(mine[:, :, 2 * CHUNK_TOKENS :], expected[:, :, 2 * CHUNK_TOKENS :])


def test_a_text_goes_on_from_stored_chunks(codec: Codec, chunks: Chunks, blob: bytes) -> None:
    before = chunks.split(blob)[:1]
    longer = codec.append(chunks.joined(before), filled(stored_model(), IDS))
    assert chunks.split(longer) == chunks.split(blob)


@given(
    first=st.lists(st.integers(0, 10), max_size=3 * CHUNK_TOKENS),
    second=st.lists(st.integers(0, 10), max_size=3 * CHUNK_TOKENS),
    shared=st.integers(0, 2 * CHUNK_TOKENS),
)
def test_texts_share_the_keys_of_their_common_chunks(
    first: list[int], second: list[int], shared: int
) -> None:
    chunks, common = Chunks(stored_plan(), torch.float32), [1] * shared
    one, other = chunks.keys(common + first), chunks.keys(common + second)
    assert len(one) == (shared + len(first)) // CHUNK_TOKENS
    for end, keys in enumerate(zip(one, other, strict=False), start=1):
        ends = (text[: end * CHUNK_TOKENS] for text in (common + first, common + second))
        assert (keys[0] == keys[1]) == (next(ends) == next(ends))


def test_everything_that_a_cache_depends_on_is_part_of_a_key(chunks: Chunks) -> None:
    ids = IDS[0].tolist()
    others = [
        chunks.keys(ids, "salt"),
        Chunks(stored_plan(), torch.bfloat16).keys(ids),
        Chunks(stored_plan(ratio=0.2), torch.float32).keys(ids),
        Chunks(stored_plan("qwen3"), torch.float32).keys(ids),
        chunks.keys(ids),
    ]
    assert len({keys[0] for keys in others}) == len(others)
    assert len(set(chunks.keys(ids))) == 3
