"""The command lines of all studies: help, impossible arguments, figures drawn again."""

import re
import shlex
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import common
import pytest
import torch
from methods import METHODS

from tests.studies.running import STUDIES, run_apart, run_here

NAMES = sorted(
    path.stem
    for path in STUDIES.glob("*.py")
    if path.stem not in ("benchmark", "common", "comparison", "efficiency")
    and not path.stem.startswith("train_")
)
LOSS, RECALL, AGREEMENT, STORAGE, SPEED = [
    ("benchmark", kind) for kind in ("loss", "recall", "agreement", "storage", "speed")
]
COMMANDS = [LOSS, RECALL, AGREEMENT, STORAGE, SPEED, *((name,) for name in NAMES)]
ROOT = STUDIES.parent
PAGES = [
    page
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("figures/**/*.md"))
    if "python studies/" in page.read_text(encoding="utf-8")
]
FEW = ("--sequences", 1, "--held-out", 1, "--sequence-length", 16)


@pytest.mark.parametrize("command", [("benchmark",), *COMMANDS], ids=" ".join)
def test_help_teaches(command: tuple[str, ...]) -> None:
    done = run_here(*command, "--help")
    assert done.code == 0
    folder = STUDIES / "measurements" if len(command) == 2 else STUDIES
    described = (folder / f"{command[-1]}.py").read_text().split('"""')[1]
    assert described.splitlines()[0] in done.out
    options = ("--out", "--force", "--threads")
    assert all(x in done.out for x in (options if command in COMMANDS else ("loss", "recall")))


def long(length: str) -> tuple[object, ...]:
    return ("--tasks", "passkey", "--items", 1, length, 1023, "--sequences", 1)


COMPARE, PAPER = ("compare_objectives",), ("reproduce_paper",)
LLAMA = ("train_reference_models", "llama")
SEED = ("--seed", 10**20), f"seed {10**20} is not an integer"
MODEL = ("--model", ""), "the name of the model is empty"
TOO_LONG = "tokens, the model 1,024: ask for shorter prompts"
EVERYWHERE: list[Any] = [
    (("--out", ""), "argument --out: the name is empty"),
    (("--out", "{file}"), "cannot write to {file}"),
    (("--threads", 0), "threads must be from 1 to 1024, got 0"),
    (("--model", "no/such/model"), "no model at no/such/model"),
    (("--redraw",), ".csv to draw"),  # nothing is measured for it
]
IMPOSSIBLE: dict[tuple[str, ...], list[Any]] = {
    LOSS: [
        SEED,
        (("--ratios", 0.5, 2), "argument --ratios: a ratio must be in (0, 1], got 2"),
        (("--ratios", "1/0"), "argument --ratios: not a number or a fraction: 1/0"),
        (("--held-out", 0), "sequences must be >= 1, got 0"),
        (("--methods", "nothing"), "unknown method 'nothing'; known: aatc"),
        (
            ("--ratios", 0.001, "--methods", "eigen-attention", *FEW),
            "no method reaches a requested ratio on this model",
        ),
        (long("--task-length"), TOO_LONG),
    ],
    RECALL: [(long("--task-lengths"), TOO_LONG)],
    AGREEMENT: [(("--new-tokens", 1000), "are more than the 1,024 positions of the model")],
    STORAGE: [
        SEED,
        (long("--prompt"), "longer than the 1,024 positions"),
        (("--ratios", "1/900", *FEW), "too small"),
    ],
    SPEED: [
        (("--rounds", 0), "--rounds must be >= 1, got 0"),
        (("--batch", 0), "--batch must be >= 1, got 0"),
        (("--shapes", 0), "--shapes must be >= 1, got 0"),
        (("--tokens", 8, 0), "--tokens must be >= 1, got 0"),
        (("--methods", "fp8"), "fp8 has no plan, and only plans are timed: leave it out"),
        (("--plans", "{folder}"), "plan.safetensors: No such file"),
        (("--plans", "a/bits", "b/bits"), "folders of different names, got bits, bits"),
        (("--device", "meta"), "cannot use device 'meta'"),
    ],
    COMPARE: [
        MODEL,
        (("--seeds", 0, 10**20), SEED[1]),
        (("--objectives", "svd"), "unknown objective 'svd'; known: k-svd"),
        (("--solvers", "newton"), "unknown solver 'newton'; known: closed-form"),
        (("--key-grouping", "some"), "unknown head grouping 'some'"),
        (("--value-grouping", 3), "does not divide the 2 KV heads"),
        (("--rank-ratios", "nan"), "rank ratio nan gives rank"),
        (("--rank-ratios", 1.1), "gives rank 35 of head_dim 32"),
        (("--rank-ratios", 0.5, 0.01), "gives rank 0 of head_dim 32"),
        (("--layers", 6), "the model has layers 0 to 5"),
        (("--layers", "x"), "invalid int value: 'x'"),
        (("--text", ""), "the name of the text is empty"),
        (("--text", "none.txt"), "cannot read text none.txt: No such file"),
        (("--text", "{file}"), "is empty"),
        (("--text", "{text}", "--sequences", 500), "ask for fewer or shorter"),
        (
            ("--objectives", "layer-output", "--solvers", "closed-form"),
            "nothing to solve: layer-output by closed-form, keys",
        ),
        (("--epochs", 0), "--epochs must be >= 1, got 0"),
        (("--sequences", 0), "--sequences must be >= 1, got 0"),
        (("--sequence-length", 4096), "longer than the 1024 positions"),
    ],
    PAPER: [
        MODEL,
        (("--device", "meta"), "cannot use device 'meta'"),
        (("--seeds", 0), "--seeds must be >= 1, got 0"),
        (("--quick", "--tasks-data", "{folder}"), "no documents for task"),
    ],
    LLAMA: [
        SEED,
        (("--threads", 0), "threads must be from 1 to 1024, got 0"),
        (("--batch", 0), "tokens, batch and checkpoint-every must be >= 1"),
        (("--work", ""), "argument --work: the name is empty"),
    ],
}
CASES = [(command, *case) for command in COMMANDS for case in EVERYWHERE]
CASES += [(command, *case) for command, cases in IMPOSSIBLE.items() for case in cases]


