"""``manifoldkv export``."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from manifoldkv import compress, load_model, open_text, perplexity, sample_tokens
from tests.cli.test_cli import MODEL, phases, run

FEW = ("--sequences", 2, "--length", 48)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, _ = load_model(MODEL)
    folder = tmp_path_factory.mktemp("plans") / "plan"
    compress(model, "docstrings", recipe="commuting", sequences=2, length=48).save(folder)
    return folder


def test_a_checkpoint_is_written_and_measured(
    plan: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    ask = ("export", MODEL, "--plan", plan, "--out", tmp_path / "plain", *FEW)
    code, out, err = run(capsys, monkeypatch, *ask)
    assert (code, f"checkpoint: {tmp_path / 'plain'}" in out) == (0, True)
    assert phases(err) == [
        *("loading", "reading", "multiplying", "measuring", "measuring", "writing"),
    ]
    assert "1.5 KiB per token, 3.0 KiB before" in out
    code, _, err = run(capsys, monkeypatch, *ask)
    assert (code, err.count("\n"), "--force" in err) == (2, 1, True)
    code, out, _ = run(capsys, monkeypatch, *ask, "--force", "--json")
    facts = json.loads(out)
    assert facts["bytes_per_token"] * 2 == facts["stock_bytes_per_token"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    _, tokenizer = load_model(str(tmp_path / "plain"))
    text = open_text("docstrings")
    tokens = sample_tokens(text, tokenizer, sequences=2, length=48, split="held-out")
    assert facts["exported_perplexity"] == perplexity(model, tokens).perplexity


def test_what_is_in_the_way_is_one_line(plan: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    qwen = str(Path(MODEL).with_name("reference-qwen3"))
    for change, reason in (
        ({"--out": tmp_path / "mine"}, "no checkpoint"),
        ({"--plan": tmp_path}, "cannot read"),
        ({"--text": "nowhere.txt"}, "nowhere.txt"),
        ({"model": qwen}, "made for"),
    ):
        given = {"--plan": plan, "--out": tmp_path / "out"} | change
        model = given.pop("model", MODEL)
        options = (part for pair in given.items() for part in pair)
        code, out, err = run(capsys, monkeypatch, "export", model, *options)
        said = [line for line in err.splitlines() if line.startswith("manifoldkv: ")]
        assert (code, out, len(said)) == (2, "", 1)
        assert reason in said[0]
        assert not (tmp_path / "out").exists()


def test_a_family_that_cannot_be_folded_is_named(tmp_path: Path, capsys, monkeypatch) -> None:
    qwen = str(Path(MODEL).with_name("reference-qwen3"))
    model, _ = load_model(qwen)
    tokens = torch.arange(64).view(2, 32)
    compress(model, tokens, recipe="commuting").save(tmp_path / "plan")
    ask = ("export", qwen, "--plan", tmp_path / "plan", "--out", tmp_path / "out")
    code, _, err = run(capsys, monkeypatch, *ask)
    assert code == 2
    assert "Qwen3ForCausalLM (model_type 'qwen3') cannot be exported" in err
    assert "norms (k_norm)" in err
