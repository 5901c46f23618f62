"""compare_quantization as a user runs it."""

from pathlib import Path

import pandas as pd
import pytest

from tests.studies.running import Done, run_here


def study(*arguments: object) -> Done:
    return run_here("compare_quantization", *arguments)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare_quantization")
    run = study(
        *("--text", "pydoc-topics", "--sequences", 2, "--sequence-length", 160),
        *("--rotary", "post", "--out", folder),
    )
    assert run.code == 0, run.err
    return folder


def test_every_setting_is_measured(out: Path) -> None:
    results = pd.read_csv(out / "results.csv")
    assert len(results) == 2 * 2 * 4 * 3
    assert not results.duplicated(["recipe", "layout", "bits", "rotation"]).any()
    assert (results["exact_nll"] > results["uncompressed_nll"]).all()
    assert (results["standard_error"] > 0).all()


def test_fewer_bits_take_fewer_bytes_and_change_more(out: Path) -> None:
    results = pd.read_csv(out / "results.csv")
    for _, part in results.groupby(["recipe", "layout", "rotation"]):
        by_bits = part.set_index("bits")
        assert by_bits["bytes_ratio"].loc[[8, 4, 3, 2]].is_monotonic_decreasing
        change = (by_bits["nll"] - by_bits["exact_nll"]).abs()  # on two sequences of either sign
        assert change.loc[8] < change.loc[2]
        assert change.loc[8] < 0.1


def test_figure_and_summary(out: Path) -> None:
    assert (out / "nll_against_bits.png").exists()
    text = (out / "summary.md").read_text()
    assert (
        "| layout | bits | bytes / 16-bit cache | bytes per token | none | pca | hadamard | "
        in text
    )
    assert "Command: `python studies/compare_quantization.py --text pydoc-topics" in text


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    for arguments, message in (
        (("--model", tmp_path / "nowhere"), "no model at"),
        (("--ratio", 1.5), "ratio 1.5"),
        (("--text", tmp_path / "a.txt"), "cannot read text"),
    ):
        run = study(*arguments, "--out", tmp_path)
        assert run.code == 2
        line = run.last_line
        assert line.startswith("compare_quantization: ")
        assert message in line
