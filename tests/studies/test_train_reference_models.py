"""Training the reference models, in miniature."""

import importlib.util
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from manifoldkv.models.loading import load_model
from manifoldkv.text.docstrings import split_of
from manifoldkv.text.sources import open_text
from manifoldkv.text.tokens import sample_tokens

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "studies" / "train_reference_models.py"
REFERENCE = ROOT / "studies" / "reference_models"


@pytest.fixture
def script(monkeypatch, tmp_path):
    """The script with a context of 32 tokens and 60 short documents; writes below tmp_path."""
    spec = importlib.util.spec_from_file_location("train_reference_models", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    documents = [f"Return the {a} of a {b}.\n" * 6 for a in "abcdefghij" for b in "uvwxyz"]
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module, "CONTEXT", 32)
    monkeypatch.setattr(module, "VOCABULARY", 300)
    monkeypatch.setattr(
        module, "read_docstrings", lambda split: (d for d in documents if split_of(d) == split)
    )
    monkeypatch.setattr(module, "read_pydoc_topics", lambda: iter(documents))
    return module


def run(script, monkeypatch, tmp_path, *arguments, code=0):
    argv = [str(SCRIPT), *arguments, "--threads", "1", "--work", str(tmp_path / "work")]
    monkeypatch.setattr(sys, "argv", argv)
    assert script.main() == code
    return tmp_path / "reference_models" / f"reference-{arguments[0]}"


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_trained_model_loads_with_its_card(script, monkeypatch, tmp_path, architecture):
    folder = run(script, monkeypatch, tmp_path, architecture, "--tokens", "512")
    model, tokenizer = load_model(str(folder))
    assert model.config.model_type == architecture
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "| tokens seen | 512 |" in card
    assert "| seed | 0 |" in card
    assert f"train_reference_models.py {architecture} --tokens 512" in card
    text = "Return the a of a u.\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_interrupted_training_ends_in_the_same_weights(script, monkeypatch, tmp_path):
    options = ("llama", "--tokens", "512", "--checkpoint-every", "2")
    (tmp_path / "straight").mkdir()
    monkeypatch.setattr(script, "HERE", tmp_path / "straight")
    straight = run(script, monkeypatch, tmp_path / "straight", *options)
    take_step, steps = script.take_step, itertools.count()

    def interrupted(*arguments):
        if next(steps) == 3:
            raise KeyboardInterrupt
        return take_step(*arguments)

    monkeypatch.setattr(script, "take_step", interrupted)
    (tmp_path / "twice").mkdir()
    monkeypatch.setattr(script, "HERE", tmp_path / "twice")
    run(script, monkeypatch, tmp_path / "twice", *options, code=130)
    resumed = run(script, monkeypatch, tmp_path / "twice", *options)
    first = load_file(straight / "model.safetensors")
    second = load_file(resumed / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_windows_of_an_epoch_do_not_overlap(script):
    tokens = np.arange(330)
    batches = list(itertools.islice(script.sample_batches(tokens, 3, seed=0), 3))
    assert all(batch.shape == (3, 33) for batch in batches)
    inputs = torch.cat([batch[:, :-1].flatten() for batch in batches])
    assert len(set(inputs.tolist())) == inputs.numel()


def test_learning_rate_warms_up_stays_and_falls_to_zero(script):
    factors = [script.learning_rate_factor(step, 1000) for step in range(1000)]
    assert factors[0] == 1 / 50
    assert set(factors[49:600]) == {1.0}
    assert factors[-1] == pytest.approx(1 / 400)
    assert factors[600:] == sorted(factors[600:], reverse=True)


@pytest.mark.parametrize("name", ["reference-llama", "reference-qwen3"])
def test_committed_models_know_english_technical_prose(name):
    """A uniform guess has perplexity 4096; these are real models."""
    model, tokenizer = load_model(str(REFERENCE / name))
    tokens = sample_tokens(
        open_text("docstrings"), tokenizer, sequences=4, length=128, split="held-out"
    )
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.exp() < 60
    assert sum(p.numel() for p in model.parameters()) < 6_000_000
    assert (REFERENCE / name / "model.safetensors").stat().st_size < 12_000_000
    assert "perplexity, held-out docstrings" in (REFERENCE / name / "README.md").read_text("utf-8")
