"""scale as a user runs it, on one layer of a large model's shape."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "studies" / "scale.py"


def study(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(STUDY), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scale")
    run = study("--layers", 1, "--sequences", 1, 2, "--sequence-length", 32, "--out", folder)
    assert run.returncode == 0, run.stderr
    return folder


def test_operations_are_those_of_the_layer(out: Path) -> None:
    results = pd.read_csv(out / "results.csv")
    weights = 4096 * 4096 + 3 * 4096 * 14336  # W_O and MLP: forward, and back to their inputs
    lowest = 2 * 2 * weights * 32
    for site in ("key", "value"):
        flops = results[f"{site}_flops_per_sequence"]
        assert ((flops > lowest) & (flops < 1.1 * lowest)).all()


def test_memory_holds_the_weights(out: Path) -> None:
    results = pd.read_csv(out / "results.csv")
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert (results["layer_weights"] == layer).all()
    assert (results["weight_bytes"] > 4 * layer).all()
    assert (results["peak_bytes"] > results["weight_bytes"]).all()
    assert (results["beyond_weights_bytes"] < results["peak_bytes"]).all()


def test_estimates_are_marked(out: Path) -> None:
    text = (out / "summary.md").read_text()
    assert "## Estimates for the whole model, not measurements" in text
    assert "sustained 100 TFLOP/s" in text
    assert "| llama-3-8b | 15.0 GiB |" in text  # 8.03 billion weights of two bytes
    assert (out / "memory_against_tokens.png").stat().st_size > 10_000


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    run = study("--layers", 0, "--out", tmp_path)
    assert run.returncode == 2
    assert run.stderr.strip() == (
        "scale: layers, sequences, lengths, steps and rate must be positive"
    )
