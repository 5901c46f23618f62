"""Loading models."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama import modeling_llama

from manifoldkv.errors import ModelError
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.loading import load_model
from tests.families import SECTIONS, tiny_model


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_saved_weights_come_back_in_the_dtype_asked_for(folder, dtype):
    model, _ = load_model(str(folder), dtype=dtype)
    saved = tiny_model("qwen3", torch.bfloat16).to(dtype).state_dict()
    assert model.state_dict().keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["no/such/folder", "./nothing", "/nowhere", "."])
def test_missing_folder_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=rf"no model at {name}: .*config\.json does not exist"):
        load_model(name)


def edited(**changes):
    return lambda content: json.dumps(json.loads(content) | changes).encode()


DAMAGE = {
    "weights cut at the end": ("model.safetensors", lambda content: content[:-100]),
    "weights cut at the start": ("model.safetensors", lambda content: content[:100]),
    "weights overwritten": ("model.safetensors", lambda content: b"\xff" * len(content)),
    "weights empty": ("model.safetensors", lambda content: b""),
    "weights missing": ("model.safetensors", None),
    "weights of another size": ("config.json", edited(intermediate_size=50)),
    "configuration cut off": ("config.json", lambda content: b"{"),
    "unknown model type": ("config.json", edited(model_type="nothing")),
    "no language model": ("config.json", edited(model_type="clip")),
    "tokenizer cut off": ("tokenizer.json", lambda content: content[:-10]),
    "tokenizer missing": ("tokenizer.json", None),
}
SAID = {  # not an option of transformers, nor the head of a list of all that was looked for
    "weights of another size": r"its weights have other shapes than config\.json says",
    "tokenizer missing": r"no tokenizer is saved with it \(.* writes one\)",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_one_line(folder, damage):
    name, change = DAMAGE[damage]
    if change is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(change((folder / name).read_bytes()))
    reason = SAID.get(damage, ".+")
    with pytest.raises(ModelError, match=rf"^cannot load model {folder}: {reason}$") as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


def test_a_model_without_any_tokenizer_is_one_line(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match=rf"{folder}: {SAID['tokenizer missing']}$"):
        load_model(str(folder))


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_no_folder(name, folder, monkeypatch):
    monkeypatch.chdir(folder)  # where there is a model
    with pytest.raises(ModelError, match=r"^the name of the model is empty: give a folder"):
        load_model(name)


@pytest.mark.parametrize("device", ["meta", "nonsense", "", "cuda:99", "hpu", "ipu", "xpu:99"])
def test_a_device_that_cannot_be_used_is_refused_before_a_model_is_read(device):
    with pytest.raises(
        ModelError, match=rf"^cannot use device '{device}' \(.+: possible here: cpu"
    ):
        load_model("nowhere", device=device)


def test_a_device_that_is_there_is_taken(folder):
    model, _ = load_model(str(folder), device="cpu:0")
    assert model.device.type == "cpu"


ENCODERS = {
    "bert": (BertModel, BertConfig, "it is an encoder, not a causal decoder"),
    "roberta": (RobertaForMaskedLM, RobertaConfig, "it is an encoder, not a causal decoder"),
    "t5": (T5ForConditionalGeneration, T5Config, "a model of type 't5' is no causal decoder"),
}


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_is_no_decoder_whatever_weights_it_lacks(tmp_path, name, offload):
    architecture, configuration, reason = ENCODERS[name]
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    architecture(configuration(**sizes, intermediate_size=8)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason):
        load_model(str(tmp_path), offload=offload)


def test_hub_model_out_of_reach_is_one_line():
    with pytest.raises(ModelError, match="cannot load model nobody/no-such-model") as caught:
        load_model("nobody/no-such-model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("rope_parameters", {"rope_type": "longrope"}, "its longrope rotary embedding changes"),
        (
            "rope_parameters",
            {"full_attention": {"rope_type": "dynamic"}},
            "its dynamic rotary embedding changes",
        ),
        ("rope_parameters", SECTIONS, r"its rotary embedding \(M-RoPE\) takes several positions"),
        ("rope_parameters", {"full_attention": SECTIONS}, r"its rotary embedding \(M-RoPE\)"),
        ("layer_rope_theta", [10000.0, 0.0, 10000.0], "some of its layers do not rotate their"),
        ("is_encoder_decoder", True, "it has an encoder"),
        ("per_layer_config", {1: {"intermediate_size": 40}}, "configurations of their own"),
        ("layer_types", ["chunked_attention"], "it has layers of type chunked_attention"),
        ("kv_lora_rank", 8, r"multi-head latent attention \(MLA\)"),
        ("num_kv_shared_layers", 1, "share the keys and values of others"),
    ],
)
def test_obstacles_in_the_configuration_are_named(name, value, reason):
    model = tiny_model("llama")
    setattr(model.config, name, value)
    message = rf"^LlamaForCausalLM \(model_type 'llama'\) is not supported: .*{reason}"
    with pytest.raises(ModelError, match=message):
        Decoder.of(model)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("self_attn", "LlamaDecoderLayer has no self_attn"),
        ("self_attn.head_dim", "LlamaAttention has no head_dim"),
        ("self_attn.o_proj", "LlamaAttention has no linear o_proj"),
    ],
)
def test_obstacles_in_any_one_layer_are_named(part, reason):
    model = tiny_model("llama")
    *path, last = part.split(".")
    delattr(model.model.layers[2].get_submodule(".".join(path)), last)
    with pytest.raises(ModelError, match=reason):
        Decoder.of(model)


def test_layers_without_a_rotation_are_named():
    model = tiny_model("gemma3")
    model.config.rope_parameters = model.config.rope_parameters | {"full_attention": None}
    with pytest.raises(ModelError, match="some of its layers do not rotate their keys"):
        Decoder.of(model)


def test_sections_that_only_the_rotary_embedding_has_are_named():
    model = tiny_model("llama")
    model.model.rotary_emb.mrope_section = [1, 1, 2]  # the default of some families
    with pytest.raises(ModelError, match=r"its rotary embedding \(M-RoPE\) takes several"):
        Decoder.of(model)


def test_keys_of_several_sizes_are_named():
    model = tiny_model("llama")
    model.model.layers[2].self_attn.k_proj = torch.nn.Linear(32, 32)
    with pytest.raises(ModelError, match="keys of its layers differ in the number of features"):
        Decoder.of(model)


class Packed(torch.nn.Module):
    """A projection with codes of its weights, as several libraries of quantization have them."""

    def __init__(self, codes: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("codes", codes)


class Wrapped(torch.nn.Parameter):
    """Weights of a type of their own."""


def with_weights(weight: torch.Tensor) -> torch.nn.Module:
    linear = torch.nn.Linear(32, 32, bias=False)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    return linear


def wrapped() -> torch.nn.Module:
    linear = torch.nn.Linear(32, 32, bias=False)
    linear.weight = Wrapped(linear.weight.data)
    return linear


CODES = torch.zeros(512, 1, dtype=torch.uint8)
QUANTIZED = {
    "float8": (lambda: with_weights(torch.zeros(32, 32, dtype=torch.float8_e4m3fn)), "float8_e4m3"),
    "int8": (lambda: with_weights(torch.zeros(32, 32, dtype=torch.int8)), r"torch\.int8"),
    "packed": (lambda: with_weights(CODES), r"torch\.uint8"),
    "packed elsewhere": (lambda: Packed(CODES), r"torch\.uint8"),
    "another type": (wrapped, "of type Wrapped"),
    "adapted": (lambda: adapted(with_weights(CODES)), r"torch\.uint8"),
}


def adapted(base: torch.nn.Module) -> torch.nn.Module:
    around = torch.nn.Module()
    around.base_layer = base
    return around


@pytest.mark.parametrize("name", ["q_proj", "o_proj"])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_weights_are_named(kind, name):
    make, stored = QUANTIZED[kind]
    model = tiny_model("llama")
    setattr(model.model.layers[1].self_attn, name, make())
    message = rf"the {name} of LlamaAttention has weights .*{stored}\w*, as in a quantized model: "
    with pytest.raises(ModelError, match=message):
        Decoder.of(model)


def test_weights_that_no_tensor_shows_are_named():
    model = tiny_model("llama")
    model.model.layers[1].self_attn.o_proj = Packed(torch.zeros(0))
    with pytest.raises(ModelError, match=r"is Packed in place of nn\.Linear, as in a quantized"):
        Decoder.of(model)


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("apply_rotary_pos_emb", "LlamaAttention does not rotate its keys"),
        ("ALL_ATTENTION_FUNCTIONS", "LlamaAttention does not go through the attention interface"),
    ],
)
def test_attention_written_another_way_is_named(monkeypatch, missing, reason):
    monkeypatch.delattr(modeling_llama, missing)
    with pytest.raises(ModelError, match=reason):
        Decoder.of(tiny_model("llama"))


def test_missing_weights_are_refused(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights, model\.layers\.1\.self_attn\.k_proj"):
        load_model(str(folder))
