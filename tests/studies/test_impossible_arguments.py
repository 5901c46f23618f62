"""What no study can do is told in one line, with code 2, before any long work."""

from pathlib import Path

import pytest

from tests.studies.running import run_here

FEW = ("--sequences", 1, "--held-out", 1, "--sequence-length", 16)
IMPOSSIBLE = {
    "compare_objectives": [
        (("--seeds", 0, 10**20), f"seed {10**20} is not an integer"),
        (("--rank-ratios", "nan"), "rank ratio nan gives rank"),
        (("--model", ""), "the name of the model is empty"),
        (("--text", ""), "the name of the text is empty"),
        (("--out", ""), "argument --out: the name is empty"),
    ],
    "frontier": [
        (("--threads", 0), "cannot compute on 0 threads"),
        (("--seed", 10**20), f"seed {10**20} is not an integer"),
        (("--ratios", 0.5, 2), "--ratios 2 is not in (0, 1]"),
        (("--held-out", 0), "cannot read 0 sequences of 512 tokens"),
        (("--out", ""), "argument --out: the name is empty"),
        (
            ("--ratios", 0.001, "--compositions", "eigen-attention", *FEW),
            "no composition can be made for this model at a ratio",
        ),
    ],
    "reproduce_paper": [
        (("--device", "meta"), "cannot use device 'meta'"),
        (("--model", ""), "the name of the model is empty"),
        (("--out", ""), "argument --out: the name is empty"),
    ],
    "solver_efficiency": [
        (("--threads", 0), "cannot compute on 0 threads"),
        (("--budgets", 10, 0), "budgets and epochs must be at least 1"),
        (("--layers", 99, *FEW), "--layers 99: the model has layers"),
        (("--out", ""), "argument --out: the name is empty"),
    ],
    "train_reference_models": [
        (("llama", "--threads", 0), "cannot compute on 0 threads"),
        (("llama", "--seed", 10**20), f"seed {10**20} is not an integer"),
        (("llama", "--batch", 0), "tokens, batch and checkpoint-every must be at least 1"),
        (("llama", "--work", ""), "argument --work: the name is empty"),
    ],
}
CASES = [(study, *case) for study, cases in IMPOSSIBLE.items() for case in cases]


@pytest.mark.parametrize(("study", "arguments", "said"), CASES)
def test_it_is_told(study: str, arguments: tuple, said: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    given = [str(argument).format(file=file) for argument in arguments]
    folder = "--work" if study.startswith("train") else "--out"
    done = run_here(study, *([] if folder in given else [folder, tmp_path / "out"]), *given)
    assert done.code == 2
    assert said.format(file=file) in done.last_line
    assert f"{study}" in done.last_line
    assert not [path for path in (tmp_path / "out").glob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("study", "length"), [("frontier", "--task-length"), ("recall", "--task-lengths")]
)
def test_questions_that_do_not_fit_are_told_before_anything_is_measured(
    study: str, length: str, tmp_path: Path
) -> None:
    asked = ("--tasks", "passkey", "--items", 1, length, 1023)
    done = run_here(study, *asked, "--sequences", 1, "--sequence-length", 16, "--out", tmp_path)
    assert done.code == 2
    assert "a question with its answer takes" in done.last_line
    assert "tokens, the model 1,024: ask for shorter prompts" in done.last_line
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
