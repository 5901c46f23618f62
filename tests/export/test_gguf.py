"""Exported models as GGUF files, read back by transformers and by gguf itself."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedModel

from manifoldkv import (
    CommutingRecipe,
    ModelError,
    TextError,
    UnsupportedModelError,
    compress,
    compressed,
    export_checkpoint,
    load_model,
)
from manifoldkv.export import gguf as module
from manifoldkv.export.gguf import SPLITS, _split_of
from tests.families import tiny_model, tiny_tokens

REFERENCE = "studies/reference_models/reference-llama"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANIFOLDKV_CACHE", str(tmp_path / "cache"))


def big_vocabulary(family: str, **settings) -> PreTrainedModel:
    """A tiny model with room for the tokens of the reference models."""
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    return tiny_model(
        family, torch.float32, vocab_size=len(tokenizer), num_attention_heads=4, **settings
    )


@pytest.mark.parametrize("ratio", [0.4, 0.5])
@pytest.mark.parametrize("tied", [False, True])
def test_it_is_read_back_as_the_same_model(ratio: float, tied: bool, tmp_path: Path) -> None:
    model = big_vocabulary("llama", tie_word_embeddings=tied)
    tokenizer, tokens = AutoTokenizer.from_pretrained(REFERENCE), tiny_tokens(2, 20)
    plan = compress(model, tokens, recipe="commuting", ratio=ratio)
    found = export_checkpoint(model, plan, tmp_path / "out", tokenizer=tokenizer, gguf=True)
    read, again = load_model(str(found.folder / "model.gguf"))
    with torch.no_grad(), compressed(model, plan):
        expected = model(tokens).logits
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits, expected, rtol=1e-3, atol=1e-3)
    assert read.config.num_key_value_heads == 1
    text = "def mean(values): return 3.25 + 17 * sum(values)  # half of it, don't"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    reader = gguf.GGUFReader(found.folder / "model.gguf")
    assert reader.get_field("tokenizer.ggml.eos_token_id").contents() == tokenizer.eos_token_id


def test_frequencies_are_divided_by_what_the_file_says(tmp_path: Path) -> None:
    model, tokens = big_vocabulary("llama"), tiny_tokens(2, 20)
    plan = compress(model, tokens, recipe="commuting", ratio=0.4)
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    found = export_checkpoint(model, plan, tmp_path / "out", tokenizer=tokenizer, gguf=True)
    reader = gguf.GGUFReader(found.folder / "model.gguf")
    width = plan.layers[0].key.down.shape[-1]
    assert reader.get_field("llama.attention.key_length").contents() == width
    assert reader.get_field("llama.attention.value_length").contents() == width
    assert reader.get_field("llama.rope.dimension_count").contents() == width
    assert reader.get_field("tokenizer.ggml.pre").contents() == "gpt-2"
    (factors,) = (t.data for t in reader.tensors if t.name == "rope_freqs.weight")
    stock = 10000.0 ** (-np.arange(0, width, 2) / width)
    own = 10000.0 ** (-2.0 * np.array(plan.layers[0].key.frequencies) / 8)
    np.testing.assert_allclose(stock / factors, own, rtol=1e-5)
    # llama.cpp turns neighbours: feature 2i of the file is i of ours, 2i + 1 is w/2 + i.
    (keys,) = (t.data for t in reader.tensors if t.name == "blk.1.attn_k.weight")
    ours = load_model(str(found.folder))[0].model.layers[1].self_attn.k_proj.weight.numpy()
    np.testing.assert_array_equal(keys[0::2], ours[: width // 2])
    np.testing.assert_array_equal(keys[1::2], ours[width // 2 :])


def test_a_qwen2_of_stock_frequencies(tmp_path: Path) -> None:
    model, tokens = big_vocabulary("qwen2"), tiny_tokens(2, 20)
    plan = compress(model, tokens, recipe="commuting", ratio=1.0)
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    with pytest.raises(UnsupportedModelError, match="neither a head_dim of its own nor factors"):
        export_checkpoint(model, plan, tmp_path / "out", tokenizer=tokenizer, gguf=True)
    plan = compress(model, tokens, recipe=CommutingRecipe(grouping=1), ratio=1.0)
    found = export_checkpoint(model, plan, tmp_path / "out", tokenizer=tokenizer, gguf=True)
    read, _ = load_model(str(found.folder / "model.gguf"))
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits, model(tokens).logits, rtol=1e-3, atol=1e-3)
    names = [t.name for t in gguf.GGUFReader(found.folder / "model.gguf").tensors]
    assert "rope_freqs.weight" not in names
    assert "blk.0.attn_k.bias" in names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_the_dtype_of_the_model(dtype: torch.dtype, tmp_path: Path) -> None:
    model, _ = load_model(REFERENCE, dtype=dtype)
    plan = compress(model, tiny_tokens(2, 20), recipe="commuting")
    found = export_checkpoint(model, plan, tmp_path / "out", gguf=True)
    reader = gguf.GGUFReader(found.folder / "model.gguf")
    kinds = {t.name: t.tensor_type.name for t in reader.tensors}
    assert kinds["blk.0.attn_q.weight"] == {torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    read, _ = load_model(str(found.folder / "model.gguf"))
    plain, _ = load_model(str(found.folder))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(read.state_dict()[name].to(dtype), tensor.to(dtype)), name


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("mistral", {}, "no sliding window for mistral"),
        ("llama", {"attention_bias": True}, "no biases for llama"),
        ("llama-yarn", {}, "scales the scores"),
    ],
)
def test_what_llama_cpp_lacks_is_named(family: str, settings, reason: str, tmp_path: Path) -> None:
    model = big_vocabulary(family, **settings)
    plan = compress(model, tiny_tokens(2, 20), recipe="commuting")
    with pytest.raises(UnsupportedModelError, match=f"as a GGUF file: .*{reason}"):
        export_checkpoint(model, plan, tmp_path / "out", gguf=True)
    assert not (tmp_path / "out").exists()


def test_without_a_tokenizer_or_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = big_vocabulary("llama")
    plan = compress(model, tiny_tokens(2, 20), recipe="commuting")
    with pytest.raises(TextError, match="holds a tokenizer"):
        export_checkpoint(model, plan, tmp_path / "out", gguf=True)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install manifoldkv\[gguf\]"):
        export_checkpoint(model, plan, tmp_path / "out", gguf=True)


def described(pre: dict) -> dict:
    """What a tokenizer.json says, as the tokenizers library writes it."""
    made = Tokenizer.from_file(f"{REFERENCE}/tokenizer.json")
    return json.loads(made.to_str()) | {"pre_tokenizer": pre}


def test_ways_to_split_a_text_are_known_by_their_names() -> None:
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    assert _split_of(described(by_bytes)) == "gpt-2"
    digits = {"type": "Digits", "individual_digits": True}
    steps = {"type": "Sequence", "pretokenizers": [digits, by_bytes]}
    assert _split_of(described(steps)) == "smollm"
    for regex, name in SPLITS.items():
        split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}
        after = by_bytes | {"use_regex": False}
        steps = {"type": "Sequence", "pretokenizers": [split, after]}
        assert _split_of(described(steps)) == name
    split["pattern"] = {"Regex": r"\w+"}
    for unknown in ({}, steps, {"type": "Whitespace"}, by_bytes | {"add_prefix_space": True}):
        with pytest.raises(TextError, match="leave --gguf out"):
            _split_of(described(unknown))
