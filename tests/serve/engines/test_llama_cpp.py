"""Slots of llama.cpp, written by the tests: the real program's are in test_llama_cpp_program.py."""

from __future__ import annotations

import hashlib
import struct
import zlib
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, PreTrainedModel

from manifoldkv import Codec, CompressionPlan, compress
from manifoldkv.core.errors import CacheError, PlanError
from manifoldkv.models.decoder import Decoder
from manifoldkv.serve.engines.llama_cpp import pack_slot, read_packed, unpack_slot
from manifoldkv.serve.engines.slots import Q8_0, read_frame, read_slot
from tests.families import tiny_model
from tests.serve.engines.slot_files import slot_file
from tests.stored import filled, some_tokens

TOKENS = 70
SMALL = {"num_key_value_heads": 4, "max_position_embeddings": 1024}
WIDE = SMALL | {"head_dim": 64, "num_hidden_layers": 2}
SHAPES = {"small": SMALL, "wide": WIDE}
NEIGHBOURS = {"llama": True, "qwen2": False, "qwen3": False}


@cache
def model_of(family: str, shape: str = "small", dtype: Any = torch.float16) -> PreTrainedModel:
    return tiny_model(family, dtype, **SHAPES[shape])


@cache
def plan_of(family: str, shape: str = "small") -> CompressionPlan:
    model = model_of(family, shape, torch.float32)
    return compress(model, some_tokens(16, 64, seed=1), recipe="stored", context=600, ratio=0.3)


@cache
def cache_of(family: str = "llama", shape: str = "small") -> DynamicCache:
    stock = filled(model_of(family, shape, torch.float32), some_tokens(1, TOKENS))
    for layer in stock.layers:
        layer.keys, layer.values = layer.keys.half(), layer.values.half()
    return stock


def decoded(family: str, shape: str, stock: DynamicCache) -> DynamicCache:
    codec = Codec(model_of(family, shape), plan_of(family, shape))
    return codec.decode(codec.encode(stock))


def through(content: bytes, family: str = "llama", shape: str = "small") -> bytes:
    """A slot that was packed and unpacked; the packed one is smaller."""
    model, plan = model_of(family, shape), plan_of(family, shape)
    packed = pack_slot(content, model, plan)
    assert len(packed) < 0.7 * len(content)
    found = unpack_slot(packed, model, plan)
    assert read_slot(found)[0].frame == read_slot(content)[0].frame
    return found


@pytest.mark.parametrize("family", NEIGHBOURS)
@pytest.mark.parametrize("transposed", [False, True])
def test_an_unpacked_slot_has_the_numbers_of_the_decoded_cache(
    family: str, transposed: bool
) -> None:
    form = {"transposed": transposed, "neighbours": NEIGHBOURS[family]}
    stock = cache_of(family)
    expected = slot_file(decoded(family, "small", stock), **form)
    assert through(slot_file(stock, **form), family) == expected


@pytest.mark.parametrize("family", NEIGHBOURS)
def test_a_prompt_cache_too(family: str) -> None:
    form = {"architecture": family, "neighbours": NEIGHBOURS[family], "prompt": b""}
    stock = cache_of(family)
    expected = slot_file(decoded(family, "small", stock), **form)
    assert through(slot_file(stock, **form), family) == expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kinds", [("q8_0", "q8_0"), ("q8_0", "f16"), ("f16", "q8_0")])
def test_quantized_slots_have_the_numbers_of_the_decoded_cache(
    shape: str, kinds: tuple[str, str]
) -> None:
    """Heads of 64 are turned by a Hadamard matrix, those of 8 are not."""
    form: dict[str, Any] = dict(zip(("keys", "values"), kinds, strict=True))
    stock = cache_of("llama", shape)
    found = through(slot_file(stock, **form), shape=shape)
    rounded = 2 / 127  # of the largest in a block: once before and once after the codec
    expected = slot_file(decoded("llama", shape, stock), **form)
    slot, parts = read_slot(expected)
    for rows, part, other in zip(slot.rows, parts, read_slot(found)[1], strict=True):
        x, y = rows.numbers(part).float(), rows.numbers(other).float()
        largest = x.abs().max()
        assert (x - y).abs().mean() < rounded * largest
        assert (rows.ggml_type == Q8_0) == (form[f"{rows.site}s"] == "q8_0")


