"""decode_speed as a user runs it."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "studies" / "decode_speed.py"


def study(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(STUDY), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame]:
    out = tmp_path_factory.mktemp("decode_speed")
    run = study("--quick", "--out", out, "--threads", 1)
    assert run.returncode == 0, run.stderr
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
    assert run.returncode == 0, run.stderr
    frame = pd.read_csv(tmp_path / "results.csv")
    assert set(frame["variant"]) == {"stock", "full", *names}
    nbytes = frame[frame["what"] == "attention"].set_index("variant")["nbytes"]
    assert nbytes["post-0.5-all"] == 0.5 * nbytes["stock"]
    share = (64 + 0.5 * 32) / 96
    assert nbytes["post-0.5-recent"] == nbytes["pre-0.5-all-recent"] == share * nbytes["stock"]


def test_figures_and_summary(results: tuple[Path, pd.DataFrame]) -> None:
    out = results[0]
    for stem in ("attention_against_context", "model_against_context"):
        assert (out / f"{stem}.png").stat().st_size > 10_000
        assert (out / f"{stem}.pdf").exists()
    text = (out / "summary.md").read_text()
    assert "Appending a token" in text
    assert "Command: `python studies/decode_speed.py --quick" in text


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = study("--quick", "--out", tmp_path / "file")
    assert run.returncode == 2
    assert run.stderr.startswith("decode_speed: cannot write to")
    run = study("--tokens", 0, "--out", tmp_path)
    assert run.returncode == 2
    assert "must be at least 1" in run.stderr
