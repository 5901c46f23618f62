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
from tests.studies.running import STUDIES, Done, run_here

COMMITTED = common.FIGURES / "compare_objectives" / "reference-llama"
COLUMNS = (
    "model,layer,site,objective,solver,key_grouping,value_grouping,rotary,rank,rank_ratio,split,"
    "attention_output_error,layer_output_error,cosine_similarity,seconds,seed,epochs,steps,"
    "sequences,sequence_length"
)
FEWER = ("--sequences", "8", "--epochs", "5", "--steps", "60")
"""A default run with less of everything, on which the order of the objectives still holds."""
SMALL = (*FEWER[2:], "--sequences", "4", "--sequence-length", "64", "--layers", "0")


def study(*arguments: object) -> Done:
    return run_here("compare_objectives", *arguments)


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    out = tmp_path_factory.mktemp("short")
    finished = study(*FEWER, "--out", out)
    assert finished.code == 0, finished.err
    return out, finished


@pytest.fixture(scope="module")
def results(short_run: tuple[Path, Done]) -> pd.DataFrame:
    return pd.read_csv(short_run[0] / "results.csv")


def test_run_measures_every_pair_on_every_layer(results):
    assert ",".join(results.columns) == COLUMNS
    assert set(results["layer"]) == set(range(6))
    assert set(results["site"]) == {"key", "value", "both"}
    assert set(results["split"]) == {"calibration", "held-out"}
    solved = set(zip(results["objective"], results["solver"], strict=True))
    everything = {
        (objective, solver)
        for objective in ("k-svd", "eigen-attention", "kq-svd", "layer-output")
        for solver in ("closed-form", "predictor", "riemannian-adam")
    }
    assert solved == everything - {("layer-output", "closed-form")}
    assert results.notna().all().all()


def test_errors_are_those_of_a_real_model(results):
    errors = results[["attention_output_error", "layer_output_error"]]
    assert errors.min().min() > 1e-3
    assert errors.max().max() < 1.5
    assert results["cosine_similarity"].between(0.5, 1).all()
    assert (results["rank_ratio"] == 0.5).all()


def test_layer_output_beats_eigen_attention_at_the_layer_output(results):
    held_out = results[results["split"] == "held-out"]
    means = held_out.groupby(["site", "objective", "solver"])["layer_output_error"].mean()
    for site in ("key", "value", "both"):
        ours = means[site, "layer-output", "riemannian-adam"]
        assert ours < means[site, "eigen-attention", "closed-form"]


def test_kq_svd_has_its_closed_form_at_grouping_one(results):
    closed = results[(results["objective"] == "kq-svd") & (results["solver"] == "closed-form")]
    assert set(closed[closed["site"] == "key"]["key_grouping"]) == {"1"}


def test_summary_has_tables_and_what_was_skipped(short_run):
    summary = (short_run[0] / "summary.md").read_text(encoding="utf-8")
    assert "## Keys, rank 16 (ratio 0.5)" in summary
    assert "## Keys and values, rank 16" in summary
    assert "**0." in summary
    assert "layer-output by closed-form, keys: layer-output has no closed form" in summary
    assert "predictor: 5 epochs at most (paper: 50)" in summary
    assert "The long run, --full, adds rank ratio 0.75, two more seeds" in summary
    assert "python studies/compare_objectives.py --sequences 8" in summary
    assert summary in short_run[1].out


@pytest.mark.parametrize(
    ("name", "panels"),
    [("errors_per_layer", 6), ("error_against_rank", 3), ("error_against_seconds", 2)],
)
def test_figures_are_drawn(name, panels, short_run):
    """What is on them is tested in `tests/diagnostics/test_figures.py`."""
    out, done = short_run
    assert len(done.figures[name].axes) == panels
    title = " ".join(done.figures[name].get_suptitle().split())
    assert "predictor: 5 epochs at most (paper: 50)" in title
    assert "8 calibration sequences of 128 tokens (paper: 512 of 2,048); 1 seed" in title
    assert_points_in_every_panel(done.figures[name])
    assert_written(out / name)


def test_repeated_run_measures_nothing_again(short_run):
    out, _ = short_run
    before = (out / "results.csv").read_bytes()
    again = study(*FEWER, "--out", out)
    assert again.code == 0, again.err
    assert "stored already: layers 0, 1, 2, 3, 4, 5" in again.out
    assert (out / "results.csv").read_bytes() == before


def test_other_layers_share_what_is_stored(short_run):
    out, _ = short_run
    again = study(*FEWER, "--out", out, "--layers", 1, 3)
    assert "stored already: layers 1, 3" in again.out
    assert set(pd.read_csv(out / "results.csv")["layer"]) == {1, 3}


