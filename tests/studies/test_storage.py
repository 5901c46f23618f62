"""`benchmark.py storage` as a user runs it, on few windows."""

from pathlib import Path

import pandas as pd
import pytest

from tests.drawings import assert_written
from tests.studies.running import Done, finished

STOCK = "16-bit cache"


def run(folder: Path, *arguments: object) -> Done:
    return finished(
        *("benchmark", "storage", "--text", "pydoc-topics", "--sequences", 8),
        *("--sequence-length", 128, "--prompt", 200, "--continuation", 60, "--held-out", 3),
        *("--items", 2, "--tasks", "passkey", "copying", "--ratios", "1/4", "1/12"),
        *("--out", folder, *arguments),
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return run(tmp_path_factory.mktemp("storage"))


@pytest.fixture(scope="module")
def results(done: Done) -> pd.DataFrame:
    return done.table().set_index("cache")


def test_fewer_bytes_lose_more(done: Done, results: pd.DataFrame) -> None:
    assert list(results.index) == [STOCK, "zstd", "1/4", "1/12"]
    assert results.loc[STOCK, "times_smaller"] == 1
    assert results.loc["zstd", "times_smaller"] > 1
    # Windows of another domain than any in a few calibration sequences: near the request, in which
    # the 4 sink tokens of 200 are in float32, the dtype of the plan's model.
    for times in (4, 12):
        expected = 200 / (200 / times - 4)
        assert results.loc[f"1/{times}", "times_smaller"] == pytest.approx(expected, rel=0.2)
    # The sign of a change is chance on so few tokens; its size is not, in any window.
    nll = done.table("windows").pivot_table("nll", "window", "cache")
    added = nll.sub(nll[STOCK], axis=0).abs()
    assert (added["1/4"] < added["1/12"]).all()
    assert 0 < results.loc["1/4", "predicted_nats"] < results.loc["1/12", "predicted_nats"]
    assert (results.drop(STOCK)["decode_mb_per_second"] > 0).all()


def test_every_window_and_answer_is_written(done: Done, results: pd.DataFrame) -> None:
    windows, answers = done.table("windows"), done.table("answers")
    assert len(windows) == 3 * 4
    counted = windows.groupby("cache")["nll"].count().to_dict()
    assert counted == {STOCK: 3, "1/4": 3, "1/12": 3, "zstd": 0}
    assert len(answers) == 2 * 2 * 3
    nll = answers.pivot_table("nll", "cache", "task")
    assert (nll.loc[STOCK] != nll.loc["1/4"]).all()
    scores = answers.pivot_table("score", "cache", "task", aggfunc="sum")
    for task in ("passkey", "copying"):
        assert results.loc[scores.index, task].tolist() == scores[task].tolist()
        assert pd.isna(results.loc["zstd", task])


def test_the_figure_shows_the_table(done: Done, results: pd.DataFrame) -> None:
    losses, recall, speeds = done.figures["stored_caches"].axes
    line = losses.containers[0].lines[0].get_xydata()
    expected = results.loc[["1/4", "1/12"], ["times_smaller", "added_nll"]]
    assert line == pytest.approx(expected.to_numpy())
    assert len(recall.patches) == len(speeds.patches) == 2 * 3
    assert_written(done.folder / "stored_caches")


def test_a_repeated_run_measures_nothing_again(done: Done) -> None:
    before = done.text("results.csv")
    assert run(done.folder).text("results.csv") == before


def test_without_a_prediction_of_the_loss_the_rest_is_drawn(tmp_path: Path) -> None:
    """A loss is predicted from held-out sequences, which few calibration sequences have not."""
    done = run(tmp_path, "--sequences", 3, "--ratios", "1/4", "--held-out", 1, "--items", 1)
    assert done.table()["predicted_nats"].isna().all()
    assert "nan" not in done.text()
