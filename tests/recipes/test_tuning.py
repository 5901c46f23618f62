from pathlib import Path

import pytest
import torch

from manifoldkv import (
    CompressionPlan,
    Quantization,
    compress,
    compressed,
    load_model,
    open_text,
    sample_tokens,
    tune,
)
from manifoldkv.core.errors import PlanError, RunError
from manifoldkv.models.fingerprint import config_hash
from manifoldkv.models.support import decoder_layers
from manifoldkv.recipes import tune as tuning
from manifoldkv.recipes.trainable import TrainableBases
from manifoldkv.runs.checkpoints import Checkpoints
from manifoldkv.statistics.projected import divergence, log_probabilities, projected
from tests.families import KINDS, tiny_model, tiny_tokens
from tests.plans import designed_plan, random_plan


def lost(model, plan: CompressionPlan, tokens: torch.Tensor) -> float:
    """Divergence through the cache."""
    with torch.no_grad():
        exact = model(input_ids=tokens).logits.log_softmax(-1)
        with compressed(model, plan):
            return float(divergence(exact, model(input_ids=tokens).logits.log_softmax(-1)))


def projectors(plan: CompressionPlan) -> list[torch.Tensor]:
    return [site.basis.projector() for layer in plan.layers for _, site in layer.sites]


@pytest.mark.parametrize(
    ("grouping", "oblique", "rotary"),
    [("shared", True, "pre"), (1, False, "post"), (1, True, "post"), ("all", True, "pre")],
)
def test_the_divergence_falls_and_bases_stay_bases(
    grouping: str | int, oblique: bool, rotary: str
) -> None:
    model, tokens = tiny_model("qwen3"), tiny_tokens()
    names = {"key_grouping": grouping, "value_grouping": grouping}
    start = random_plan(model, **names, rotary=rotary, oblique=oblique)
    tuned = tune(model, start, tokens, steps=15)  # a plan checks its bases when it is made
    assert lost(model, tuned, tokens) < 0.9 * lost(model, start, tokens)
    assert tuned.ratio == start.ratio
    for before, after in zip(start.layers, tuned.layers, strict=True):
        assert after.key.basis.orthonormal == before.key.basis.orthonormal
        assert after.value.grouping == before.value.grouping
        assert after.key.basis.down.dtype == before.key.basis.down.dtype


@pytest.mark.parametrize("oblique", [False, True])
def test_a_rate_of_nothing_keeps_the_projectors(oblique: bool) -> None:
    model = tiny_model("llama")
    start = random_plan(model, oblique=oblique)
    tuned = tune(model, start, tiny_tokens(), steps=3, learning_rate=0.0)
    for before, after in zip(projectors(start), projectors(tuned), strict=True):
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)