def test_interrupted_run_goes_on(tmp_path):
    command = [sys.executable, str(STUDIES / "compare_objectives.py"), *SMALL[:-2], "--layers"]
    command += ["0", "1", "2", "--out", str(tmp_path), "--threads", "1"]
    running = subprocess.Popen(
        command,
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
    assert list(tmp_path.glob("steps/layer-0-*.csv"))
    again = study(*SMALL[:-2], "--layers", 0, "--out", tmp_path)
    assert "stored already: layers 0" in again.out


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("some words that stand in a line\n" * 400, encoding="utf-8")
    return path


BAD = {
    "missing model": (["--model", "no/such/model"], "no model at no/such/model"),
    "unknown objective": (["--objectives", "svd"], "unknown objective 'svd'; known: k-svd"),
    "unknown solver": (["--solvers", "newton"], "unknown solver 'newton'; known: closed-form"),
    "unknown grouping": (["--key-grouping", "some"], "unknown head grouping 'some'"),
    "grouping that does not divide": (["--value-grouping", "3"], "does not divide the 2 KV heads"),
    "rank above head_dim": (["--rank-ratios", "1.1"], "gives rank 35 of head_dim 32"),
    "rank below 1": (["--rank-ratios", "0.5", "0.01"], "gives rank 0 of head_dim 32"),
    "layer out of range": (["--layers", "6"], "the model has layers 0 to 5"),
    "missing text": (["--text", "none.txt"], "cannot read text none.txt: No such file"),
    "nothing to solve": (
        ["--objectives", "layer-output", "--solvers", "closed-form"],
        "nothing to solve: layer-output by closed-form, keys",
    ),
    "no epochs": (["--epochs", "0"], "--epochs must be at least 1, not 0"),
    "no sequences": (["--sequences", "0"], "--sequences must be at least 1, not 0"),
    "longer than the context": (["--sequence-length", "4096"], "longer than the 1024 positions"),
    "unknown layer": (["--layers", "x"], "invalid int value: 'x'"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_clear_line(arguments, message, tmp_path):
    out = tmp_path / "out"
    done = study(*arguments, "--out", out)
    assert done.code == 2
    assert message in done.last_line
    assert not (out / "results.csv").exists()


def test_short_text_says_how_much_there_is(text, tmp_path):
    done = study("--text", text, "--sequences", "500", "--out", tmp_path / "out")
    assert done.code == 2
    assert "ask for fewer or shorter" in done.err
    assert str(text) in done.err


def test_empty_text_is_refused(tmp_path):
    path = tmp_path / "empty.txt"
    path.touch()
    done = study("--text", path, "--out", tmp_path / "out")
    assert done.code == 2
    assert "is empty" in done.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_refused(tmp_path):
    (tmp_path / ".probe").symlink_to("/dev/full")
    done = study("--out", tmp_path)
    assert done.code == 2
    assert "No space left on device" in done.err


def test_own_text_and_groupings(text, tmp_path):
    eval_text = tmp_path / "eval.jsonl"
    eval_text.write_text(
        "\n".join(json.dumps({"text": f"held out line {i} of a story"}) for i in range(200)),
        encoding="utf-8",
    )
    options = ["--key-grouping", "all", "--value-grouping", "2", "--rotary", "post"]
    options += ["--text", text, "--eval-text", eval_text, "--seeds", "0", "1"]
    options += ["--objectives", "kq-svd", "layer-output", "--sites", "key", "value"]
    done = study(*SMALL, *options, "--out", tmp_path)
    assert done.code == 0, done.err
    rows = pd.read_csv(tmp_path / "results.csv")
    assert set(rows[rows["site"] == "key"]["key_grouping"]) == {"all"}
    assert set(rows[rows["site"] == "value"]["value_grouping"]) == {"2"}
    assert set(rows["rotary"]) == {"post"}
    assert set(rows[rows["solver"] == "riemannian-adam"]["seed"]) == {0, 1}
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "± is the standard deviation over seeds" in summary
    assert summary.count(" ± ") >= 3 * 2 * 2  # of three errors, by iterative solvers at two sites


@pytest.mark.parametrize(
    ("options", "folder", "settings"),
    [
        ([], "reference-llama-short", ([0], [0.5], 128, 10, 80)),
        (["--full"], "reference-llama", ([0, 1, 2], [0.5, 0.75], 256, 50, 300)),
        (["--full", "--seeds", 4], "reference-llama", ([4], [0.5, 0.75], 256, 50, 300)),
    ],
)
def test_only_the_long_run_writes_where_the_committed_results_lie(
    options, folder, settings, monkeypatch, tmp_path
):
    seen = []
    monkeypatch.setattr("common.FIGURES", tmp_path)
    monkeypatch.setattr(
        "compare_objectives.solvable_pairs", lambda given: seen.append(given) or (0, 0)
    )
    study("--redraw", *options)
    (given,) = seen
    names = ("seeds", "rank_ratios", "sequence_length", "epochs", "steps")
    assert tuple(getattr(given, name) for name in names) == settings
    monkeypatch.setattr("common.draw", lambda out, figures: seen.append(out))
    study("--redraw", *options)
    assert seen[-1] == tmp_path / "compare_objectives" / folder


def test_committed_results_are_those_of_the_long_run():
    rows = pd.read_csv(COMMITTED / "results.csv")
    assert ",".join(rows.columns) == COLUMNS
    assert set(rows["seed"]) == set(FULL["seeds"])
    assert set(rows["rank_ratio"]) == set(FULL["rank_ratios"])
    for name in ("sequence_length", "epochs", "steps"):
        assert set(rows[name]) == {FULL[name]}
    summary = (COMMITTED / "summary.md").read_text(encoding="utf-8")
    assert summary.endswith("Command: `python studies/compare_objectives.py --full`\n")
