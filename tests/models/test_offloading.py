"""Models whose weights stay in their shards: the same numbers, one layer at a time."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from manifoldkv import compress, compressed, load_model
from manifoldkv.activations.capture import capture
from manifoldkv.errors import ModelError
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.offloading import load_offloaded, named_weights, resident
from manifoldkv.runs.checkpoints import digest_of_model
from tests.families import FAMILIES, tiny_model, tiny_tokens
from tests.plans import random_plan
from tests.short_recipes import short

ROOT = Path(__file__).parents[2] / "studies" / "reference_models"


def saved(family: str, folder: Path) -> PreTrainedModel:
    """A tiny model, saved in many shards and loaded as a whole."""
    model = tiny_model(family)
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    # Not the model itself: some families round constants when they are loaded.
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def offloaded(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    model, loaded = load_offloaded(str(folder), dtype, "cpu")
    assert not loaded["missing_keys"]
    return model.eval().requires_grad_(False)


def is_loaded(layer: nn.Module) -> bool:
    states = {p.is_meta for p in layer.parameters()}
    assert len(states) == 1
    return states == {False}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_numbers_as_a_model_in_memory(family: str, tmp_path: Path) -> None:
    whole = saved(family, tmp_path)
    model = offloaded(tmp_path, torch.float32)
    tokens = tiny_tokens(2, 12)
    assert torch.equal(model(input_ids=tokens).logits, whole(input_ids=tokens).logits)
    assert not any(map(is_loaded, Decoder.of(model).layers))
    assert digest_of_model(model) == digest_of_model(whole)
    for (name, weight), (expected_name, expected) in zip(
        named_weights(model), named_weights(whole), strict=True
    ):
        assert name == expected_name
        assert torch.equal(weight, expected)


@pytest.mark.parametrize("recipe", ["bits", "low-rank", "eigen-attention", "stored"])
def test_the_same_plan_as_from_a_model_in_memory(recipe: str, tmp_path: Path) -> None:
    whole = saved("llama", tmp_path)
    model = offloaded(tmp_path, torch.float32)
    tokens = tiny_tokens(4, 12)
    plan, other = (compress(m, tokens, recipe=short(recipe), context=200) for m in (model, whole))
    assert plan.digest() == other.digest()
    assert not any(map(is_loaded, Decoder.of(model).layers))
    if not plan.attended:  # no model runs on it
        return
    with compressed(model, plan), compressed(whole, plan):
        assert torch.equal(model(input_ids=tokens).logits, whole(input_ids=tokens).logits)


def test_no_two_layers_are_loaded_at_a_time(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    model = offloaded(tmp_path, torch.float32)
    seen = []

    def count(*ignored: object) -> None:
        seen.append(sum(map(is_loaded, Decoder.of(model).layers)))

    for layer in Decoder.of(model).layers:
        layer.self_attn.o_proj.register_forward_pre_hook(count)
    compress(model, tiny_tokens(4, 12), recipe=short("low-rank"))
    assert len(seen) > 20
    assert set(seen) == {1}


def test_a_layer_can_be_held(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    model = offloaded(tmp_path, torch.float32)
    first, second, _ = Decoder.of(model).layers
    with resident(first):
        assert (is_loaded(first), is_loaded(second)) == (True, False)
        model(input_ids=tiny_tokens(1, 4))
        assert (is_loaded(first), is_loaded(second)) == (True, False)
    assert not is_loaded(first)
    assert set(Decoder.of(model).devices) == {torch.device("cpu")}


def test_a_layer_that_fails_is_let_go(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    model = offloaded(tmp_path, torch.float32)
    layer = Decoder.of(model).layers[0]

    def fail(*ignored: object) -> None:
        raise RuntimeError("on purpose")

    hook = layer.self_attn.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(input_ids=tiny_tokens(1, 4))
    hook.remove()
    assert not is_loaded(layer)
    assert model(input_ids=tiny_tokens(1, 4)).logits.isfinite().all()


@pytest.mark.parametrize("name", ["reference-llama", "reference-qwen3"])
def test_loading_by_name_and_writing_text(name: str) -> None:
    whole, tokenizer = load_model(str(ROOT / name))
    model, _ = load_model(str(ROOT / name), offload=True)
    inputs = tokenizer("Return the", return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    assert torch.equal(written, whole.generate(**inputs, max_new_tokens=5, do_sample=False))


def test_weights_are_converted_as_they_are_read(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    model = offloaded(tmp_path, torch.bfloat16)
    with resident(Decoder.of(model).layers[0]):
        assert {p.dtype for p in Decoder.of(model).layers[0].parameters()} == {torch.bfloat16}


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json does not exist"):
        load_model(str(tmp_path), offload=True)


@pytest.mark.parametrize("offload", [cpu_offload, disk_offload])
def test_weights_that_hooks_of_accelerate_hold_are_refused(
    offload: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    model, plan = tiny_model("llama"), random_plan(tiny_model("llama"))
    if offload is disk_offload:
        disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    else:
        cpu_offload(model, execution_device=torch.device("cpu"))
    for call in (
        lambda: compress(model, tiny_tokens()),
        lambda: next(capture(model, tiny_tokens())),
        lambda: compressed(model, plan).__enter__(),
    ):
        with pytest.raises(ModelError, match="offloaded by accelerate"):
            call()


def test_hooks_that_move_inputs_alone_are_no_obstacle() -> None:
    model = tiny_model("llama")
    plan = compress(model, tiny_tokens(), recipe="eigen-attention")
    model = dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert compress(model, tiny_tokens(), recipe="eigen-attention").digest() == plan.digest()