def test_the_model_is_left_as_it_was() -> None:
    model, tokens = tiny_model("llama").requires_grad_(True), tiny_tokens()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tune(model, random_plan(model), tokens, steps=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any("forward" in vars(layer) for layer in decoder_layers(model))


@pytest.mark.parametrize("exact", [{}, {"sinks": 2}])
def test_the_loss_is_that_of_the_cache(exact: dict[str, int]) -> None:
    model, tokens = tiny_model("gemma3"), tiny_tokens()
    plan = random_plan(model, **exact)
    found = tuning.differentiate(model, tokens, plan, TrainableBases(plan, torch.device("cpu")))
    assert found == pytest.approx(lost(model, plan, tokens), rel=1e-4)


def test_without_a_step_or_a_basis_to_train_the_plan_is_returned() -> None:
    model = tiny_model("llama")
    full = random_plan(model, key_rank=8, value_rank=8)
    assert tune(model, full, tiny_tokens(), steps=2) is full
    part = random_plan(model)
    assert tune(model, part, tiny_tokens(), steps=0) is part


def test_the_same_seed_gives_the_same_plan() -> None:
    model, start = tiny_model("llama"), random_plan(tiny_model("llama"))
    first = tune(model, start, tiny_tokens(), steps=3, seed=5)
    assert first == tune(model, start, tiny_tokens(), steps=3, seed=5) != start


def test_an_interrupted_tuning_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in ten steps the state is stored, for this number of steps alone."""
    model, tokens = tiny_model("llama"), tiny_tokens()
    start = random_plan(model)
    differentiate, calls = tuning.differentiate, []

    def interrupted(*arguments: object) -> float:
        calls.append(arguments)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return differentiate(*arguments)

    def tuned(steps: int) -> CompressionPlan:
        return tune(model, start, tokens, steps=steps, checkpoints=Checkpoints(tmp_path))

    expected = tune(model, start, tokens, steps=14)
    monkeypatch.setattr(tuning, "differentiate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tuned(14)
    for count in (12 + 4, 12 + 4):
        assert tuned(14).digest() == expected.digest()
        assert len(calls) == count
    assert tuned(13).digest() != expected.digest()
    assert len(calls) == 12 + 4 + 13


@pytest.mark.parametrize("name", ["tune.py", "trainable.py", "projected.py"])
def test_a_state_that_other_code_left_is_not_taken(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    read, taken = Path.read_bytes, []

    def written() -> set[str]:
        tune(model, random_plan(model), tokens, steps=1, checkpoints=Checkpoints(tmp_path))
        return {path.name for path in tmp_path.glob("tuning*")}

    def edited(path: Path) -> bytes:
        taken.append(path.name)
        return read(path) + b"# edited" * (path.name == name)

    before = written()
    monkeypatch.setattr(Path, "read_bytes", edited)
    assert len(written()) == 2 * len(before) == 2
    assert name in taken


def test_impossible_starts_are_refused() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    with pytest.raises(PlanError, match=r"8-bit integers in .* cannot be tuned: tune a plan of"):
        tune(model, random_plan(model, quantization=Quantization(8)), tokens)
    for kind in ("dense", "chain"):
        coded = designed_plan(model, kind, tokens, ratio=0.5)
        with pytest.raises(PlanError, match=r"quantised latents \(mixed widths\) cannot be tuned"):
            tune(model, coded, tokens, steps=1)
    with pytest.raises(PlanError):
        tune(tiny_model("llama", hidden_size=48), random_plan(model), tokens)
    broken = tiny_model("llama")
    broken.lm_head.weight.data.fill_(float("nan"))
    plan = random_plan(broken)
    assert plan.config_hash == config_hash(broken.config)
    with pytest.raises(RunError, match="at step 0 of tuning"):
        tune(broken, plan, tokens)


def test_held_out_predictions_of_a_trained_model_come_closer() -> None:
    model, tokenizer = load_model("studies/reference_models/reference-llama")
    text = open_text("pydoc-topics")
    calibration = sample_tokens(text, tokenizer, sequences=4, length=64, split="calibration")
    held_out = sample_tokens(text, tokenizer, sequences=4, length=64, split="held-out")
    start = compress(model, calibration, recipe="eigen-attention")
    tuned = tune(model, start, calibration, steps=20)
    assert lost(model, tuned, held_out) < 0.95 * lost(model, start, held_out)


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("family", KINDS)
def test_running_layers_again_changes_no_gradient(family: str, sinks: int) -> None:
    model, tokens = tiny_model(family).requires_grad_(False), tiny_tokens()
    plan = random_plan(model, sinks=sinks)
    bases = TrainableBases(plan, model.device)
    lost = tuning.differentiate(model, tokens, plan, bases)
    found = [p.grad.clone() for p in bases.parameters()]
    exact = log_probabilities(model, tokens)
    with projected(model, bases.now(), sinks=sinks):
        expected = divergence(exact, log_probabilities(model, tokens))
    assert lost == pytest.approx(expected.item())
    for one, other in zip(found, torch.autograd.grad(expected, bases.parameters()), strict=True):
        torch.testing.assert_close(one, other)
