"""reproduce_paper as a user runs it, small."""

import importlib
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "studies" / "reproduce_paper.py"
STEMS = ("accuracy", "ppl", "quantization", "bases_comparison", "policy_uniform", "ranks")


def study(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(STUDY), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paper")
    run = study("--quick", "--out", folder)
    assert run.returncode == 0, run.stderr[-3000:]
    return folder


@pytest.mark.parametrize("model", ["llama", "qwen"])
@pytest.mark.parametrize("stem", STEMS)
def test_every_figure_has_its_csv(out: Path, stem: str, model: str) -> None:
    label = stem if (stem, model) == ("bases_comparison", "llama") else f"{stem}_{model}"
    assert (out / f"{label}.png").stat().st_size > 10_000
    assert (out / f"{label}.pdf").exists()
    assert len(pd.read_csv(out / f"{label}.csv")) > 2


def test_plans_stay_within_their_ratio(out: Path) -> None:
    frame = pd.read_csv(out / "ppl_llama.csv").dropna(subset=["requested_ratio"])
    assert len(frame)
    assert (frame["ratio"] <= frame["requested_ratio"] + 1e-9).all()


def test_the_papers_numbers_stand_beside_ours_and_are_marked(out: Path) -> None:
    table = pd.read_csv(out / "table1.csv")
    theirs = table[table["method"].str.contains("the paper's number")]
    assert set(theirs["model"]) == {"Llama3-8B", "Qwen3-8B"}
    assert theirs["WikiText"].notna().all()
    ours = table.drop(theirs.index)
    assert set(ours["model"]) == {"llama", "qwen"}
    assert ours["WikiText"].isna().all()
    text = (out / "table1.md").read_text()
    assert "predictor capped at 1 epochs" in text
    assert r"\begin{tabular}" in (out / "table1.tex").read_text()


def test_another_model_than_the_papers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(STUDY.parent))
    module = importlib.import_module("reproduce_paper")
    assert module.mismatches("Llama3-8B", {"WikiText": 6.2, "C4": 9.5}) == []
    (line,) = module.mismatches("Llama3-8B", {"WikiText": 6.2, "C4": 12.0})
    assert "12.00 on C4" in line
    assert "the paper's row says 9.60" in line


def test_a_repeated_run_draws_at_once_and_the_same(out: Path) -> None:
    before = {path: path.read_bytes() for path in out.iterdir() if path.is_file()}
    began = time.monotonic()
    run = study("--quick", "--out", out)
    assert run.returncode == 0, run.stderr[-3000:]
    assert time.monotonic() - began < 120
    assert {path: path.read_bytes() for path in before} == before


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    for arguments, message in (
        (("--model", tmp_path / "nowhere"), "no model at"),
        (("--seeds", 0), "--seeds must be at least 1"),
        (("--tasks-data", tmp_path), "no documents for task"),
    ):
        run = study("--quick", "--out", tmp_path / "out", *arguments)
        assert run.returncode == 2
        line = run.stderr.strip().splitlines()[-1]
        assert line.startswith("reproduce_paper: ")
        assert message in line
