"""compare_objectives as a user runs it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import common
import pandas as pd
import pytest
from compare_objectives import FULL

from tests.drawings import assert_points_in_every_panel, assert_written
from tests.studies.running import STUDIES, Done, finished, run_here

COMMITTED = common.FIGURES / "compare_objectives" / "reference-llama"
COLUMNS = (
    "model,layer,site,objective,solver,key_grouping,value_grouping,rotary,rank,rank_ratio,split,"
    "attention_output_error,layer_output_error,cosine_similarity,seconds,seed,epochs,steps,"
    "sequences,sequence_length"
)
SOLVERS = ("closed-form", "predictor", "riemannian-adam", "flag")
FEWER = ("--sequences", 8, "--epochs", 5, "--steps", 60, "--solvers", *SOLVERS)
LAYERS = ("--layers", 1, 3, 5)
"""A default run with less of everything, on which the order of the objectives still holds."""
SMALL = (*FEWER[2:], "--sequences", 4, "--sequence-length", 64)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return finished(
        "compare_objectives", *FEWER, *LAYERS, "--out", tmp_path_factory.mktemp("short")
    )


@pytest.fixture(scope="module")
def results(short: Done) -> pd.DataFrame:
    return short.table()


def test_every_pair_is_measured_on_each_layer(results: pd.DataFrame) -> None:
    assert ",".join(results.columns) == COLUMNS
    assert set(results["layer"]) == {1, 3, 5}
    assert set(results["site"]) == {"key", "value", "both"}
    assert set(results["split"]) == {"calibration", "held-out"}
    solved = set(zip(results["objective"], results["solver"], strict=True))
    everything = {
        (objective, solver)
        for objective in ("k-svd", "eigen-attention", "kq-svd", "layer-output")
        for solver in SOLVERS
    }
    assert solved == everything - {("layer-output", "closed-form")}
    assert results.notna().all().all()
    closed = results[(results["objective"] == "kq-svd") & (results["solver"] == "closed-form")]
    assert set(closed[closed["site"] == "key"]["key_grouping"]) == {"1"}


def test_errors_are_those_of_a_real_model(results: pd.DataFrame) -> None:
    errors = results[["attention_output_error", "layer_output_error"]]
    assert errors.min().min() > 1e-3
    assert errors.max().max() < 1.5
    assert results["cosine_similarity"].between(0.5, 1).all()
    assert (results["rank_ratio"] == 0.5).all()
    held_out = results[results["split"] == "held-out"]
    means = held_out.groupby(["site", "objective", "solver"])["layer_output_error"].mean()
    for site in ("key", "value", "both"):
        ours = means[site, "layer-output", "riemannian-adam"]
        assert ours < means[site, "eigen-attention", "closed-form"]


def test_the_summary_has_tables_and_skipped_pairs(short: Done) -> None:
    for text in (
        "## Keys, rank 16 (ratio 0.5)",
        "## Keys and values, rank 16",
        "**0.",
        "layer-output by closed-form, keys: layer-output has no closed form",
        "predictor: 5 epochs at most (paper: 50)",
        "The long run, --full, adds rank ratio 0.75, two more seeds",
        "python studies/compare_objectives.py --sequences 8",
    ):
        assert text in short.text()
    assert short.text() in short.out


@pytest.mark.parametrize(
    ("name", "panels"),
    [("errors_per_layer", 6), ("error_against_rank", 3)],
)
def test_figures_are_drawn(name: str, panels: int, short: Done) -> None:
    """Their lines are tested in `tests/evaluate/diagnostics/test_figures.py`."""
    assert len(short.figures[name].axes) == panels
    title = " ".join(short.figures[name].get_suptitle().split())
    assert "predictor: 5 epochs at most (paper: 50)" in title
    assert "8 calibration sequences of 128 tokens (paper: 512 of 2,048); 1 seed" in title
    assert_points_in_every_panel(short.figures[name])
    assert_written(short.folder / name)


def test_a_repeated_run_measures_nothing_again(short: Done) -> None:
    before, command = short.text("results.csv"), ("compare_objectives", *FEWER, "--out")
    again = finished(*command, short.folder, *LAYERS)
    assert "stored already: layers 1, 3, 5" in again.out
    assert short.text("results.csv") == before
    again = finished(*command, short.folder, "--layers", 1, 3)
    assert "stored already: layers 1, 3" in again.out
    assert set(again.table()["layer"]) == {1, 3}


def test_all_layers_are_measured_unless_some_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = []
    monkeypatch.setattr("compare_objectives.measure_layers", lambda *parts: calls.append(parts))
    with pytest.raises(AttributeError):  # no table to write
        run_here("compare_objectives", "--out", tmp_path)
    assert list(range(6)) in calls[0]


def test_an_interrupted_run_resumes(tmp_path: Path) -> None:
    command = [sys.executable, STUDIES / "compare_objectives.py", *SMALL, "--layers", 0, 1, 2]
    running = subprocess.Popen(
        [str(part) for part in (*command, "--out", tmp_path, "--threads", 1)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # even if ours ignores it
    )
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("steps/layer-0-*.csv")) and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=120)
    assert running.returncode == 130
    assert "the same command resumes the run" in stderr
    again = finished("compare_objectives", *SMALL, "--layers", 0, "--out", tmp_path)
    assert "stored already: layers 0" in again.out


def test_two_texts_and_groupings(tmp_path: Path) -> None:
    text, eval_text = tmp_path / "text.txt", tmp_path / "eval.jsonl"
    text.write_text("some words that stand in a line\n" * 400, encoding="utf-8")
    lines = [json.dumps({"text": f"held out line {i} of a story"}) for i in range(200)]
    eval_text.write_text("\n".join(lines), encoding="utf-8")
    options = ["--key-grouping", "all", "--value-grouping", 2, "--rotary", "post", "--layers", 0]
    options += ["--text", text, "--eval-text", eval_text, "--seeds", 0, 1]
    options += ["--objectives", "kq-svd", "layer-output", "--sites", "key", "value"]
    done = finished("compare_objectives", *SMALL, *options, "--out", tmp_path)
    rows = done.table()
    assert set(rows[rows["site"] == "key"]["key_grouping"]) == {"all"}
    assert set(rows[rows["site"] == "value"]["value_grouping"]) == {"2"}
    assert set(rows["rotary"]) == {"post"}
    assert set(rows[rows["solver"] == "riemannian-adam"]["seed"]) == {0, 1}
    assert "± is the standard deviation over seeds" in done.text()
    assert (
        done.text().count(" ± ") >= 3 * 2 * 2
    )  # of three errors, by iterative solvers at two sites


@pytest.mark.parametrize(
    ("options", "folder", "settings"),
    [
        ([], "reference-llama-short", ([0], [0.5], 128, 10, 80)),
        (["--full"], "reference-llama", ([0, 1, 2], [0.5, 0.75], 256, 50, 300)),
        (["--full", "--seeds", 4], "reference-llama", ([4], [0.5, 0.75], 256, 50, 300)),
    ],
)
def test_only_the_long_run_writes_into_the_committed_folder(
    options: list[object],
    folder: str,
    settings: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    seen = []
    monkeypatch.setattr("common.FIGURES", tmp_path)
    monkeypatch.setattr("compare_objectives.solvable_pairs", lambda x: seen.append(x) or (0, 0))
    monkeypatch.setattr("common.draw", lambda out, figures: seen.append(out))
    run_here("compare_objectives", "--redraw", *options)
    given, out = seen
    names = ("seeds", "rank_ratios", "sequence_length", "epochs", "steps")
    assert tuple(getattr(given, name) for name in names) == settings
    assert out == tmp_path / "compare_objectives" / folder


def test_committed_results_are_those_of_the_long_run() -> None:
    rows = pd.read_csv(COMMITTED / "results.csv")
    assert ",".join(rows.columns) == COLUMNS
    assert set(rows["seed"]) == set(FULL["seeds"])
    assert set(rows["rank_ratio"]) == set(FULL["rank_ratios"])
    for name in ("sequence_length", "epochs", "steps"):
        assert set(rows[name]) == {FULL[name]}
    summary = (COMMITTED / "summary.md").read_text(encoding="utf-8")
    assert summary.endswith("Command: `python studies/compare_objectives.py --full`\n")
