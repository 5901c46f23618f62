"""`benchmark.py storage` as a user runs it, on few windows."""

from pathlib import Path

import pandas as pd
import pytest

from tests.drawings import assert_written
from tests.studies.running import Done, run_here


def run(folder: Path, *arguments: object) -> Done:
    return run_here(
        *("benchmark", "storage"),
        *("--text", "pydoc-topics", "--sequences", 8, "--sequence-length", 128),
        *("--prompt", 200, "--continuation", 60, "--held-out", 3, "--items", 2),
        *("--tasks", "passkey", "copying", "--ratios", "1/4", "1/12", "--out", folder, *arguments),
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    folder = tmp_path_factory.mktemp("storage")
    done = run(folder)
    assert done.code == 0, done.err
    return folder, done


def test_fewer_bytes_lose_more(done: tuple[Path, Done]) -> None:
    results = pd.read_csv(done[0] / "results.csv").set_index("cache")
    assert list(results.index) == ["16-bit cache", "zstd", "1/4", "1/12"]
    assert results.loc["16-bit cache", "times_smaller"] == 1
    assert results.loc["zstd", "times_smaller"] > 1
    # Windows of another domain than any in a few calibration sequences: near what was asked for.
    assert results.loc["1/4", "times_smaller"] == pytest.approx(4, rel=0.2)
    assert results.loc["1/12", "times_smaller"] == pytest.approx(12, rel=0.2)
    # Which sign a change has is chance on so few tokens; its size is not, in any window.
    nll = pd.read_csv(done[0] / "windows.csv").pivot_table("nll", "window", "cache")
    added = nll.sub(nll["16-bit cache"], axis=0).abs()
    assert (added["1/4"] < added["1/12"]).all()
    assert 0 < results.loc["1/4", "predicted_nats"] < results.loc["1/12", "predicted_nats"]
    assert (results.drop("16-bit cache")["decode_mb_per_second"] > 0).all()


def test_every_window_and_answer_is_kept(done: tuple[Path, Done]) -> None:
    windows = pd.read_csv(done[0] / "windows.csv")
    assert len(windows) == 3 * 4
    assert windows.groupby("cache")["nll"].count().to_dict() == {
        "16-bit cache": 3,
        "1/4": 3,
        "1/12": 3,
        "zstd": 0,
    }
    answers = pd.read_csv(done[0] / "answers.csv")
    assert len(answers) == 2 * 2 * 3
    nll = answers.pivot_table("nll", "cache", "task")
    assert (nll.loc["16-bit cache"] != nll.loc["1/4"]).all()
    found = answers.pivot_table("score", "cache", "task", aggfunc="sum")
    results = pd.read_csv(done[0] / "results.csv").set_index("cache")
    for task in ("passkey", "copying"):
        assert results.loc[found.index, task].tolist() == found[task].tolist()
        assert pd.isna(results.loc["zstd", task])


def test_the_figure_shows_the_table(done: tuple[Path, Done]) -> None:
    folder, run = done
    results = pd.read_csv(folder / "results.csv").set_index("cache")
    losses, recall, speeds = run.figures["stored_caches"].axes
    line = losses.containers[0].lines[0].get_xydata()
    assert line[:, 0].tolist() == pytest.approx(results.loc[["1/4", "1/12"], "times_smaller"])
    assert line[:, 1].tolist() == pytest.approx(results.loc[["1/4", "1/12"], "added_nll"])
    assert len(recall.patches) == 2 * 3
    assert len(speeds.patches) == 2 * 3
    assert_written(folder / "stored_caches")


def test_what_is_measured_is_kept(done: tuple[Path, Done]) -> None:
    before = (done[0] / "results.csv").read_bytes()
    assert run(done[0]).code == 0
    assert (done[0] / "results.csv").read_bytes() == before
