"""Healing: what moves, where it leads, and that it goes on."""

from pathlib import Path

import pytest
import torch

from manifoldkv import (
    DivergenceError,
    OutputError,
    SeedError,
    TextError,
    compress,
    export_checkpoint,
)
from manifoldkv.export import heal as module
from manifoldkv.export.fold import PROJECTIONS, folded
from manifoldkv.export.heal import _batches, heal
from manifoldkv.models.projected import divergence, log_probabilities
from manifoldkv.runs.checkpoints import Checkpoints
from manifoldkv.runs.files import only_run
from tests.families import tiny_model, tiny_tokens

RATE = 1e-2


def parts(dtype: torch.dtype = torch.float32):
    """A model, what it is folded to, and tokens."""
    model, tokens = tiny_model("qwen2", dtype), tiny_tokens(6, 20)
    return model, folded(model, compress(model, tokens, recipe="commuting")), tokens


@torch.no_grad()
def lost(model, made, tokens) -> float:
    return float(divergence(*(log_probabilities(x, tokens) for x in (model, made))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predictions_come_closer_and_only_projections_move(dtype: torch.dtype) -> None:
    model, made, tokens = parts(dtype)
    before = {name: x.clone() for name, x in made.state_dict().items()}
    start = lost(model, made, tokens)
    late = heal(model, made, tokens, steps=40, learning_rate=RATE)
    assert lost(model, made, tokens) < 0.5 * start
    assert late == pytest.approx(lost(model, made, tokens), rel=0.5)
    for name, now in made.state_dict().items():
        assert now.dtype == dtype
        moved = any(f".{projection}." in name for projection in PROJECTIONS)
        assert torch.equal(before[name], now) != moved, name
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    assert not any(p.requires_grad for p in made.parameters())


def test_the_loss_is_the_divergence_and_its_gradient_that_of_all_projections() -> None:
    model, made, tokens = parts()
    start = lost(model, made, tokens)
    losses = heal(model, made, tokens, steps=1, learning_rate=0.0, sequences_per_step=6)
    assert losses == pytest.approx(start, rel=1e-5)


def test_a_run_that_was_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS_BETWEEN_WRITES", 2)
    model, whole, tokens = parts()
    heal(model, whole, tokens, steps=7, learning_rate=RATE)
    differentiate, calls = module._differentiate, []

    def dying(*args):
        calls.append(None)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return differentiate(*args)

    monkeypatch.setattr(module, "_differentiate", dying)
    made = parts()[1]
    with pytest.raises(KeyboardInterrupt):
        heal(model, made, tokens, steps=7, learning_rate=RATE, checkpoints=Checkpoints(tmp_path))
    made = parts()[1]
    heal(model, made, tokens, steps=7, learning_rate=RATE, checkpoints=Checkpoints(tmp_path))
    assert len(calls) == 6 + 3  # four of the first six were stored
    for (name, one), other in zip(
        whole.state_dict().items(), made.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name


def test_every_sequence_comes_once_before_any_comes_again() -> None:
    batches = _batches(7, 3, steps=7, seed=1)
    assert [len(batch) for batch in batches] == [3] * 7
    order = torch.cat(batches)
    for start in (0, 7, 14):
        assert sorted(order[start : start + 7].tolist()) == list(range(7))
    assert [len(batch) for batch in _batches(2, 4, steps=3, seed=1)] == [2] * 3


def test_healed_it_is_written_and_the_card_says_so(tmp_path: Path) -> None:
    model, tokens = tiny_model("llama", torch.float32), tiny_tokens(4, 20)
    plan = compress(model, tokens, recipe="commuting")
    plain, healed = (
        export_checkpoint(
            model,
            plan,
            tmp_path / str(steps),
            held_out=tokens,
            heal_steps=steps,
            text=tokens,
            work=tmp_path / "work",
        )
        for steps in (0, 30)
    )
    assert healed.measured.added_nll < plain.measured.added_nll
    assert "not trained afterwards" in (plain.folder / "README.md").read_text()
    card = (healed.folder / "README.md").read_text()
    assert "trained for 30 steps to predict" in card
    assert "on 4 × 20 tokens of tokens" in card
    assert list((tmp_path / "work").glob("healing-*.safetensors"))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    model, made, tokens = parts()
    with pytest.raises(SeedError):
        heal(model, made, tokens, steps=1, seed=1 << 70)
    with torch.no_grad():
        made.lm_head.weight[0] = torch.nan
    with pytest.raises(DivergenceError, match="at step 0 of healing"):
        heal(model, made, tokens, steps=1)
    model = tiny_model("llama", torch.float32)
    plan = compress(model, tokens, recipe="commuting")
    with pytest.raises(TextError, match="give a text to heal on"):
        export_checkpoint(model, plan, tmp_path / "out", heal_steps=2)
    with pytest.raises(SeedError):
        export_checkpoint(model, plan, tmp_path / "out", heal_steps=2, text=tokens, seed=1 << 70)
    with only_run(tmp_path / "work"), pytest.raises(OutputError, match="another run"):
        export_checkpoint(
            model, plan, tmp_path / "out", heal_steps=2, text=tokens, work=tmp_path / "work"
        )
