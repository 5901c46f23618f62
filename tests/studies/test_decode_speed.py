"""decode_speed as a user runs it."""

from pathlib import Path

import pandas as pd
import pytest
from decode_speed import KNOWN, measure, said

from tests.drawings import assert_written, lines_of
from tests.studies.running import Done, run_here

CELL = ["what", "dtype", "batch", "tokens"]


def study(*arguments: object) -> Done:
    return run_here("decode_speed", *arguments)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decode_speed")


@pytest.fixture(scope="module")
def run(out: Path) -> Done:
    done = study("--quick", "--rounds", 1, "--out", out, "--threads", 1)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def results(run: Done, out: Path) -> pd.DataFrame:
    return pd.read_csv(out / "results.csv")


def test_every_variant_is_timed_in_every_cell(results: pd.DataFrame) -> None:
    counts = results.groupby(CELL)["variant"].nunique()
    assert set(counts) == {9}
    assert len(counts) == 2 * 2 * 2
    assert (results["seconds"] > 0).all()


@pytest.mark.parametrize("baseline", ["full", "stock"])
def test_ratios_of_one_round_are_those_of_its_seconds(baseline: str, results: pd.DataFrame) -> None:
    seconds = results.pivot_table("seconds", CELL, "variant")
    found = results.pivot_table(f"ratio_to_{baseline}", CELL, "variant")
    expected = seconds.div(seconds[baseline], axis=0)
    pd.testing.assert_frame_equal(found, expected, rtol=1e-12)
    assert expected.nunique(axis=1).min() > 1  # not the same time for all of them
    assert (results["tokens_per_second"] * results["seconds"]).to_numpy() == pytest.approx(1)


class Scripted:
    """A step that takes as long as it is told, and a tenth of it to append."""

    nbytes = 8

    def __init__(self, name: str, *seconds: float) -> None:
        self.variant = KNOWN[name]
        self.seconds = [x for each in seconds for x in (each, each / 10)]

    def timed(self, what: str) -> float:
        assert what == ("append" if len(self.seconds) % 2 else "run")
        return self.seconds.pop(0)


def test_ratios_are_medians_of_those_within_a_round() -> None:
    """Which is not the ratio of the medians; and the first round does not count."""
    steps = [
        Scripted("stock", 9, 2, 4, 8),
        Scripted("full", 9, 1, 4, 2),
        Scripted("post-0.5", 1000, 3, 2, 8),
    ]
    stock, full, half = measure(steps, rounds=3, batch=2)
    assert (stock["seconds"], full["seconds"], half["seconds"]) == (4, 2, 3)
    assert half["ratio_to_full"] == 3  # of 3, 1/2 and 4
    assert half["ratio_to_stock"] == 1  # of 3/2, 1/2 and 1
    assert full["ratio_to_stock"] == 0.5  # of 1/2, 1 and 1/4
    assert stock["ratio_to_full"] == 2  # of 2, 1 and 4
    assert half["tokens_per_second"] == 2 / 3
    assert half["append_share"] == pytest.approx(0.1)
    assert (half["rounds"], half["rank_ratio"], half["nbytes"]) == (3, 0.5, 8)


def test_bytes_are_those_of_the_ranks(results: pd.DataFrame) -> None:
    frame = results.pivot_table("nbytes", ["what", "dtype", "tokens"], "variant")
    assert (frame["full"] == frame["stock"]).all()
    for ratio in ("0.5", "0.625", "0.75"):
        assert (frame[f"post-{ratio}"] == float(ratio) * frame["stock"]).all()
        assert (frame[f"pre-{ratio}"] == float(ratio) * frame["stock"]).all()
    assert (frame["post-0.5-4bit"] < 0.2 * frame["stock"]).all()


def test_grouped_heads_and_newest_tokens(tmp_path: Path) -> None:
    names = ["post-0.5-all", "post-0.5-recent", "pre-0.5-all-recent"]
    run = study(
        *("--quick", "--out", tmp_path, "--threads", 1, "--dtypes", "float32"),
        *("--tokens", 96, "--rounds", 1, "--variants", *names),
    )
    assert run.code == 0, run.err
    frame = pd.read_csv(tmp_path / "results.csv")
    assert set(frame["variant"]) == {"stock", "full", *names}
    nbytes = frame[frame["what"] == "attention"].set_index("variant")["nbytes"]
    assert nbytes["post-0.5-all"] == 0.5 * nbytes["stock"]
    (axes,) = run.figures["attention_against_context"].axes  # of one context, bars
    ratios = frame[frame["what"] == "attention"].set_index("variant")["ratio_to_full"]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [said(KNOWN[name]) for name in ("stock", *names)]
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == pytest.approx([ratios[name] for name in ("stock", *names)])
    share = (64 + 0.5 * 32) / 96
    assert nbytes["post-0.5-recent"] == nbytes["pre-0.5-all-recent"] == share * nbytes["stock"]


@pytest.mark.parametrize("what", ["attention", "model"])
def test_figures_show_the_table(what: str, run: Done, results: pd.DataFrame, out: Path) -> None:
    part = results[results["what"] == what]
    figure = run.figures[f"{what}_against_context"]
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["float32, batch 1", "bfloat16, batch 1"]
    for axes, dtype in zip(figure.axes, ("float32", "bfloat16"), strict=True):
        of_dtype = part[part["dtype"] == dtype]
        found = lines_of(axes)
        assert len(found) == results["variant"].nunique()
        for name, rows in of_dtype.groupby("variant"):
            points = zip(rows["tokens"], rows["ratio_to_full"], strict=True)
            assert found[said(KNOWN[name])] == [pytest.approx(point) for point in points]
    assert_written(out / f"{what}_against_context")


def test_the_summary_says_what_was_run(run: Done, out: Path) -> None:
    text = (out / "summary.md").read_text()
    assert "Appending a token" in text
    assert "Command: `python studies/decode_speed.py --quick" in text


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    run = study("--tokens", 0, "--out", tmp_path)
    assert run.code == 2
    assert "must be at least 1" in run.err