def test_quantization_repeats_itself() -> None:
    slot, parts = read_slot(slot_file(cache_of(), keys="q8_0", values="q8_0"))
    for rows, part in zip(slot.rows, parts, strict=True):
        assert rows.content(rows.numbers(part)) == part


def test_cells_lie_in_any_order_and_stream() -> None:
    positions = [*range(50, TOKENS), *range(50)]
    form = {"positions": positions, "streams": (3, 1), "sequence": 1}
    expected = slot_file(decoded("llama", "small", cache_of()), **form)
    assert through(slot_file(cache_of(), **form)) == expected


def slot(**form: Any) -> bytes:
    return slot_file(cache_of(), **form)


def patched(content: bytes, place: int, form: str, *values: int) -> bytes:
    size = struct.calcsize("<" + form)
    return content[:place] + struct.pack("<" + form, *values) + content[place + size :]


CELLS = 12 + 20 + 8
"""Where the cells of a slot begin."""
ROWS = CELLS + 12 * TOKENS + 8
REFUSED = [
    (b"", "ends within its magic"),
    (b"GGUF" + bytes(60), "not a saved slot or prompt cache of llama.cpp"),
    (patched(slot(), 4, "I", 2), "the slot is of version 2, readable is 3: save it with"),
    (patched(slot(architecture="llama"), 4, "I", 9), "the prompt cache is of version 9"),
    (patched(slot(), 8, "I", 1 << 31), "ends within its prompt"),
    (slot(architecture="gemma"), "of architecture 'gemma', the model of 'llama'"),
    (patched(slot(), 32, "I", 0), "has 0 streams, llama.cpp 1 to 256"),
    (patched(slot(), 32, "I", 1 << 30), "has 1073741824 streams"),
    (slot()[:36] + bytes(4), "holds 0 sequences: save one with tokens"),
    (slot(streams=(1, 1)), "holds 0 sequences"),
    (patched(slot(), 36, "I", 1 << 30), "ends within its cells"),
    (patched(slot(), CELLS + 4, "I", 2), "cells of several sequences"),
    (patched(slot(), CELLS + 8, "i", 5), "cells of several sequences"),
    (slot(positions=range(TOKENS)[::-1])[:-1], "ends within its values of layer 2"),
    (patched(slot(), CELLS, "i", 7), r"positions 1 to 69, must be 0, 1, … without gaps"),
    (patched(slot(), ROWS - 8, "I", 2), "transposed or not, got 2"),
    (patched(slot(), ROWS - 4, "I", 2), "bytes follow the cells"),
    (patched(slot(), ROWS - 4, "I", 1 << 31), "ggml type|ends within"),
    (patched(slot(), ROWS, "i", 2), r"keys of layer 0 of the slot are of ggml type 2, readable"),
    (patched(slot(), ROWS + 4, "Q", 63), "keys of layer 0 of the slot have rows of 63 bytes"),
    (patched(slot(), ROWS + 4, "Q", (1 << 64) - 2), "ends within its keys of layer 0"),
    (slot(transposed=True)[:-300], "ends within its values of layer 2"),
    (slot() + b"abc", "3 bytes follow the cells of the slot"),
    (patched(slot(), ROWS + 12, "H", 0x7C00), "not finite"),
]


@pytest.mark.parametrize(("content", "message"), REFUSED)
def test_a_slot_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(CacheError, match=message):
        pack_slot(content, model_of("llama"), plan_of("llama"))


def test_slots_of_other_shapes() -> None:
    model, plan = model_of("llama"), plan_of("llama")
    with pytest.raises(CacheError, match="has 2 layers, the model 3"):
        pack_slot(slot_file(cache_of("llama", "wide")), model, plan)
    narrow = DynamicCache()
    for index, layer in enumerate(cache_of().layers):
        narrow.update(layer.keys[:, :2], layer.values[:, :2], index)
    with pytest.raises(CacheError, match="has 16 features per token and layer, the model 32"):
        pack_slot(slot_file(narrow), model, plan)


