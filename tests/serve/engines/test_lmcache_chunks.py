"""Chunks at positions that nobody tells."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manifoldkv import CompressionPlan, compress, load_model, open_text, sample_tokens
from manifoldkv.core.errors import CacheError
from manifoldkv.serve.engines.lmcache_chunks import ChunkCodec
from tests.cli.running import MODEL
from tests.stored import filled

CHUNK, LENGTH = 64, 256


@cache
def stored_plan() -> CompressionPlan:
    model, tokenizer = load_model(MODEL)
    tokens = sample_tokens(open_text("docstrings"), tokenizer, sequences=16, length=128)
    return compress(model, tokens, recipe="stored", ratio=0.2, context=CHUNK)


@cache
def codec() -> ChunkCodec:
    return ChunkCodec(load_model(MODEL)[0], stored_plan())


@cache
def chunks() -> list[Tensor]:
    """Consecutive chunks of a text's cache, (2, layers, CHUNK, features)."""
    model, tokenizer = load_model(MODEL)
    tokens = sample_tokens(
        open_text("docstrings"), tokenizer, sequences=1, length=LENGTH, split="held-out"
    )
    layers = filled(model, tokens).layers
    sites = torch.stack([*(x.keys for x in layers), *(x.values for x in layers)])[:, 0]
    whole = sites.transpose(1, 2).flatten(2).unflatten(0, (2, -1))
    return list(whole.split(CHUNK, dim=2))


def error(found: Tensor, chunk: Tensor) -> float:
    return float((found - chunk).square().sum() / chunk.square().sum())


@pytest.mark.parametrize("index", range(LENGTH // CHUNK))
def test_a_chunk_is_found_at_its_place(index: int) -> None:
    """Keys of every place are as near after the codec, and no chunk takes more bytes."""
    chunk = chunks()[index]
    packed = codec().pack(chunk)
    assert int.from_bytes(packed[12:16], "little") == index * CHUNK
    assert len(packed) <= codec().nbytes(CHUNK) < 0.35 * chunk.numel() * 2
    found = codec().unpack(packed, CHUNK)
    assert found.shape == chunk.shape
    assert found.dtype == chunk.dtype
    for kind in range(2):
        assert error(found[kind], chunk[kind]) < 0.1
    padded = packed.ljust(codec().nbytes(CHUNK), b"\0")
    assert torch.equal(codec().unpack(padded, CHUNK), found)


def test_sink_tokens_of_the_first_chunk_are_exact() -> None:
    chunk, sinks = chunks()[0], stored_plan().sinks
    found = codec().unpack(codec().pack(chunk), CHUNK)
    assert torch.equal(found[:, :, :sinks], chunk[:, :, :sinks])


def test_chunks_of_other_shapes_and_numbers() -> None:
    chunk = chunks()[0]
    with pytest.raises(CacheError, match=r"a rank of tensor parallelism holds some heads only"):
        codec().pack(chunk[..., :32])
    with pytest.raises(CacheError, match=r"a chunk of shape \(1, 6, 64, 64\)"):
        codec().pack(chunk[:1])
    with pytest.raises(CacheError, match="calibrate the plan on such text"):
        codec().pack(100 * torch.randn_like(chunk))
    with pytest.raises(CacheError, match="not finite"):
        codec().pack(chunk / 0)
    with pytest.raises(CacheError, match="the packed chunk has 64 tokens, not 32"):
        codec().unpack(codec().pack(chunk), 32)


@given(st.data())
def test_a_damaged_chunk_is_refused(data: st.DataObject) -> None:
    packed = bytearray(packed_chunk())
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CacheError):
        codec().unpack(bytes(packed), CHUNK)
    with pytest.raises(CacheError):
        codec().unpack(packed_chunk()[: data.draw(st.integers(0, len(packed) - 1))], CHUNK)


@cache
def packed_chunk() -> bytes:
    return codec().pack(chunks()[1])
