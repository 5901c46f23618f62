"""Runs of the Fisher information: offloaded weights, side effects, resumption and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.core.errors import ArgumentError, ModelError, RunError
from manifoldkv.models.decoder import Decoder
from manifoldkv.statistics import collect as collecting
from manifoldkv.statistics.collect import collect
from manifoldkv.statistics.moments import Moments
from tests.families import tiny_model, tiny_tokens
from tests.models.test_offloading import offloaded, saved


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss"])
def test_the_same_from_weights_that_stay_in_their_shards(family: str, tmp_path: Path) -> None:
    whole = saved(family, tmp_path)
    model = offloaded(tmp_path, torch.float32)
    assert collect(model, tiny_tokens()) == collect(whole, tiny_tokens())
    assert all(p.is_meta for layer in Decoder.of(model).layers for p in layer.parameters())


def test_one_layer_is_loaded_at_a_time(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    model, seen = offloaded(tmp_path, torch.float32), []

    def count(*ignored: object) -> None:
        layers = Decoder.of(model).layers
        seen.append(sum(not layer.self_attn.o_proj.weight.is_meta for layer in layers))

    for layer in Decoder.of(model).layers:
        layer.self_attn.o_proj.register_full_backward_hook(count)
        layer.self_attn.o_proj.register_forward_pre_hook(count)
    collect(model, tiny_tokens())
    assert len(seen) >= 3 * 3
    assert set(seen) == {1}


def test_the_model_is_left_as_it_was() -> None:
    model, tokens = tiny_model("gemma2").requires_grad_(True), tiny_tokens()
    frozen = Decoder.of(model).attentions[1].k_proj.weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layers, implementation = model.model.layers, model.config._attn_implementation
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    collect(model, tokens)
    assert [*model.state_dict()] == [*before]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert [p for p in model.parameters() if not p.requires_grad] == [frozen]
    assert model.model.layers is layers
    assert model.config._attn_implementation == implementation
    assert not any(m.training or m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.is_grad_enabled()
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, logits)


def test_a_model_that_is_trained_gives_the_same() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    expected = collect(model, tokens)
    model.train().requires_grad_(True)
    assert collect(model, tokens) == expected
    with torch.no_grad():
        assert collect(model, tokens) == expected
    model.activation_checkpointing_enable()
    for part in model.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.5
    assert collect(model, tokens) == expected
    assert all(part.training for part in model.modules())


class Kill(Exception):  # noqa: N818 (not an error)
    pass


def counted(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, last: int | None = None
) -> list[object]:
    """Count the calls of a function, and end the run at one of them."""
    function, calls = getattr(owner, name), []

    def count(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == last:
            raise Kill
        return function(*arguments)

    monkeypatch.setattr(owner, name, count)
    return calls


@pytest.mark.parametrize("file", range(3))
def test_an_interrupted_run_is_resumed(
    file: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each of the three files, of two sequences each."""
    monkeypatch.setattr(collecting, "SHARD", 2)
    model, tokens = tiny_model("gpt-oss", torch.bfloat16), tiny_tokens(5)
    expected = collect(model, tokens, seed=2)
    with monkeypatch.context() as patch:
        counted(patch, collecting.Checkpoints, "write_tensors", file + 1)
        with pytest.raises(Kill):
            collect(model, tokens, seed=2, folder=tmp_path)
    sites = counted(monkeypatch, Moments, "statistics")
    assert collect(model, tokens, seed=2, folder=tmp_path) == expected
    assert len(sites) == 2 * 3 * (3 - file)
    sites.clear()
    assert collect(model, tokens, seed=2, folder=str(tmp_path)) == expected
    assert not sites


def test_what_depends_on_something_else_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = tiny_model("gemma2"), tiny_tokens()
    collect(model, tokens, folder=tmp_path)
    softer = tiny_model("gemma2", attn_logit_softcapping=1.0)
    assert all(torch.equal(a, b) for a, b in zip(*map(weights, (model, softer)), strict=True))
    for other, settings in (
        (softer, {}),
        (tiny_model("gemma2", seed=1), {}),
        (model, {"seed": 1}),
        (model, {"jacobian": True}),
        (model, {"first": 1}),
    ):
        found = collect(other, tokens, folder=tmp_path, **settings)
        assert found == collect(other, tokens, **settings)
        assert found != collect(model, tokens)
    assert collect(model, tokens[:2], folder=tmp_path) == collect(model, tokens[:2])


def weights(model: PreTrainedModel) -> list[Tensor]:
    return [tensor for _, tensor in sorted(model.state_dict().items())]


def test_damaged_files_are_named_and_computed_again_once_deleted(tmp_path: Path) -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    expected = collect(model, tokens, folder=tmp_path)
    (file,) = tmp_path.glob("statistics-0-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunError, match=f"{file.name} is damaged"):
        collect(model, tokens, folder=tmp_path)
    file.unlink()
    assert collect(model, tokens, folder=tmp_path) == expected


def test_what_cannot_be_done_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    monkeypatch.setattr(collecting, "_statistics_of", None)
    with pytest.raises(ArgumentError):
        collect(model, tokens, seed=2**64)
    with pytest.raises(ArgumentError):
        collect(model, tokens + 64)
    for first in (-1, 12):
        with pytest.raises(ArgumentError, match=f"first must be >= 0 and < 12 tokens, got {first}"):
            collect(model, tokens, first=first)
    for prompt in (0, 4, 12):
        with pytest.raises(ArgumentError, match=rf"prompt must be > first \(4\) .*, got {prompt}"):
            collect(model, tokens, first=4, prompt=prompt)
    for family in ("mamba", "gpt2", "deepseek-v3"):
        with pytest.raises(ModelError):
            collect(tiny_model(family), tokens)


def test_what_is_not_finite_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.lm_head.weight.data[3] = torch.inf
    with pytest.raises(RunError, match="layer 2 are not finite"):
        collect(model, tiny_tokens(), folder=tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_statistics_compare_and_print_as_one_expects() -> None:
    first, second = (collect(tiny_model("llama"), tiny_tokens()) for _ in range(2))
    assert first == second
    assert first != "anything else"
    assert first != replace(first, sequences=3)
    assert first != replace(first, held_out=second)
    assert repr(first.layers[0].key) == "TensorStatistics(16 features, 48 tokens)"
    assert "4 + 0 × 12 tokens" in repr(first)