def test_other_models_and_plans() -> None:
    packed = pack_slot(slot(), model_of("llama"), plan_of("llama"))
    with pytest.raises(CacheError, match="of type 'granite' cannot be packed: possible are llama"):
        pack_slot(slot(), model_of("granite"), plan_of("granite"))
    with pytest.raises(CacheError, match="of another model"):
        unpack_slot(packed, model_of("qwen2"), plan_of("qwen2"))
    with pytest.raises(PlanError):
        pack_slot(slot(), model_of("llama"), plan_of("qwen2"))
    other = plan_of("llama").transferred_to(Decoder.of(tiny_model("llama", seed=1, **SMALL)))
    with pytest.raises(PlanError, match="other weights"):
        unpack_slot(packed, model_of("llama"), other)


@cache
def packed_slot(tokens: int = TOKENS) -> bytes:
    short = DynamicCache()
    for index, layer in enumerate(cache_of().layers):
        short.update(layer.keys[:, :, :tokens], layer.values[:, :, :tokens], index)
    return pack_slot(slot_file(short), model_of("llama"), plan_of("llama"))


def damage(data: st.DataObject, content: bytes) -> bytes:
    """Some bytes with one of them changed, some left out, or some more."""
    place = data.draw(st.integers(0, len(content) - 1))
    left_out, more = data.draw(st.integers(0, 9)), data.draw(st.binary(min_size=1, max_size=9))
    return content[:place] + more + content[place + left_out :]


@given(st.data())
def test_a_damaged_packed_slot_is_refused(data: st.DataObject) -> None:
    content = damage(data, packed_slot())
    if content != packed_slot():
        with pytest.raises(CacheError):
            unpack_slot(content, model_of("llama"), plan_of("llama"))


@given(st.data())
def test_what_a_stranger_packs_is_refused_or_small(data: st.DataObject) -> None:
    """Its checksums are right and its frame is not."""
    told, blob = read_packed(packed_slot())
    frame = damage(data, told.frame)
    whole = data.draw(st.sampled_from([len(frame), 0, len(frame) + 1, 1 << 31]))
    packed = signed(zlib.compress(frame), whole, blob)
    try:
        found = unpack_slot(packed, model_of("llama"), plan_of("llama"))
    except CacheError:
        return
    assert len(found) < 1024 * len(packed)
    assert read_slot(found)[0].frame == frame


def signed(frame: bytes, whole: int, blob: bytes) -> bytes:
    """A packed file of a compressed frame, said to have `whole` bytes, and a blob."""
    fixed = struct.pack("<8sIII", b"mkvslots", 1, len(frame), whole)
    check = hashlib.blake2b(fixed + frame + blob, digest_size=16).digest()
    return fixed + check + frame + blob


@pytest.mark.parametrize(
    ("frame", "whole", "message"),
    [
        (zlib.compress(bytes(1 << 20)), 1 << 20, "ends within|bad magic|version"),
        (zlib.compress(bytes(1 << 20)), 1 << 19, "is damaged"),
        (zlib.compress(bytes(99)), 1 << 31, "requests too much memory"),
        (zlib.compress(bytes(99)) + b"more", 99, "is damaged"),
        (b"no zlib", 99, "is damaged"),
    ],
)
def test_frames_that_do_not_unfold(frame: bytes, whole: int, message: str) -> None:
    with pytest.raises(CacheError, match=message):
        read_packed(signed(frame, whole, b""))


def test_a_frame_of_other_tokens() -> None:
    told, _ = read_packed(packed_slot())
    _, blob = read_packed(packed_slot(TOKENS - 1))
    mixed = signed(zlib.compress(told.frame), len(told.frame), blob)
    with pytest.raises(CacheError, match="is damaged: 69 tokens for 70 cells"):
        unpack_slot(mixed, model_of("llama"), plan_of("llama"))


@given(st.data())
def test_a_damaged_slot_is_refused_or_packed(data: st.DataObject) -> None:
    content = damage(data, slot(keys="q8_0"))
    try:
        found = pack_slot(content, model_of("llama"), plan_of("llama"))
    except CacheError:
        return
    frame = read_packed(found)[0].frame
    assert read_slot(content)[0].frame == frame == read_frame(frame).frame