@pytest.mark.parametrize(("command", "arguments", "message"), CASES)
def test_impossible_arguments_are_one_line(
    command: tuple[str, ...], arguments: tuple[object, ...], message: str, tmp_path: Path
) -> None:
    """With exit code 2, before any long work."""
    file = tmp_path / "file.txt"
    file.touch()
    (tmp_path / "text.txt").write_text("some words that stand in a line\n" * 400)
    names = {"file": file, "text": tmp_path / "text.txt", "folder": tmp_path}
    given = [str(argument).format(**names) for argument in arguments]
    folder, out = "--work" if command == LLAMA else "--out", tmp_path / "out"
    done = run_here(*command, *([] if folder in given else [folder, out]), *given)
    assert done.code == 2
    assert message.format(**names) in done.last_line
    assert command[0] in done.last_line
    assert not [path for path in out.glob("*") if path.is_file()]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".probe").symlink_to("/dev/full")
    done = run_here(*COMPARE, "--out", tmp_path)
    assert done.code == 2
    assert "No space left on device" in done.err


def test_the_number_of_threads_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    run_here(*LOSS, "--threads", 1, "--methods", "nothing")
    assert numbers[0] == 1


def test_an_interruption_says_how_to_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*ignored: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("common.output_folder", interrupted)
    done = run_here(*LOSS)
    assert done.code == 130
    assert "interrupted; the same command resumes the run" in done.err


def test_a_study_runs_as_a_program(tmp_path: Path) -> None:
    done = run_apart(*LOSS, "--model", tmp_path / "nowhere", "--out", tmp_path)
    assert done.code == 2
    assert done.last_line.startswith("benchmark: no model at")


COMMAND = re.compile(r"python studies/(\w+)\.py((?:\\\n|[^`\n|])*)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_on_pages_are_understood(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsers: list[common.Parser] = []
    monkeypatch.setattr("common.run_study", lambda parser, study: parsers.append(parser))
    for study, arguments in COMMAND.findall(page.read_text(encoding="utf-8")):
        import_module(study).main()
        words = shlex.split(arguments.replace("\\\n", " "), comments=True)
        if "--help" not in words and "--redraw" not in words:
            given = parsers[-1].parse_args(words)
            assert all(METHODS.get(name) for name in getattr(given, "methods", ()))


DRAWN = [
    (LOSS, "loss/smollm2"),
    (LOSS, "loss/reference-llama"),
    (LOSS, "loss_by_work/smollm2"),
    (LOSS, "loss_neighbours/smollm2"),
    (LOSS, "loss_neighbours/smollm2/sixteen-windows"),
    (RECALL, "recall/smollm2"),
    (RECALL, "recall/smollm2/passkeys"),
    (RECALL, "recall/smollm2/sixty-questions"),
    (STORAGE, "storage/smollm2"),
    (COMPARE, "compare_objectives/reference-llama"),
    (COMPARE, "compare_objectives/reference-qwen3"),
    (("serving",), "serving/smollm2"),
    (("packed_pages",), "packed_pages/smollm2"),
]


@pytest.mark.parametrize(("command", "folder"), DRAWN)
def test_committed_figures_are_drawn_from_their_tables_alone(
    command: tuple[str, ...], folder: str, tmp_path: Path
) -> None:
    committed = common.FIGURES / folder
    tables = {path.name: path.read_bytes() for path in committed.glob("*.csv")}
    for table, content in tables.items():
        (tmp_path / table).write_bytes(content)
    done = run_here(*command, "--redraw", "--out", tmp_path)
    assert done.code == 0, done.err
    assert set(done.figures) >= {path.stem for path in committed.glob("*.png")}
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {*tables, *(f"{stem}.png" for stem in done.figures)}
    assert all((tmp_path / table).read_bytes() == tables[table] for table in tables)


@pytest.mark.parametrize(
    "command",
    [
        (*PAPER, "--quick"),
        (*PAPER, "--model", "smollm2"),
        (*PAPER, "--protocol", "real"),
        COMPARE,
        *(LOSS, RECALL, AGREEMENT, STORAGE, SPEED),
        ("serving", "--plan", "plan"),
        ("packed_pages", "--plan", "plan"),
    ],
    ids=" ".join,
)
def test_only_the_runs_behind_committed_figures_write_there_unasked(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git ignores the default folder of all others."""
    folders: list[Path] = []

    def stopped(folder: Path) -> None:
        folders.append(folder)
        raise common.ManifoldKVError("stopped")

    monkeypatch.setattr("common.check_writable", stopped)
    assert run_here(*command).last_line.endswith("stopped")
    file = str(folders[0] / "table.csv")
    git = subprocess.run(["git", "check-ignore", "-q", file], cwd=ROOT, check=False)
    assert git.returncode != 1, f"{file} is not ignored"  # 128: no repository


def test_counts_are_english() -> None:
    assert common.counted(1, "thread") == "1 thread"
    assert common.counted(2, "seed") == "2 seeds"
