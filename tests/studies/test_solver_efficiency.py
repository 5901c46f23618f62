"""solver_efficiency as a user runs it, on few tokens."""

from pathlib import Path

import pandas as pd
import pytest
from solver_efficiency import at_equal_error, relative

from tests.studies.running import run_here


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("solver_efficiency")
    done = run_here(
        "solver_efficiency",
        *("--text", "pydoc-topics", "--layers", 1, "--no-estimate"),
        *("--sequences", 8, "--held-out", 2, "--sequence-length", 128),
        *("--epochs", 2, 3, "--budgets", 5, 20, "--out", folder),
    )
    assert done.code == 0, done.err
    return folder


def test_every_run_is_counted(out: Path) -> None:
    results = pd.read_csv(out / "results.csv")
    assert len(results) == 2 * 4
    counted = results.set_index(["site", "solver", "size"])["layer_tokens"]
    assert counted["key", "predictor", 3] == counted["value", "predictor", 3] == 3 * 8 * 128
    assert counted["key", "riemannian-adam", 20] == 20 * 4 * 64
    assert (results["held_out_error"] > 0).all()


ROWS = [
    # site, solver, size, seconds, layer-tokens, held-out error
    ("key", "predictor", 12, 10.0, 1000, 0.100),
    ("key", "predictor", 50, 40.0, 4000, 0.101),  # more epochs are no better here
    ("key", "riemannian-adam", 5, 0.5, 100, 0.110),
    ("key", "riemannian-adam", 9, 2.0, 200, 0.099),
    ("value", "predictor", 12, 1.0, 100, 0.200),
    ("value", "riemannian-adam", 5, 1.0, 10, 0.201),
]
COLUMNS = ["site", "solver", "size", "seconds", "layer_tokens", "held_out_error"]


def test_solvers_are_compared_at_equal_error() -> None:
    runs = relative(pd.DataFrame(ROWS, columns=COLUMNS).assign(layer=0))
    strict = at_equal_error(runs, 0.0)
    assert strict.index.to_list() == [(0, "key")]  # values never get there
    assert strict["times_faster"].tolist() == [5.0]  # 10 s, not the 40 of most epochs, by 2 s
    assert strict["times_fewer"].tolist() == [5.0]
    loose = at_equal_error(runs, 0.01)
    assert loose["times_faster"].tolist() == [5.0, 1.0]
    assert at_equal_error(runs, -0.5).empty


def test_the_summary_and_the_figure(out: Path) -> None:
    text = (out / "summary.md").read_text()
    assert "Command: `python studies/solver_efficiency.py" in text
    assert "Llama-3-8B" not in text
    assert " of 2 |" in text  # how many of both problems get there
    assert (out / "error_against_seconds.png").exists()
