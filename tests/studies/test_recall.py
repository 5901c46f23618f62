"""`benchmark.py recall` as a user runs it, on few questions."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from reports.recall import DEPTHS, LEAST_ADDED, summary

from tests.drawings import assert_written
from tests.studies.running import Done, finished

NAMES = ("integers", "sinks-recent", "eigen-attention")
CACHES = 1 + 4 * 2 + 1 + 1 * 2  # uncompressed; four widths and a plan, prompts read in two ways


def run(folder: Path, *arguments: object) -> Done:
    return finished(
        *("benchmark", "recall", "--text", "pydoc-topics", "--sequences", 3),
        *("--sequence-length", 64, "--task-lengths", 90, 128, "--items", 3),
        *("--tasks", "passkey", "key-value", "--methods", *NAMES, "--out", folder, *arguments),
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return run(tmp_path_factory.mktemp("recall"))


@pytest.fixture(scope="module")
def results(done: Done) -> pd.DataFrame:
    return done.table()


def test_every_cache_answers_every_question(results: pd.DataFrame) -> None:
    assert len(results) == CACHES * 2 * 2
    assert set(results["prefill"].dropna()) == {"exact", "compressed"}
    dropping = results[results["composition"] == "sinks-recent"]
    assert set(dropping["prefill"]) == {"exact"}
    stock = results[results["composition"] == "uncompressed"]
    assert (stock["added_nll"] == 0).all()
    assert (results["stock_nll"].nunique(), len(stock)) == (4, 4)


def test_eight_bits_answer_as_sixteen_do_and_two_do_not(results: pd.DataFrame) -> None:
    integers = results[(results["composition"] == "integers") & (results["prefill"] == "exact")]
    by_bits = integers.groupby("requested_ratio")["added_nll"].apply(lambda x: x.abs().mean())
    assert by_bits[8 / 16] < 0.02 < by_bits[2 / 16]


def test_only_the_loss_is_measured_of_tasks_that_the_model_fails(
    done: Done, results: pd.DataFrame
) -> None:
    caches = results[results["composition"] != "uncompressed"]
    failed = caches[(caches["task"] == "key-value") & ~caches["counted"]]
    assert len(failed)
    assert failed["score"].isna().all()
    assert failed["added_nll"].notna().all()
    assert caches[caches["task"] == "passkey"]["score"].notna().all()
    assert "| -, " in done.text()


def test_prompts_read_through_the_cache_are_another_measurement(results: pd.DataFrame) -> None:
    plan = results[results["composition"] == "eigen-attention"].groupby("prefill")["added_nll"]
    exact, compressed = plan.get_group("exact"), plan.get_group("compressed")
    assert not np.allclose(exact, compressed, rtol=1e-3)


def test_the_map_has_a_panel_per_cache(done: Done) -> None:
    answers = done.table("passkeys")
    caches = list(dict.fromkeys(answers["cache"]))
    assert len(caches) == 1 + 4 + 1 + 1
    assert len(answers) == len(caches) * 2 * 3
    figure = done.figures["passkeys_by_depth_and_length"]
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title().replace("\n", " ") for axes in panels] == caches
    for axes, cache in zip(panels, caches, strict=True):
        grid = axes.collections[0].get_array()
        assert axes.yaxis_inverted()
        assert grid.shape == (DEPTHS, 2)
        part = answers[answers["cache"] == cache]
        for row, column in ((0, 0), (DEPTHS // 2, 1), (DEPTHS - 1, 1)):
            depth = part["depth"].between(row / DEPTHS, (row + 1) / DEPTHS)
            score = part[depth & (part["task_length"] == (90, 128)[column])]["score"]
            assert grid[row, column] == pytest.approx(score.mean(), nan_ok=True)
    assert_written(done.folder / "passkeys_by_depth_and_length")


def test_the_map_of_tasks_has_the_added_nats_of_every_cache(
    done: Done, results: pd.DataFrame
) -> None:
    figure = done.figures["answers_by_task"]
    grid = figure.axes[0].collections[0].get_array()
    exact = results[results["prefill"] == "exact"]
    assert grid.shape == (2 * 2, 4 + 1 + 1)
    np.testing.assert_allclose(
        np.sort(grid, axis=None), np.sort(exact["added_nll"].clip(lower=LEAST_ADDED))
    )
    assert_written(done.folder / "answers_by_task")


def test_the_average_is_of_tasks_that_the_model_can_do(results: pd.DataFrame) -> None:
    counted = results["task"] == "passkey"
    results = results.assign(counted=counted, score=np.where(counted, 1, 0.5))
    lines = summary(results, "name", {})
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == CACHES * 2
    assert all(line.split(" | ")[3].startswith("1.00, ") for line in rows)
    assert any("| passkey | (key-value) |" in line for line in lines)


def test_a_repeated_run_measures_nothing_again(done: Done) -> None:
    before = done.text("results.csv")
    assert run(done.folder).text("results.csv") == before  # with the seconds of the first run


def test_with_exact_only_no_prompt_is_read_through_the_cache(
    done: Done, results: pd.DataFrame, tmp_path: Path
) -> None:
    shutil.copytree(done.folder / "steps", tmp_path / "steps")
    exact = results[results["prefill"] != "compressed"].reset_index(drop=True)
    pd.testing.assert_frame_equal(run(tmp_path, "--exact-only").table(), exact)


def test_without_passkeys_there_is_neither_table_nor_map_of_them(tmp_path: Path) -> None:
    run(tmp_path, "--tasks", "copying", "--items", 1, "--methods", "sinks-recent")
    files = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert files == {"results.csv", "summary.md", "answers_by_task.png"}
