"""``manifoldkv export``."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from manifoldkv import compress, load_model, open_text, perplexity, sample_tokens
from tests.cli.running import MODEL, facts, run

QWEN = str(Path(MODEL).with_name("reference-qwen3"))
FEW = ("--sequences", 2, "--length", 48)


@pytest.fixture(scope="module")
def commuting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, _ = load_model(MODEL)
    folder = tmp_path_factory.mktemp("plans") / "plan"
    compress(model, "docstrings", recipe="commuting", sequences=2, length=48).save(folder)
    return folder


def test_a_checkpoint_is_written_and_measured(commuting: Path, tmp_path: Path) -> None:
    ask = ("export", MODEL, "--plan", commuting, "--out", tmp_path / "plain", *FEW)
    done = run(*ask)
    assert (done.code, f"checkpoint: {tmp_path / 'plain'}" in done.out) == (0, True)
    assert done.phases == [
        *("loading", "reading", "multiplying", "measuring", "measuring", "writing"),
    ]
    assert "1.5 KiB per token, 3.0 KiB before" in done.out
    again = run(*ask)
    assert (again.code, again.err.count("\n"), "--force" in again.err) == (2, 1, True)
    exported = facts(*ask, "--force")
    assert exported["bytes_per_token"] * 2 == exported["stock_bytes_per_token"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    _, tokenizer = load_model(str(tmp_path / "plain"))
    text = open_text("docstrings")
    tokens = sample_tokens(text, tokenizer, sequences=2, length=48, split="held-out")
    assert exported["exported_perplexity"] == perplexity(model, tokens).perplexity


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"--out": "notes"}, "no checkpoint"),
        ({"--text": "nowhere.txt"}, "nowhere.txt"),
        ({"model": QWEN}, "made for"),
    ],
)
def test_an_obstacle_is_one_line(
    change: dict, reason: str, commuting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine").write_text("mine")
    given = {"model": MODEL, "--plan": commuting, "--out": "out"} | change
    model = given.pop("model")
    done = run("export", model, *(part for pair in given.items() for part in pair))
    errors = [line for line in done.err.splitlines() if line.startswith("manifoldkv: ")]
    assert (done.code, done.out, len(errors)) == (2, "", 1)
    assert reason in errors[0]
    assert not (tmp_path / "out").exists()


def test_a_family_that_cannot_be_folded_is_named(tmp_path: Path) -> None:
    model, _ = load_model(QWEN)
    compress(model, torch.arange(64).view(2, 32), recipe="commuting").save(tmp_path / "plan")
    done = run("export", QWEN, "--plan", tmp_path / "plan", "--out", tmp_path / "out")
    assert done.code == 2
    assert "Qwen3ForCausalLM (model_type 'qwen3') cannot be exported" in done.err
    assert "only models of type llama, mistral, qwen2 are" in done.err
