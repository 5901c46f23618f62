"""What no study can do is told in one line, with code 2, before any long work."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from manifoldkv.executors import on_threads

FEW = ("--sequences", 1, "--held-out", 1, "--sequence-length", 16)
IMPOSSIBLE = {
    "compare_objectives": [
        (("--seeds", 0, 10**20), f"seed {10**20} is not an integer"),
        (("--rank-ratios", "nan"), "rank ratio nan gives rank"),
        (("--model", ""), "the name of the model is empty"),
        (("--text", ""), "the name of the text is empty"),
        (("--out", ""), "argument --out: the name is empty"),
    ],
    "compare_quantization": [
        (("--sequences", 0), "0 sequences of 1024 tokens: both must be at least 1"),
        (("--sequence-length", 0), "sequences of 0 tokens: both must be at least 1"),
        (("--sequence-length", 2000, "--sequences", 1), "2,000 tokens are longer than the 1,024"),
        (("--ratio", "nan", "--sequences", 1, "--sequence-length", 8), "ratio nan is not in"),
        (("--out", ""), "argument --out: the name is empty"),
    ],
    "decode_speed": [
        (("--threads", 0), "cannot compute on 0 threads"),
        (("--threads", 10**6), "cannot compute on 1000000 threads"),
        (("--device", "meta"), "cannot use device 'meta'"),
        (("--rounds", -1), "rounds must be at least 1"),
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
            "no composition reaches a ratio that was asked for",
        ),
    ],
    "reproduce_paper": [
        (("--device", "meta"), "cannot use device 'meta'"),
        (("--model", ""), "the name of the model is empty"),
        (("--out", ""), "argument --out: the name is empty"),
    ],
    "scale": [
        (("--work", "{file}/below"), "cannot write to {file}/below"),
        (("--work", ""), "argument --work: the name is empty"),
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


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """As many as before, whatever a study sets."""
    with on_threads(torch.get_num_threads()):
        yield


def ended(study: ModuleType) -> int:
    """The exit code of a study, which returns it or ends the process with it."""
    try:
        return int(study.main() or 0)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize(("study", "arguments", "said"), CASES)
def test_it_is_told(
    study: str, arguments: tuple, said: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    given = [str(argument).format(file=file) for argument in arguments]
    folder = ("--work" if study.startswith("train") else "--out", str(tmp_path / "out"))
    monkeypatch.setattr(sys, "argv", [study, *folder, *given])
    code = ended(import_module(study))
    lines = capsys.readouterr().err.splitlines()
    assert code == 2
    assert said.format(file=file) in lines[-1]
    assert f"{study}: " in lines[-1]
    assert not [path for path in (tmp_path / "out").glob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("study", "work", "left"),
    [
        ("frontier", "Frontier", "the same command goes on from there"),
        ("scale", "measure_all", "the same command goes on from there"),
        ("solver_efficiency", "measure", "the same command goes on from there"),
        ("decode_speed", "run", "the same command goes on from there"),
        ("reproduce_paper", "Study", "the same command goes on from there"),
        ("compare_quantization", "measure", "nothing is saved"),
    ],
)
def test_an_interruption_says_what_is_left(
    study: str, work: str, left: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    def interrupt(*ignored: object) -> None:
        raise KeyboardInterrupt

    module = import_module(study)
    monkeypatch.setattr(module, work, interrupt)
    monkeypatch.setattr(sys, "argv", [study, "--out", str(tmp_path)])
    assert ended(module) == 130
    assert capsys.readouterr().err == f"\n{study}: interrupted; {left}\n"
