"""What all studies have in common, as a user meets it."""

from pathlib import Path

import common
import pytest
import torch

from tests.studies.running import STUDIES, run_apart, run_here

NAMES = sorted(
    path.stem
    for path in STUDIES.glob("*.py")
    if path.stem not in ("common", "train_reference_models")
)


@pytest.mark.parametrize("name", NAMES)
def test_help_teaches(name: str) -> None:
    done = run_here(name, "--help")
    assert done.code == 0
    described = (STUDIES / f"{name}.py").read_text().split('"""')[1]
    assert described.splitlines()[0] in done.out
    for option in ("--out", "--force", "--threads"):
        assert option in done.out


@pytest.mark.parametrize("name", NAMES)
def test_bad_input_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for arguments, message in (
        (("--out", tmp_path / "file"), f"cannot write to {tmp_path / 'file'}"),
        (("--threads", 0), "cannot compute on 0 threads"),
    ):
        done = run_here(name, *arguments)
        assert done.code == 2
        assert done.last_line.startswith(f"{name}: {message}")


def test_the_number_of_threads_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    run_here("frontier", "--threads", 1, "--compositions", "nothing")
    assert asked[0] == 1


def test_an_interruption_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*ignored: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("common.output_folder", interrupted)
    done = run_here("frontier")
    assert done.code == 130
    assert "interrupted; the same command goes on from there" in done.err


def test_a_study_is_a_program_of_its_own(tmp_path: Path) -> None:
    done = run_apart("frontier", "--model", tmp_path / "nowhere", "--out", tmp_path)
    assert done.code == 2
    assert done.last_line.startswith("frontier: no model at")


DRAWN = {
    "codec": ["codec/smollm2"],
    "compare_objectives": ["compare_objectives/reference-llama"],
    "frontier": ["frontier/smollm2", "frontier/reference-llama"],
    "solver_efficiency": ["solver_efficiency/reference-qwen3"],
}


@pytest.mark.parametrize(
    ("name", "folder"), [(name, folder) for name, folders in DRAWN.items() for folder in folders]
)
def test_committed_figures_are_drawn_from_their_tables_alone(
    name: str, folder: str, tmp_path: Path
) -> None:
    committed = common.FIGURES / folder
    tables = {path.name: path.read_bytes() for path in committed.glob("*.csv")}
    for table, content in tables.items():
        (tmp_path / table).write_bytes(content)
    done = run_here(name, "--redraw", "--out", tmp_path)
    assert done.code == 0, done.err
    assert set(done.figures) == {path.stem for path in committed.glob("*.png")}
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {*tables, *(f"{stem}.png" for stem in done.figures)}
    assert all((tmp_path / table).read_bytes() == tables[table] for table in tables)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_measured_to_draw_again(name: str, tmp_path: Path) -> None:
    done = run_here(name, "--redraw", "--out", tmp_path)
    assert done.code == 2
    assert f"{tmp_path} has no " in done.last_line
    assert ".csv to draw" in done.last_line
    assert not list(tmp_path.iterdir())


def test_counts_are_english() -> None:
    assert common.counted(1, "thread") == "1 thread"
    assert common.counted(2, "seed") == "2 seeds"
