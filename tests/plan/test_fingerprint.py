"""A plan knows the weights it was made for, however they are loaded, and no others."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from manifoldkv import (
    CompressionPlan,
    Quantization,
    compress,
    compressed,
    load_model,
    quantize,
    tune,
)
from manifoldkv.cli import main
from manifoldkv.errors import ModelError, PlanError
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.fingerprint import SIDE, fingerprint
from manifoldkv.models.offloading import LayerWeights, load_offloaded
from manifoldkv.models.support import decoder_layers
from tests.families import FAMILIES, tiny_model, tiny_tokens
from tests.plans import random_plan

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OTHER = "made for other weights"
MODEL = Path(__file__).parents[2] / "studies" / "reference_models" / "reference-llama"


@pytest.mark.parametrize("family", FAMILIES)
def test_dtypes_do_not_matter(family: str) -> None:
    models = [tiny_model(family).to(dtype) for dtype in DTYPES]
    for plan in map(random_plan, models):
        for model in models:
            plan.check_model(Decoder.of(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_other_weights_are_refused(family: str) -> None:
    plan = random_plan(tiny_model(family))
    with pytest.raises(PlanError, match=OTHER):
        plan.check_model(Decoder.of(tiny_model(family, seed=1)))


def test_a_model_without_its_view_is_refused_by_name() -> None:
    model = tiny_model("llama")
    plan = random_plan(model)
    for check in (plan.check_model, plan.transferred_to):
        with pytest.raises(PlanError, match=r"Decoder\.of\(model\), got LlamaForCausalLM"):
            check(model)


def changed(model: PreTrainedModel, chosen: Callable[[str], bool], share: float) -> PreTrainedModel:
    """As by fine-tuning: every chosen weight is moved by a share of what is usual in its matrix."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if chosen(name):
            noise = torch.randn(weight.shape, generator=generator).to(weight)
            weight.data += share * weight.std() * noise
    return model


@pytest.mark.parametrize("part", ["", "embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj"])
def test_fine_tuned_weights_are_refused(part: str) -> None:
    plan = random_plan(tiny_model("llama"))
    tuned = changed(tiny_model("llama"), lambda name: part in name, 0.01)
    with pytest.raises(PlanError, match=OTHER):
        plan.check_model(Decoder.of(tuned))


def test_all_that_takes_a_plan_asks() -> None:
    model, other, tokens = tiny_model("llama"), tiny_model("llama", seed=1), tiny_tokens()
    plan = random_plan(model)
    with pytest.raises(PlanError, match=OTHER), compressed(other, plan):
        pass
    with pytest.raises(PlanError, match=OTHER):
        quantize(plan, other, tokens, Quantization(8))
    with pytest.raises(PlanError, match=OTHER):
        tune(other, plan, tokens, steps=1)


def test_a_plan_can_be_transferred() -> None:
    model, other, tokens = tiny_model("llama"), tiny_model("llama", seed=1), tiny_tokens()
    plan = random_plan(model)
    moved = plan.transferred_to(Decoder.of(other))
    assert moved.digest() != plan.digest()
    with compressed(other, moved):
        assert other(input_ids=tokens).logits.isfinite().all()
    with pytest.raises(PlanError, match=OTHER):
        moved.check_model(Decoder.of(model))
    with pytest.raises(PlanError, match="another model"):
        plan.transferred_to(Decoder.of(tiny_model("llama", intermediate_size=64)))


@pytest.mark.parametrize("tokens", [60, 70, 128])
def test_added_tokens_do_not_matter(tokens: int) -> None:
    """Neither do those cut off, for keys and values depend on the tokens that are there."""
    plan = random_plan(tiny_model("llama"))
    model = tiny_model("llama")
    model.resize_token_embeddings(tokens, mean_resizing=False)
    plan.check_model(Decoder.of(model))
    assert plan.transferred_to(Decoder.of(model)).digest() == plan.digest()


def test_compress_takes_the_fingerprint_of_its_model() -> None:
    model = tiny_model("llama")
    plan = compress(model, tiny_tokens(), recipe="eigen-attention")
    assert torch.equal(plan.fingerprint, fingerprint(model))


def test_offloaded_weights_are_read_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("llama", num_hidden_layers=5).save_pretrained(tmp_path, max_shard_size="20KB")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    plan = random_plan(whole)
    offloaded, _ = load_offloaded(str(tmp_path), torch.bfloat16, "cpu")
    read = []
    stock = LayerWeights.read

    def counted(weights: LayerWeights, name: str) -> torch.Tensor:
        read.append(weights.prefix + name)
        return stock(weights, name)

    monkeypatch.setattr(LayerWeights, "read", counted)
    plan.check_model(Decoder.of(offloaded))
    assert read == [
        f"model.layers.{layer}.self_attn.{name}.weight"
        for layer in (0, 4)
        for name in ("k_proj", "o_proj", "q_proj", "v_proj")
    ]
    assert all(p.is_meta for layer in decoder_layers(offloaded) for p in layer.parameters())


def test_a_model_without_weights_is_refused() -> None:
    model = tiny_model("llama")
    plan = random_plan(model)
    with pytest.raises(ModelError, match="meta device"):
        plan.check_model(Decoder.of(model.to("meta")))


def test_it_is_small_and_saved_with_the_plan(tmp_path: Path) -> None:
    plan = random_plan(tiny_model("phi3"))
    assert plan.fingerprint.shape == (1 + 2 * 2, SIDE**2)  # the embedding; qkv_proj and o_proj
    plan.save(tmp_path)
    assert torch.equal(CompressionPlan.load(tmp_path).fingerprint, plan.fingerprint)


def test_the_command_asks_and_can_be_overruled(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load_model(str(MODEL))
    random_plan(model).save(tmp_path / "plan")
    changed(model, lambda name: "mlp" not in name, 0.02).save_pretrained(tmp_path / "tuned")
    tokenizer.save_pretrained(tmp_path / "tuned")
    ask = ["generate", "--prompt", "Return", "--max-new-tokens", "2", "--json"]
    ask += [str(tmp_path / "tuned"), "--plan", str(tmp_path / "plan")]
    for more, code in (([], 2), (["--other-weights"], 0)):
        monkeypatch.setattr(sys, "argv", ["manifoldkv", *ask, *more])
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code or 0) == code
        out, err = capsys.readouterr()
        assert (OTHER in err) == bool(code)
        assert code or json.loads(out)["cache_bytes"] > 0
