"""Statistics: parts add up, files hold them, matrices are those of the layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from manifoldkv.core.basis import SITES
from manifoldkv.core.errors import ArgumentError, RunError
from manifoldkv.models.interface import attend
from manifoldkv.statistics import collect as collecting
from manifoldkv.statistics import statistics as module
from manifoldkv.statistics.capture import capture
from manifoldkv.statistics.collect import collect
from manifoldkv.statistics.layer import Batch
from manifoldkv.statistics.outputs import layer_output
from manifoldkv.statistics.statistics import Statistics, merged
from tests.families import tiny_model, tiny_tokens

FAMILIES = ["llama", "gemma3", "gpt-oss", "qwen2"]


def collected(family: str, tokens: Tensor, **settings: object) -> Statistics:
    return collect(tiny_model(family), tokens, jacobian=True, **settings)


def close(first: Statistics, second: Statistics, tolerance: float) -> None:
    mine, its = first.tensors(), second.tensors()
    assert mine.keys() == its.keys()
    for name, x in mine.items():
        scale = its[name].double().abs().max()
        torch.testing.assert_close(x, its[name], rtol=0, atol=float(tolerance * scale), msg=name)


@pytest.mark.parametrize("prompt", [None, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_add_up_to_the_whole(
    family: str, prompt: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tasks of other sizes, and of halves that share their random numbers."""
    tokens = tiny_tokens(5)
    whole = collected(family, tokens, first=2, prompt=prompt)
    monkeypatch.setattr(collecting, "SHARD", 2)
    close(collected(family, tokens, first=2, prompt=prompt), whole, 1e-10)
    monkeypatch.setattr(collecting, "SHARD", 3)
    parts = []
    real = collecting._statistics_of

    def kept(*arguments: object) -> object:
        for part in real(*arguments):
            parts.append(part)
            yield part

    monkeypatch.setattr(collecting, "_statistics_of", kept)
    collected(family, tokens, first=2, prompt=prompt)
    first, second = parts
    both = first.merge(second)
    close(both, whole, 1e-10)
    assert both.describe() == whole.describe()
    held_out = merged([replace(part, held_out=part) for part in parts])
    assert held_out.held_out == both


def test_samples_are_whole_sequences_evenly_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tiny_tokens(9)
    whole = collected("llama", tokens)
    monkeypatch.setattr(module, "SAMPLED_TOKENS", 3 * tokens.shape[1])
    monkeypatch.setattr(collecting, "SHARD", 2)
    thinned = collected("llama", tokens)
    for layer, of_all in zip(thinned.layers, whole.layers, strict=True):
        for site in SITES:
            torch.testing.assert_close(
                layer.of(site).samples, of_all.of(site).samples[[0, 4, 8]], rtol=1e-9, atol=1e-9
            )
    twice = whole.merge(whole)
    assert len(twice.layers[0].key.samples) == 3
    assert twice.sequences == 18


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_and_readers_are_those_of_the_layer(family: str) -> None:
    tokens = tiny_tokens()
    statistics = collected(family, tokens, first=3)
    for activations in capture(tiny_model(family), tokens):
        layer = statistics.layers[activations.layer]
        projections = activations.projections("pre")
        for site, x in (("key", projections.keys), ("value", projections.values)):
            expected = x[:, :, 3:].transpose(1, 2).flatten(2)
            torch.testing.assert_close(layer.of(site).samples, expected, rtol=1e-9, atol=1e-9)
            flat = expected.flatten(0, 1)
            torch.testing.assert_close(layer.of(site).mean, flat.mean(dim=0))
        share = activations.query_heads // activations.kv_heads
        queries = projections.queries[:, :, 3:].transpose(0, 1).flatten(1, 2)  # (H_q, tokens, d)
        outputs = activations.output_weight()
        for site, rows, count in (("key", queries, queries.shape[1]), ("value", outputs.mT, 1)):
            by_head = (rows.mT @ rows / count).unflatten(0, (-1, share)).sum(dim=1)
            torch.testing.assert_close(layer.of(site).readers, by_head)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_jacobian_weighs_errors_as_the_output_of_the_layer_does(family: str) -> None:
    """JᵀJ of a layer by finite differences, relative to the output, is the mean over many signs."""
    tokens = tiny_tokens(2, 5)
    model = tiny_model(family)
    runs = [collect(model, tokens, jacobian=True, seed=seed).layers[1] for seed in range(200)]
    activations = next(iter(capture(model, tokens, [1])))
    projections = activations.projections("pre")
    norms = torch.linalg.vector_norm(activations.outputs, dim=(1, 2))
    for site, x in (("key", projections.keys), ("value", projections.values)):
        columns = _differences(_output_of(activations, projections, site), x)
        expected = sum(
            (rows.mT @ rows) / norm**2
            for sequence, norm in zip(columns, norms, strict=True)
            for rows in sequence
        )
        expected = expected / len(tokens)
        samples = torch.stack([run.of(site).jacobian for run in runs])
        error = samples.std(dim=0) / len(runs) ** 0.5
        assert ((samples.mean(dim=0) - expected).abs() < 5 * error + 1e-9).all()


def _output_of(activations: object, projections: object, site: str) -> Callable[[Tensor], Tensor]:
    def output(x: Tensor) -> Tensor:
        keys = x if site == "key" else projections.keys
        values = x if site == "value" else projections.values
        queries, keys = activations.rotate(projections.queries), activations.rotate(keys)
        mixed = attend(queries, keys, values, activations.mask, activations.settings)
        return layer_output(activations, mixed, Batch(torch.arange(len(mixed))))

    return output


def _differences(output: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Derivatives of the output, (S, n, n · hidden, D): token by token of the changed features."""
    step, found = 1e-3, []  # norms compute in float32
    for token in range(x.shape[2]):
        columns = []
        for head in range(x.shape[1]):
            for feature in range(x.shape[3]):
                change = torch.zeros_like(x)
                change[:, head, token, feature] = step
                columns.append((output(x + change) - output(x - change)).flatten(1) / (2 * step))
        found.append(torch.stack(columns, dim=-1))
    return torch.stack(found, dim=1)


def test_a_file_holds_everything(tmp_path: Path) -> None:
    statistics = replace(
        collected("gemma3", tiny_tokens()), held_out=collected("gemma3", tiny_tokens(2))
    )
    path = tmp_path / "statistics.safetensors"
    statistics.save(path)
    assert Statistics.load(path) == statistics
    path.write_bytes(path.read_bytes()[:1000])
    for damaged in (path, tmp_path / "missing.safetensors"):
        with pytest.raises(RunError, match=f"{damaged.name} holds no statistics, or is damaged"):
            Statistics.load(damaged)


def test_what_does_not_fit_is_not_merged() -> None:
    statistics = collected("llama", tiny_tokens())
    with pytest.raises(ArgumentError, match="must have one first, got 0 and 1"):
        statistics.merge(collected("llama", tiny_tokens(), first=1))
    with pytest.raises(ArgumentError, match="must be of one model"):
        statistics.merge(collect(tiny_model("llama", seed=1), tiny_tokens()))
