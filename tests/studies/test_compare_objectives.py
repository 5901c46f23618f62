"""compare_objectives as a user runs it."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "studies" / "compare_objectives.py"
COLUMNS = (
    "model,layer,site,objective,solver,key_grouping,value_grouping,rotary,rank,rank_ratio,split,"
    "attention_output_error,layer_output_error,cosine_similarity,seconds,seed"
)
SMALL = ("--quick", "--sequences", "4", "--sequence-length", "64", "--layers", "0")


def study(*arguments):
    command = [sys.executable, str(STUDY), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def module():
    spec = importlib.util.spec_from_file_location("compare_objectives", STUDY)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(module, monkeypatch, capsys):
    """Run the study in this process; returns (exit code, standard error)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(STUDY), *map(str, arguments)])
        try:
            code = module.main()
        except SystemExit as stopped:
            code = stopped.code
        return code, capsys.readouterr().err

    return run


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("quick")
    finished = study("--quick", "--out", out)
    assert finished.returncode == 0, finished.stderr
    return out, finished


@pytest.fixture(scope="module")
def results(quick_run):
    return pd.read_csv(quick_run[0] / "results.csv")


def test_quick_run_measures_every_pair_on_every_layer(results):
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


def test_summary_has_tables_and_what_was_skipped(quick_run):
    summary = (quick_run[0] / "summary.md").read_text(encoding="utf-8")
    assert "## Keys, rank 16 (ratio 0.5)" in summary
    assert "## Keys and values, rank 16" in summary
    assert "**0." in summary
    assert "layer-output by closed-form, keys: layer-output has no closed form" in summary
    assert "capped at 5 epochs" in summary
    assert "python studies/compare_objectives.py --quick" in summary
    assert summary in quick_run[1].stdout


def test_figures_are_drawn(quick_run):
    for name in ("errors_per_layer", "error_against_rank", "error_against_seconds"):
        for suffix in (".png", ".pdf"):
            assert (quick_run[0] / (name + suffix)).stat().st_size > 5000


def test_repeated_run_measures_nothing_again(quick_run):
    out, _ = quick_run
    before = (out / "results.csv").read_bytes()
    again = study("--quick", "--out", out)
    assert again.returncode == 0, again.stderr
    assert "already has layer 0, 1, 2, 3, 4, 5" in again.stdout
    assert (out / "results.csv").read_bytes() == before


def test_interrupted_run_keeps_its_rows(tmp_path):
    command = [sys.executable, str(STUDY), "--quick", "--out", str(tmp_path)]
    running = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # even if ours ignores it
    )
    settings = tmp_path / "settings.json"
    deadline = time.monotonic() + 300
    while not settings.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=120)
    assert running.returncode == 130
    assert "rows are kept" in stderr
    finished = json.loads(settings.read_text(encoding="utf-8"))["finished_layers"]
    assert finished
    rows = pd.read_csv(tmp_path / "results.csv")
    assert set(finished) <= set(rows["layer"])


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
    "no sequences": (["--sequences", "0"], "--sequences must be at least 1"),
    "longer than the context": (["--sequence-length", "4096"], "longer than the 1024 positions"),
    "unknown layer": (["--layers", "x"], "invalid int value: 'x'"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_clear_line(arguments, message, run, tmp_path):
    out = tmp_path / "out"
    code, error = run(*arguments, "--out", out)
    assert code == 2
    assert message in error.splitlines()[-1]
    assert not (out / "results.csv").exists()


def test_short_text_says_how_much_there_is(run, text, tmp_path):
    code, error = run("--text", text, "--sequences", "500", "--out", tmp_path / "out")
    assert code == 2
    assert "ask for at most" in error
    assert str(text) in error


def test_empty_text_is_refused(run, tmp_path):
    path = tmp_path / "empty.txt"
    path.touch()
    code, error = run("--text", path, "--out", tmp_path / "out")
    assert code == 2
    assert "is empty" in error


def test_output_folder_that_is_a_file_is_refused(run, text):
    code, error = run("--out", text / "below")
    assert code == 2
    assert f"cannot write to {text}" in error


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_refused(run, tmp_path):
    (tmp_path / ".probe").symlink_to("/dev/full")
    code, error = run("--out", tmp_path)
    assert code == 2
    assert "No space left on device" in error


def test_own_text_and_groupings(run, text, tmp_path):
    eval_text = tmp_path / "eval.jsonl"
    eval_text.write_text(
        "\n".join(json.dumps({"text": f"held out line {i} of a story"}) for i in range(200)),
        encoding="utf-8",
    )
    options = ["--key-grouping", "all", "--value-grouping", "2", "--rotary", "post"]
    options += ["--text", text, "--eval-text", eval_text, "--seeds", "0", "1"]
    options += ["--objectives", "kq-svd", "layer-output", "--sites", "key", "value"]
    code, error = run(*SMALL, *options, "--out", tmp_path)
    assert code == 0, error
    rows = pd.read_csv(tmp_path / "results.csv")
    assert set(rows[rows["site"] == "key"]["key_grouping"]) == {"all"}
    assert set(rows[rows["site"] == "value"]["value_grouping"]) == {"2"}
    assert set(rows["rotary"]) == {"post"}
    assert set(rows[rows["solver"] == "riemannian-adam"]["seed"]) == {0, 1}
    assert " ± " in (tmp_path / "summary.md").read_text(encoding="utf-8")
