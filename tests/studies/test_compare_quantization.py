"""compare_quantization as a user runs it."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path

import compare_quantization
import pandas as pd
import pytest

from manifoldkv import ManifoldKVError
from manifoldkv.runs import checkpoints
from tests.drawings import assert_written, lines_of
from tests.studies.running import Done, run_here


def study(*arguments: object) -> Done:
    return run_here("compare_quantization", *arguments)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare_quantization")


SMALL = ("--text", "pydoc-topics", "--sequences", 2, "--sequence-length", 160, "--rotary", "post")


@pytest.fixture(scope="module")
def run(out: Path) -> Done:
    done = study(*SMALL, "--out", out)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def results(run: Done, out: Path) -> pd.DataFrame:
    return pd.read_csv(out / "results.csv")


def test_every_setting_is_measured(results: pd.DataFrame) -> None:
    assert len(results) == 2 * 2 * 4 * 3
    assert not results.duplicated(["recipe", "layout", "bits", "rotation"]).any()
    assert (results["exact_nll"] > results["uncompressed_nll"]).all()
    assert (results["standard_error"] > 0).all()


def test_fewer_bits_take_fewer_bytes_and_change_more(results: pd.DataFrame) -> None:
    for _, part in results.groupby(["recipe", "layout", "rotation"]):
        by_bits = part.set_index("bits")
        assert by_bits["bytes_ratio"].loc[[8, 4, 3, 2]].is_monotonic_decreasing
        change = (by_bits["nll"] - by_bits["exact_nll"]).abs()  # on two sequences of either sign
        assert change.loc[8] < change.loc[2]
        assert change.loc[8] < 0.1


def test_the_figure_shows_the_table(run: Done, results: pd.DataFrame, out: Path) -> None:
    panels = run.figures["nll_against_bits"].axes
    shown = results.groupby(["recipe", "layout"], sort=False)
    assert len(panels) == len(shown) == 4
    for axes, ((recipe, layout), part) in zip(panels, shown, strict=True):
        assert axes.get_title() == f"{recipe}, layout {layout}"
        found = lines_of(axes)
        assert set(found) == {f"rotation: {name}" for name in ("none", "pca", "hadamard")}
        for label, drawn in found.items():
            rows = part[part["rotation"] == label.removeprefix("rotation: ")]
            expected = zip(rows["bytes_ratio"], rows["added_nll"], strict=True)
            assert drawn == [pytest.approx(point) for point in expected]
    assert_written(out / "nll_against_bits")


def test_the_summary_says_what_was_run(run: Done, out: Path) -> None:
    text = (out / "summary.md").read_text()
    assert (
        "| layout | bits | bytes / 16-bit cache | bytes per token | none | pca | hadamard | "
        in text
    )
    assert "Command: `python studies/compare_quantization.py --text pydoc-topics" in text


@pytest.mark.parametrize("changed", ["nothing", "weights", "Perplexity", "quantize"])
def test_what_other_weights_or_other_code_measured_is_not_taken(
    changed: str, run: Done, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = checkpoints.digest_of_code
    if changed == "weights":
        monkeypatch.setattr(compare_quantization, "digest_of_model", lambda model: "others")

    @wraps(stock)
    def edited(*parts: Callable[..., object]) -> str:
        names = [part.__name__ for part in parts]
        return "edited" if changed in names else stock(*parts)

    def again(*ignored: object) -> None:
        raise ManifoldKVError("measured again")

    monkeypatch.setattr(checkpoints, "digest_of_code", edited)
    monkeypatch.setattr(compare_quantization, "perplexity", again)
    done = study(*SMALL, "--out", out)
    assert done.code == (0 if changed == "nothing" else 2)
    assert changed == "nothing" or "measured again" in done.last_line


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
