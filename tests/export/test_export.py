"""Plain checkpoints: what they compute, what is in them, and what cannot be one."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from manifoldkv import (
    CompressionPlan,
    Quantization,
    compress,
    compressed,
    export_checkpoint,
    load_model,
    perplexity,
    quantize,
)
from manifoldkv.errors import ArgumentError, ModelError, PlanError, RunError
from manifoldkv.export.fold import FAMILIES, folded
from manifoldkv.recipes.commuting import CommutingRecipe
from manifoldkv.recipes.full_rank import full_rank_plan
from tests.families import WINDOWS, tiny_model, tiny_tokens
from tests.plans import bits_plan, random_plan

REFERENCE = "studies/reference_models/reference-llama"
EXPORTED = {
    "llama": {},
    "llama-yarn": {},
    "mistral": {},
    "qwen2": {},
    "llama with biases": {"attention_bias": True},
    "llama with two groups": {"num_key_value_heads": 4},
}
LOADED = """
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "manifoldkv":
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache

ids = torch.tensor(json.loads(sys.argv[1]))
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        pieces = ids[:, :5], *ids[:, 5:].split(1, dim=1)
        logits = torch.cat([model(x, past_key_values=cache).logits for x in pieces], dim=1)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    shape = torch.tensor(cache.layers[0].keys.shape)
    found = {"logits": logits, "shape": shape, "bytes": torch.tensor(held)}
    save_file(found, f"{folder}.safetensors")
