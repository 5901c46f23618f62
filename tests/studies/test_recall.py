"""`benchmark.py recall` as a user runs it, on few questions."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from reports.recall import DEPTHS, summary

from tests.drawings import assert_written
from tests.studies.running import Done, run_here

NAMES = ("integers", "sinks-recent", "eigen-attention")
CACHES = 1 + 4 * 2 + 1 + 1 * 2  # uncompressed; four widths and a plan, prompts read in two ways


def run(folder: Path, *arguments: object) -> Done:
    return run_here(
        *("benchmark", "recall"),
        *("--text", "pydoc-topics", "--sequences", 3, "--sequence-length", 64),
        *("--tasks", "passkey", "key-value", "--task-lengths", 90, 128, "--items", 3),
        *("--methods", *NAMES, "--out", folder, *arguments),
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    folder = tmp_path_factory.mktemp("recall")
    done = run(folder)
    assert done.code == 0, done.err
    return folder, done


def test_every_cache_is_asked_everything(done: tuple[Path, Done]) -> None:
    results = pd.read_csv(done[0] / "results.csv")
    assert len(results) == CACHES * 2 * 2
    assert set(results["prefill"].dropna()) == {"exact", "compressed"}
    dropping = results[results["composition"] == "sinks-recent"]
    assert set(dropping["prefill"]) == {"exact"}
    stock = results[results["composition"] == "uncompressed"]
    assert (stock["added_nll"] == 0).all()
    assert (results["stock_nll"].nunique(), len(stock)) == (4, 4)


def test_eight_bits_answer_as_sixteen_do_and_two_do_not(done: tuple[Path, Done]) -> None:
    results = pd.read_csv(done[0] / "results.csv")
    integers = results[(results["composition"] == "integers") & (results["prefill"] == "exact")]
    by_bits = integers.groupby("requested_ratio")["added_nll"].apply(lambda x: x.abs().mean())
    assert by_bits[8 / 16] < 0.02 < by_bits[2 / 16]


def test_of_what_the_model_cannot_do_only_the_loss_is_measured(done: tuple[Path, Done]) -> None:
    results = pd.read_csv(done[0] / "results.csv")
    caches = results[results["composition"] != "uncompressed"]
    failed = caches[(caches["task"] == "key-value") & ~caches["counted"]]
    assert len(failed)
    assert failed["score"].isna().all()
    assert failed["added_nll"].notna().all()
    assert caches[caches["task"] == "passkey"]["score"].notna().all()
    assert "| -, " in (done[0] / "summary.md").read_text()


def test_reading_prompts_through_the_cache_is_another_measurement(done: tuple[Path, Done]) -> None:
    results = pd.read_csv(done[0] / "results.csv")
    plan = results[results["composition"] == "eigen-attention"]
    exact = plan[plan["prefill"] == "exact"]["added_nll"].to_numpy()
    compressed = plan[plan["prefill"] == "compressed"]["added_nll"].to_numpy()
    assert not np.allclose(exact, compressed, rtol=1e-3)


def test_the_map_has_a_panel_per_cache(done: tuple[Path, Done]) -> None:
    out, run = done
    answers = pd.read_csv(out / "passkeys.csv")
    caches = list(dict.fromkeys(answers["cache"]))
    assert len(caches) == 1 + 4 + 1 + 1
    assert len(answers) == len(caches) * 2 * 3
    (figure,) = run.figures.values()
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title().replace("\n", " ") for axes in panels] == caches
    for axes, cache in zip(panels, caches, strict=True):
        grid = axes.collections[0].get_array()
        assert axes.yaxis_inverted()
        assert grid.shape == (DEPTHS, 2)
        own = answers[answers["cache"] == cache]
        for row, column in ((0, 0), (DEPTHS // 2, 1), (DEPTHS - 1, 1)):
            low, high = row / DEPTHS, (row + 1) / DEPTHS
            length = (90, 128)[column]
            inside = own["depth"].between(low, high) & (own["task_length"] == length)
            expected = own[inside]["score"].mean()
            assert grid[row, column] == pytest.approx(expected, nan_ok=True)
    assert_written(out / "passkeys_by_depth_and_length")


def test_the_average_is_of_tasks_that_the_model_can_do(done: tuple[Path, Done]) -> None:
    results = pd.read_csv(done[0] / "results.csv")
    counted = results.assign(
        counted=results["task"] == "passkey", score=np.where(results["task"] == "passkey", 1, 0.5)
    )
    lines = summary(counted, "name", {})
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == CACHES * 2
    assert all(line.split(" | ")[3].startswith("1.00, ") for line in rows)
    assert any("| passkey | (key-value) |" in line for line in lines)


def test_what_is_measured_is_kept(done: tuple[Path, Done]) -> None:
    before = (done[0] / "results.csv").read_bytes()
    assert run(done[0]).code == 0
    assert (done[0] / "results.csv").read_bytes() == before  # with the seconds of the first run


def test_without_passkeys_there_is_neither_table_nor_map_of_them(tmp_path: Path) -> None:
    done = run(tmp_path, "--tasks", "copying", "--items", 1, "--methods", "sinks-recent")
    assert done.code == 0, done.err
    files = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert files == {"results.csv", "summary.md"}
