"""solver_efficiency as a user runs it, on few tokens."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from solver_efficiency import relative

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "studies" / "solver_efficiency.py"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("solver_efficiency")
    command = [
        *(sys.executable, STUDY, "--text", "pydoc-topics", "--layers", 1, "--no-estimate"),
        *("--sequences", 8, "--held-out", 2, "--sequence-length", 128),
        *("--epochs", 3, "--budgets", 5, 20, "--out", folder),
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_run_is_counted(out: Path) -> None:
    results = pd.read_csv(out / "results.csv")
    assert len(results) == 2 * 3
    counted = results.set_index(["site", "solver", "steps"])["layer_tokens"]
    assert counted["key", "predictor", 3] == counted["value", "predictor", 3] == 3 * 8 * 128
    assert counted["key", "riemannian-adam", 20] == 20 * 4 * 64
    assert (results["held_out_error"] > 0).all()


def test_runs_are_compared_within_their_problem() -> None:
    rows = [
        ("key", "predictor", 50, 10.0, 1000, 0.1),
        ("key", "riemannian-adam", 5, 0.5, 100, 0.11),
        ("value", "riemannian-adam", 5, 1.0, 10, 0.2),
        ("value", "predictor", 50, 4.0, 100, 0.2),
    ]
    columns = ["site", "solver", "steps", "seconds", "layer_tokens", "held_out_error"]
    found = relative(pd.DataFrame(rows, columns=columns).assign(layer=0)).set_index("site")
    assert found.loc["key", ["error", "times_faster", "times_fewer"]].tolist() == pytest.approx(
        [0.1, 20, 10]
    )
    assert found.loc["value", ["error", "times_faster", "times_fewer"]].tolist() == [0, 4, 10]


def test_the_summary_and_the_figure(out: Path) -> None:
    text = (out / "summary.md").read_text()
    assert "Command: `python studies/solver_efficiency.py" in text
    assert "Llama-3-8B" not in text
    assert (out / "error_against_seconds.png").stat().st_size > 10_000
