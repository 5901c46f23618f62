"""decode_speed as a user runs it."""

from pathlib import Path

import pandas as pd
import pytest

from tests.studies.running import Done, run_here


def study(*arguments: object) -> Done:
    return run_here("decode_speed", *arguments)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame]:
    out = tmp_path_factory.mktemp("decode_speed")
    run = study("--quick", "--out", out, "--threads", 1)
    assert run.code == 0, run.err
    return out, pd.read_csv(out / "results.csv")


def test_every_variant_is_timed_in_every_cell(results: tuple[Path, pd.DataFrame]) -> None:
    frame = results[1]
    counts = frame.groupby(["what", "dtype", "batch", "tokens"])["variant"].nunique()
    assert set(counts) == {9}
    assert len(counts) == 2 * 2 * 2
    assert (frame["seconds"] > 0).all()
    full = frame[frame["variant"] == "full"]
    assert (full["ratio_to_full"] == 1).all()


def test_bytes_are_those_of_the_ranks(results: tuple[Path, pd.DataFrame]) -> None:
    frame = results[1].pivot_table("nbytes", ["what", "dtype", "tokens"], "variant")
    assert (frame["full"] == frame["stock"]).all()
    for ratio in ("0.5", "0.625", "0.75"):
        assert (frame[f"post-{ratio}"] == float(ratio) * frame["stock"]).all()
        assert (frame[f"pre-{ratio}"] == float(ratio) * frame["stock"]).all()
    assert (frame["post-0.5-4bit"] < 0.2 * frame["stock"]).all()


def test_grouped_heads_and_newest_tokens(tmp_path: Path) -> None:
    names = ["post-0.5-all", "post-0.5-recent", "pre-0.5-all-recent"]
    run = study(
        *("--quick", "--out", tmp_path, "--threads", 1, "--dtypes", "float32"),
        *("--tokens", 96, "--variants", *names),
    )
    assert run.code == 0, run.err
    frame = pd.read_csv(tmp_path / "results.csv")
    assert set(frame["variant"]) == {"stock", "full", *names}
    nbytes = frame[frame["what"] == "attention"].set_index("variant")["nbytes"]
    assert nbytes["post-0.5-all"] == 0.5 * nbytes["stock"]
    share = (64 + 0.5 * 32) / 96
    assert nbytes["post-0.5-recent"] == nbytes["pre-0.5-all-recent"] == share * nbytes["stock"]


def test_figures_and_summary(results: tuple[Path, pd.DataFrame]) -> None:
    out = results[0]
    for stem in ("attention_against_context", "model_against_context"):
        assert (out / f"{stem}.png").exists()
        assert (out / f"{stem}.pdf").exists()
    text = (out / "summary.md").read_text()
    assert "Appending a token" in text
    assert "Command: `python studies/decode_speed.py --quick" in text


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    run = study("--tokens", 0, "--out", tmp_path)
    assert run.code == 2
    assert "must be at least 1" in run.err
