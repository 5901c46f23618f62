"""Loading models."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from manifoldkv.errors import ModelError, UnsupportedModelError
from manifoldkv.models import load_model
from tests.families import tiny_model


@pytest.fixture
def tokenizer():
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")


@pytest.fixture
def folder(tmp_path, tokenizer):
    tiny_model("qwen3", torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_local_folder_loads_frozen_in_float32(folder):
    model, tokenizer = load_model(str(folder))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in model.parameters())
    assert not model.training
    assert tokenizer("a b")["input_ids"] == [0, 1]


@pytest.mark.parametrize("name", ["no/such/folder", "./nothing", "/nowhere"])
def test_missing_folder_is_named(name):
    with pytest.raises(ModelError, match=f"no model at {name}"):
        load_model(name)


def test_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        load_model(str(tmp_path))


def test_damaged_weights_are_one_line(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot load model") as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


def test_damaged_configuration_is_one_line(folder):
    (folder / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot load model") as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


def test_hub_model_out_of_reach_is_one_line():
    with pytest.raises(ModelError, match="cannot load model nobody/no-such-model") as caught:
        load_model("nobody/no-such-model")
    assert "\n" not in str(caught.value)


def test_unsupported_family_is_refused_by_name(tmp_path, tokenizer):
    GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=2)).save_pretrained(
        tmp_path
    )
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel \(model_type 'gpt2'\)"):
        load_model(str(tmp_path))
