"""compare_objectives as a user runs it."""

import json
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import common
import pandas as pd
import pytest
from compare_objectives import FULL

from manifoldkv.learn.objectives import OBJECTIVES
from manifoldkv.learn.solvers import SOLVERS
from tests.drawings import assert_points_in_every_panel, assert_written
from tests.studies.running import STUDIES, Done, finished, run_here

COMMITTED = common.FIGURES / "compare_objectives" / "reference-llama"
COLUMNS = (
    "model,layer,site,objective,solver,key_grouping,value_grouping,rotary,rank,rank_ratio,"
    "attention_output_error,layer_output_error,cosine_similarity,seconds,seed,epochs,steps,"
    "sequences,sequence_length"
)
USED = ("closed-form", "predictor", "riemannian-adam", "riemannian-l-bfgs")
FEWER = ("--sequences", 8, "--epochs", 2, "--steps", 20, "--layers", 3)
"""A default run with less of everything, on which the order of the objectives still holds."""
FAST = ("--solvers", "closed-form", "--sequences", 2, "--sequence-length", 64)
MINE = """
from dataclasses import dataclass

import torch

from manifoldkv.learn.objectives import KSVD, register_objective


@register_objective("mine")
@dataclass(frozen=True)
class Mine(KSVD):
    def weight(self, statistics):
        return torch.diag(1 / statistics.second.diagonal())
"""


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return finished("compare_objectives", *FEWER, "--out", tmp_path_factory.mktemp("short"))


