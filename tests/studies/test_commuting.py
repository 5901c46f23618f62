"""commuting as a user runs it, on few tokens."""

from pathlib import Path

import commuting
import numpy as np
import pandas as pd
import pytest

from tests.drawings import assert_written
from tests.studies.running import Done, run_here

FEW = (
    *("--sequences", 3, "--length", 48, "--windows", 2, "--tuning-steps", 2),
    *("--healing-steps", 2, "--healing-sequences", 4, "--sequences-per-step", 2),
    *("--held-out-texts", "docstrings", "pydoc-topics"),
)
ALWAYS = [
    commuting.FREE,
    commuting.FISHER,
    commuting.QUERIES,
    commuting.REAL,
    commuting.TRANSMLA,
    commuting.PAIRS,
    commuting.TUNED,
    commuting.LAYER,
    commuting.LAYER_TUNED,
]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commuting")


@pytest.fixture(scope="module")
def run(out: Path) -> Done:
    done = run_here("commuting", *FEW, "--out", out)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def results(run: Done, out: Path) -> pd.DataFrame:
    return pd.read_csv(out / "results.csv")


def test_all_caches_take_the_same_bytes(results: pd.DataFrame) -> None:
    healed = [commuting.UNTUNED, commuting.HEALED, commuting.LAYER_HEALED]
    assert list(dict.fromkeys(results["cache"])) == [*ALWAYS, *healed]
    assert len(results) == 2 * len([*ALWAYS, *healed])
    assert set(results["ratio"]) == {0.5}
    assert set(results["bytes_per_token"]) == {6 * 2 * 2 * 32 * 2 / 2}
    losses = results["added_nll"] + results["uncompressed_nll"]
    assert losses.groupby(results["text"]).nunique().eq(len(ALWAYS) + 3).all()


def test_the_figure_shows_the_table(run: Done, results: pd.DataFrame, out: Path) -> None:
    assert_written(out / "added_nats")
    (axes,) = run.figures["added_nats"].axes
    drawn = [
        bar.get_width() for bars in axes.containers if hasattr(bars, "patches") for bar in bars
    ]
    expected = results.sort_values("text", key=lambda t: t != "docstrings", kind="stable")
    np.testing.assert_allclose(drawn, expected["added_nll"])
    assert [label.get_text() for label in axes.get_yticklabels()] == list(
        dict.fromkeys(results["cache"])
    )
    assert "reference-llama" in run.figures["added_nats"].get_suptitle()


def test_the_summary_has_every_row(run: Done, results: pd.DataFrame, out: Path) -> None:
    written = (out / "summary.md").read_text()
    for _, row in results.iterrows():
        (line,) = (line for line in written.splitlines() if line.startswith(f"| {row['cache']} |"))
        assert f"{row['added_nll']:.3f} ± {row['standard_error']:.3f}" in line


def test_a_second_run_measures_nothing(
    run: Done, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (out / "results.csv").read_bytes()
    monkeypatch.setattr(commuting.Healed, "perplexity", None)
    assert run_here("commuting", *FEW, "--out", out).code == 0
    assert (out / "results.csv").read_bytes() == before


def test_a_model_that_cannot_be_folded_is_not_healed(tmp_path: Path) -> None:
    done = run_here("commuting", "--model", "reference-qwen3", *FEW, "--out", tmp_path)
    assert done.code == 0, done.err
    assert list(dict.fromkeys(pd.read_csv(tmp_path / "results.csv")["cache"])) == ALWAYS