assert "manifoldkv" not in sys.modules
"""


def model_of(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    return tiny_model(name.split()[0], dtype, **EXPORTED[name])


def plan_for(model: PreTrainedModel, name: str = "llama", ratio: float = 0.4) -> CompressionPlan:
    grouping = 2 if "two groups" in name else "all"
    recipe = CommutingRecipe(grouping=grouping)
    return compress(model, tiny_tokens(3, 20), recipe=recipe, ratio=ratio)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def plan(llama: PreTrainedModel) -> CompressionPlan:
    return plan_for(llama)


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: torch.Tensor, plan: CompressionPlan | None = None):
    if plan is None:
        return model(input_ids=tokens).logits
    with compressed(model, plan):
        return model(input_ids=tokens).logits


@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.parametrize("ratio", [0.4, 0.5])
def test_it_computes_what_the_compressed_cache_does(name: str, ratio: float) -> None:
    model, tokens = model_of(name), tiny_tokens(3, 20)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    plan = plan_for(model, name, ratio)
    found = logits_of(folded(model, plan), tokens)
    # Angles are float32 in any model, and their frequencies are rounded once more.
    torch.testing.assert_close(found, logits_of(model, tokens, plan), rtol=1e-4, atol=1e-5)
    assert (found - logits_of(model, tokens)).abs().max() > 0.1
    assert all(torch.equal(before[key], x) for key, x in model.state_dict().items())


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple]:
    """All of them written here, and read by one process that knows nothing of us."""
    root, tokens, written = tmp_path_factory.mktemp("exported"), tiny_tokens(2, 12), {}
    for name in EXPORTED:
        model = model_of(name, torch.float32)
        plan = plan_for(model, name)
        written[name] = model, plan, export_checkpoint(model, plan, root / name)
    folders = [str(found.folder) for _, _, found in written.values()]
    command = [sys.executable, "-c", LOADED, json.dumps(tokens.tolist()), *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return lambda name: (
        tokens,
        *written[name],
        load_file(f"{written[name][2].folder}.safetensors"),
    )


@pytest.mark.parametrize("name", EXPORTED)
def test_transformers_loads_it_without_us(name: str, loaded: Callable[[str], tuple]) -> None:
    tokens, model, plan, found, read = loaded(name)
    expected = logits_of(model, tokens, plan)
    torch.testing.assert_close(read["logits"], expected, rtol=1e-3, atol=1e-3)
    config = json.loads((found.folder / "config.json").read_text())
    heads = model.config.num_key_value_heads // plan.layers[0].key.grouping.width
    assert read["shape"].tolist()[1::2] == [heads, config["head_dim"]]
    cached = min(12, (getattr(model.config, "sliding_window", None) or 99) - 1)
    assert read["bytes"] == 2 * cached * found.bytes_per_token
    assert found.bytes_per_token == plan.bytes_per_token(torch.float32)
    stock = 3 * 2 * model.config.num_key_value_heads * 8 * 4
    assert found.stock_bytes_per_token == stock


@pytest.mark.parametrize("name", EXPORTED)
def test_what_makes_a_latent_is_as_large_as_what_reads_it(name: str) -> None:
    model = model_of(name)
    for layer in folded(model, plan_for(model, name)).model.layers:
        attention = layer.self_attn
        groups, width = model.config.num_key_value_heads // 2, attention.head_dim
        by_latent = [
            matrix.square().sum(1).view(groups, -1, width).sum(1)
            for matrix in (
                *(attention.k_proj.weight, attention.q_proj.weight),
                *(attention.v_proj.weight, attention.o_proj.weight.mT),
            )
        ]
        keys, queries = (x.unflatten(1, (2, -1)).sum(1) for x in by_latent[:2])
        torch.testing.assert_close(keys, queries)
        torch.testing.assert_close(*by_latent[2:])


def test_stock_frequencies_leave_the_rotation_as_it_was(tmp_path: Path) -> None:
    model = model_of("llama-yarn")
    plan = plan_for(model, ratio=0.5)
    assert plan.layers[0].key.basis.frequencies == (0, 1, 2, 3)
    made = folded(model, plan)
    assert made.config.rope_parameters == model.config.rope_parameters
    assert made.config.num_key_value_heads == 1
    assert made.config.head_dim == 8
    other = folded(model, plan_for(model, ratio=0.4)).config.rope_parameters
    assert other["rope_type"] == "longrope"
    assert other["short_factor"] == other["long_factor"]
    assert other["attention_factor"] == pytest.approx(model.model.rotary_emb.attention_scaling)


@pytest.mark.parametrize("rotary", ["pre", "post"])
def test_what_is_exported_runs_on_our_caches_too(rotary: str) -> None:
    """Its longrope is the same at every length; another one is still refused."""
    model, tokens = model_of("llama"), tiny_tokens(2, 20)
    made = folded(model, plan_for(model))
    plan = full_rank_plan(made, rotary)
    torch.testing.assert_close(logits_of(made, tokens, plan), logits_of(made, tokens))
    made.config.rope_parameters["long_factor"] = [9.0, 9.0, 9.0]
    with pytest.raises(ModelError, match="longrope rotary embedding changes"):
        full_rank_plan(made, rotary)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trained_model_with_all_that_goes_along(dtype: torch.dtype, tmp_path: Path) -> None:
    model, tokenizer = load_model(REFERENCE, dtype=dtype)
    model.generation_config = GenerationConfig(do_sample=True, top_k=7, eos_token_id=3)
    tokens = tokenizer("Return the sum of all elements of a list, or zero.", return_tensors="pt")
    tokens = tokens["input_ids"]
    plan = compress(model, tokens.repeat(2, 1), recipe="commuting", ratio=0.5)
    found = export_checkpoint(model, plan, tmp_path / "plain", held_out=tokens)
    loaded = AutoModelForCausalLM.from_pretrained(found.folder)
    assert loaded.dtype == dtype
    assert loaded.generation_config.top_k == 7
    same = AutoTokenizer.from_pretrained(found.folder)
    assert same("a list")["input_ids"] == tokenizer("a list")["input_ids"]
    assert found.measured.compressed == perplexity(loaded, tokens)
    assert found.measured.uncompressed == perplexity(model, tokens)
    assert found.measured.compressed.nll == pytest.approx(
        perplexity(model, tokens, plan).nll, rel=1e-4 if dtype == torch.float32 else 2e-2
    )
    card = (found.folder / "README.md").read_text()
    assert f"{found.bytes_per_token:,} bytes per token" in card
    assert f"{found.measured.compressed.nll:.4f} nats per token instead of" in card
    assert "reference-llama with a smaller" in card
    assert "{" not in card
    assert str(Path.cwd()) not in card
    # Our own tools take it as they take any model.
    again, _ = load_model(str(found.folder))
    torch.testing.assert_close(logits_of(again, tokens), logits_of(loaded.float(), tokens))


NONLINEAR = ("qwen3", "gemma3", "gemma2", "gpt-oss", "ministral", "granite")
SETTINGS = {  # a qwen2 with some windows
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "layer_types": WINDOWS}
}


class TestRefusals:
    @pytest.mark.parametrize(
        ("family", "reason"),
        [
            ("qwen2", "different sliding windows"),
            *((family, "only models of type llama, mistral, qwen2 are") for family in NONLINEAR),
        ],
    )
    def test_models(self, family: str, reason: str, plan: CompressionPlan, tmp_path: Path) -> None:
        model = tiny_model(family, **SETTINGS.get(family, {}))
        with pytest.raises(ModelError, match=f"cannot be exported: .*{reason}"):
            export_checkpoint(model, plan, tmp_path / "out")
        assert not list(tmp_path.iterdir())

    @pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
    def test_an_adapter(self, plan: CompressionPlan, tmp_path: Path) -> None:
        from peft import LoraConfig, get_peft_model

        wrapped = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"]))
        with pytest.raises(ModelError, match="q_proj is no plain matrix"):
            export_checkpoint(wrapped, plan, tmp_path / "out")

    def test_offloaded_weights(self, plan: CompressionPlan, tmp_path: Path) -> None:
        model, _ = load_model(REFERENCE, offload=True)
        with pytest.raises(ModelError, match="load it whole"):
            export_checkpoint(model, plan, tmp_path / "out")

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda p, m: replace(p, sinks=3), "the first 3 tokens"),
            (lambda p, m: replace(p, sinks=2), "the first 2 tokens"),
            (lambda p, m: quantize(p, m, tiny_tokens(), Quantization(8)), "quantised"),
            (lambda p, m: bits_plan(m, tiny_tokens(), ratio=0.5), "quantised"),
            (lambda p, m: random_plan(m), "keys of layer 0 do not commute"),
            (lambda p, m: _with_layer(p, 1, "key", frequencies=None), "layer 1 do not commute"),
            (lambda p, m: _with_layer(p, 2, plan_for(m, ratio=0.5)), "layer 2 has other freq"),
            (lambda p, m: _with_values(p, plan_for(m, ratio=0.5)), "differ in width"),
            (lambda p, m: plan_for(tiny_model("llama", seed=1)), "made for other weights"),
        ],
    )
    def test_plans(
        self, change, reason: str, llama: PreTrainedModel, plan: CompressionPlan, tmp_path: Path
    ) -> None:
        with pytest.raises(PlanError, match=reason):
            export_checkpoint(llama, change(plan, llama), tmp_path / "out")
        assert not list(tmp_path.iterdir())

    def test_tokens_and_tokenizers(self, plan: CompressionPlan, tmp_path: Path) -> None:
        model, outside = tiny_model("llama"), torch.tensor([[64, 1]])
        with pytest.raises(ArgumentError, match="token id 64"):
            export_checkpoint(model, plan, tmp_path / "out", held_out=outside)
        model.config._name_or_path = str(tmp_path)
        with pytest.raises(ArgumentError):
            export_checkpoint(model, plan, tmp_path / "out")


def _with_layer(plan: CompressionPlan, index: int, other=None, **change) -> CompressionPlan:
    layers = list(plan.layers)
    if change:
        key = layers[index].key
        key = replace(key, basis=replace(key.basis, **change))
        layers[index] = replace(layers[index], key=key)
    else:
        layers[index] = other.layers[index]
    return replace(plan, layers=tuple(layers))


def _with_values(plan: CompressionPlan, other: CompressionPlan) -> CompressionPlan:
    layers = [
        replace(mine, value=its.value) for mine, its in zip(plan.layers, other.layers, strict=True)
    ]
    return replace(plan, layers=tuple(layers))


class TestFolder:
    def test_what_is_there_stays(
        self, llama: PreTrainedModel, plan: CompressionPlan, tmp_path: Path
    ) -> None:
        model, folder = llama, tmp_path / "deep" / "plain"
        export_checkpoint(model, plan, folder)
        (folder / "mine.txt").write_text("mine")
        with pytest.raises(RunError, match="holds a checkpoint already"):
            export_checkpoint(model, plan, folder)
        assert (folder / "mine.txt").exists()
        export_checkpoint(model, plan_for(model, ratio=0.5), folder, force=True)
        assert not (folder / "mine.txt").exists()
        assert json.loads((folder / "config.json").read_text())["head_dim"] == 8
        assert [path.name for path in folder.parent.iterdir()] == ["plain"]

    @pytest.mark.parametrize("force", [False, True])
    def test_what_is_no_checkpoint_is_never_replaced(
        self, llama: PreTrainedModel, plan: CompressionPlan, tmp_path: Path, force: bool
    ) -> None:
        file, current = tmp_path / "thesis.tex", "must not be the current one"
        file.write_text("years")
        for folder, reason in ((tmp_path, "no checkpoint"), (file, "is a file"), ("", current)):
            with pytest.raises(RunError, match=reason):
                export_checkpoint(llama, plan, folder, force=force)

    def test_a_write_that_fails_leaves_what_was_there(
        self,
        llama: PreTrainedModel,
        plan: CompressionPlan,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        folder = tmp_path / "plain"
        export_checkpoint(llama, plan, folder)
        before = (folder / "model.safetensors").read_bytes()

        def full(*args, **kwargs):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
        with pytest.raises(RunError, match="No space left"):
            export_checkpoint(llama, plan, folder, force=True)
        assert (folder / "model.safetensors").read_bytes() == before
        assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_a_moved_frequency_would_be_noticed(llama: PreTrainedModel, plan: CompressionPlan) -> None:
    """The law can fail: with another list of frequencies the logits are others."""
    model, tokens = llama, tiny_tokens(3, 20)
    made = folded(model, plan)
    made.model.rotary_emb.original_inv_freq *= 1.5
    made.model.rotary_emb.inv_freq *= 1.5
    made.config.rope_parameters["long_factor"] = [1.0] * 3
    difference = logits_of(made, tokens) - logits_of(model, tokens, plan)
    assert difference.abs().max() > 0.1


def test_families_are_those_of_the_tests() -> None:
    assert {name.split()[0].split("-")[0] for name in EXPORTED} == set(FAMILIES)