@pytest.fixture(scope="module")
def results(short: Done) -> pd.DataFrame:
    return short.table()


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a file registers is forgotten."""
    for registry in (OBJECTIVES, SOLVERS):
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_every_pair_is_measured_at_equal_sharing(results: pd.DataFrame) -> None:
    assert ",".join(results.columns) == COLUMNS
    assert set(results["layer"]) == {3}
    assert set(results["site"]) == {"both"}
    assert set(results["rank_ratio"]) == {0.25, 0.5, 0.75}
    assert set(results["key_grouping"]) == set(results["value_grouping"]) == {1}
    solved = set(zip(results["objective"], results["solver"], strict=True))
    everything = {(x, solver) for x in OBJECTIVES.names() for solver in USED}
    assert solved == everything - {("layer-output", "closed-form")}
    assert results.notna().all().all()


def test_errors_are_those_of_a_real_model(results: pd.DataFrame) -> None:
    errors = results[["attention_output_error", "layer_output_error"]]
    assert errors.min().min() > 1e-3
    assert errors.max().max() < 1.5
    assert results["cosine_similarity"].between(0.5, 1).all()
    means = results.groupby(["objective", "solver"])["layer_output_error"].mean()
    others = means["eigen-attention", "closed-form"]
    assert means["layer-output", "riemannian-l-bfgs"] < others
    assert means["fisher", "closed-form"] < others


def test_objectives_with_a_metric_make_coded_caches(short: Done) -> None:
    coded = short.table("coded").set_index("objective")
    assert set(coded.index) == set(OBJECTIVES.names())
    without = coded.loc["eigen-attention"]
    assert math.isnan(without["added_nll"])
    assert without["reason"] == "it has no metric"
    measured = coded.drop("eigen-attention")
    assert measured["added_nll"].between(0, 0.5).all()
    assert (measured["nll_error"] > 0).all()
    assert measured.loc["fisher", "added_nll"] < measured.loc["kq-svd", "added_nll"]


def test_a_run_ends_in_a_verdict(short: Done) -> None:
    printed = short.out[short.out.index("| objective") :]
    assert len([line for line in printed.splitlines() if line.startswith("|")]) == 2 + 5
    assert re.search(
        r"At half the rank \S+ has the least error at the layer's output \(0\.", printed
    )
    assert "Coded at an eighth of the bytes, " in printed
    for text in (" seconds.", f"{short.folder / 'overview.png'}", "docs/concepts/bases.md"):
        assert text in printed
    assert "## " not in printed
    for text in (
        "At half the rank ",
        "## Keys and values, rank 16 (ratio 0.5)",
        "**0.",
        "## Coded at an eighth of the bytes",
        "layer-output by closed-form, keys: layer-output has no closed form",
        "predictor: 2 epochs at most (paper: 50)",
        "The long run, --full, adds two more seeds",
        "python studies/compare_objectives.py --sequences 8",
    ):
        assert text in short.text()
    verbose = finished("compare_objectives", *FEWER, "--verbose", "--out", short.folder)
    assert short.text() in verbose.out


def test_the_figure_has_ranks_beside_coded_losses(short: Done) -> None:
    figure = short.figures["overview"]
    assert len(figure.axes) == 2
    assert len(figure.get_suptitle().splitlines()) <= 2
    assert_points_in_every_panel(figure)
    assert_written(short.folder / "overview")


def test_a_repeated_run_measures_nothing_again(short: Done) -> None:
    before = short.text("results.csv"), short.text("coded.csv")
    again = finished("compare_objectives", *FEWER, "--out", short.folder)
    assert "stored already: 24 of 24 steps" in again.out  # 5 coded, 19 pairs
    assert (short.text("results.csv"), short.text("coded.csv")) == before


def test_all_layers_are_measured_unless_some_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []
    monkeypatch.setattr("compare_objectives.measure", lambda *parts: seen.append(parts[0].layers))
    with pytest.raises(TypeError):  # no tables to write
        run_here("compare_objectives", "--out", tmp_path)
    assert seen == [list(range(6))]


def test_an_interrupted_run_of_two_processes_resumes_with_equal_results(tmp_path: Path) -> None:
    chosen = ("--objectives", "fisher", *FAST, "--layers", 0, 1, 2)
    command = [sys.executable, STUDIES / "compare_objectives.py", *chosen]
    running = subprocess.Popen(
        [str(part) for part in (*command, "--out", tmp_path / "apart", "--threads", 2)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # even if ours ignores it
    )
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("apart/steps/*.csv")) and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=120)
    assert running.returncode == 130
    assert "the same command resumes the run" in stderr
    again = finished("compare_objectives", *chosen, "--out", tmp_path / "apart")
    assert "stored already: " in again.out
    here = finished("compare_objectives", *chosen, "--out", tmp_path / "here")
    for name in ("results", "coded"):
        both = [one.table(name).drop(columns="seconds", errors="ignore") for one in (again, here)]
        pd.testing.assert_frame_equal(*both, rtol=1e-9)


def test_two_texts_and_groupings(tmp_path: Path) -> None:
    text, eval_text = tmp_path / "text.txt", tmp_path / "eval.jsonl"
    text.write_text("some words that stand in a line\n" * 400, encoding="utf-8")
    lines = [json.dumps({"text": f"held out line {i} of a story"}) for i in range(200)]
    eval_text.write_text("\n".join(lines), encoding="utf-8")
    options = ["--key-grouping", "all", "--value-grouping", 2, "--rotary", "post", "--layers", 0]
    options += ["--text", text, "--eval-text", eval_text, "--seeds", 0, 1, "--steps", 5]
    options += ["--objectives", "kq-svd", "fisher", "--sites", "key", "value", "--rank-ratios", 0.5]
    options += [*FAST, "--solvers", "closed-form", "riemannian-adam"]
    done = finished("compare_objectives", *options, "--out", tmp_path)
    rows = done.table()
    assert set(rows[rows["site"] == "key"]["key_grouping"]) == {"all"}
    assert set(rows[rows["site"] == "key"]["objective"]) == {"kq-svd"}
    assert "fisher, keys: its metric is of keys before rotation" in done.text()
    assert set(rows[rows["site"] == "value"]["value_grouping"]) == {"2"}
    assert set(rows["rotary"]) == {"post"}
    assert set(rows[rows["solver"] == "riemannian-adam"]["seed"]) == {0, 1}
    assert done.text().count(" ± ") >= 3 * 3  # three errors, by an iterative solver


def test_shared_keys_without_a_closed_form_are_solved_by_head(tmp_path: Path) -> None:
    options = ("--objectives", "fisher", "k-svd", "--key-grouping", "shared", "--layers", 0)
    done = finished("compare_objectives", *options, *FAST, "--out", tmp_path)
    groupings = dict(zip(done.table()["objective"], done.table()["key_grouping"], strict=True))
    assert groupings == {"fisher": "1", "k-svd": "shared"}
    assert "(solved with grouping 1 instead)" in done.text()


@pytest.mark.usefixtures("registries")
def test_an_objective_of_a_file_appears_in_both_tables(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    options = ("--import", tmp_path / "mine.py", *FAST, "--layers", 0, "--out", tmp_path)
    done = finished("compare_objectives", "--objectives", "mine", "k-svd", *options)
    assert set(done.table()["objective"]) == {"mine", "k-svd"}
    coded = done.table("coded").set_index("objective")["added_nll"]
    assert coded["mine"] > 0
    assert coded["mine"] != coded["k-svd"]
    assert "| mine | closed-form | 0." in done.out
    assert "mine adds 0." in done.out or ", mine 0." in done.out


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "there is no such Python file"),
        ("x = 1", "registers nothing: decorate a class with @register_objective or"),
        ("import nothing_of_the_name", "ModuleNotFoundError: No module named"),
        ("def", "SyntaxError: "),
        (MINE.replace('"mine"', '"k-svd"'), "ValueError: objective 'k-svd' is already"),
    ],
)
def test_a_file_that_registers_nothing_is_refused(
    content: str | None, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    done = run_here("compare_objectives", "--import", path, "--out", tmp_path / "out")
    assert done.code == 2
    assert done.err.startswith(f"compare_objectives: --import {path}")
    assert reason in done.err
    assert len(done.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


LONG = ([0, 1, 2], [0.5, 0.75], 256, 50, 300, "shared", ["key", "value", "both"], SOLVERS.names())


@pytest.mark.parametrize(
    ("options", "folder", "settings"),
    [
        ([], "reference-llama-short", ([0], [0.25, 0.5, 0.75], 128, 4, 30, 1, ["both"], [*USED])),
        (["--full"], "reference-llama", LONG),
        (["--full", "--seeds", 4], "reference-llama", ([4], *LONG[1:])),
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
    names += ("key_grouping", "sites", "solvers")
    given.solvers = sorted(given.solvers)
    chosen = tuple(getattr(given, name) for name in names)
    assert chosen == (*settings[:-1], sorted(settings[-1]))
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
