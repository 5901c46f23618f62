"""`benchmark.py loss` as a user runs it, on few tokens."""

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from common import EMBEDDED
from reports.loss import ALIASES, draw
from transformers import AutoTokenizer

from manifoldkv import CompressionPlan
from tests.drawings import assert_written, points
from tests.families import tiny_model
from tests.studies.running import Done, run_here

RATIOS = (0.5, 0.25)
PLANS = ("eigen-attention", "grouped", "grouped-4-bit")
DROPPING = ("sinks-recent", "snapkv")
NAMES = (*PLANS, "integers", "kivi", "fp8", *DROPPING)
STOCK_BYTES = 6 * 2 * 2 * 32 * 2  # layers, K and V, heads, d, bytes
WINDOW = 128


def study(*arguments: object) -> Done:
    return run_here("benchmark", "loss", *arguments)


def run(folder: Path, *names: str) -> Done:
    return study(
        *("--text", "pydoc-topics", "--sequences", 3, "--held-out", 2, "--sequence-length", 64),
        *("--window", WINDOW, "--tasks", "passkey", "--task-length", 90, "--items", 3),
        *("--ratios", *RATIOS, "--out", folder, "--methods", *names),
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    folder = tmp_path_factory.mktemp("loss")
    done = run(folder, *NAMES)
    assert done.code == 0, done.err
    return folder, done


@pytest.fixture(scope="module")
def out(done: tuple[Path, Done]) -> Path:
    return done[0]


@pytest.fixture(scope="module")
def results(out: Path) -> pd.DataFrame:
    return pd.read_csv(out / "results.csv")


def test_a_row_per_measurement_at_the_achieved_bytes(results: pd.DataFrame) -> None:
    assert list(dict.fromkeys(results["composition"])) == list(NAMES)
    points = (2 + 2 + 1) + 4 + 2 + 1 + 2 * len(DROPPING)  # four bits are no half of sixteen
    assert results.groupby("kind")["composition"].count().to_dict() == {
        "text": points,
        "task": points,
    }
    per_token = results["bytes_per_token"] / results["ratio"]
    assert per_token.to_numpy() == pytest.approx(STOCK_BYTES)
    asked = results[results["composition"].isin((*PLANS, "sinks-recent"))]
    assert (asked["ratio"] <= asked["requested_ratio"] + 1e-9).all()
    assert (asked["ratio"] > 0.85 * asked["requested_ratio"]).all()


def test_bytes_of_baselines_are_those_of_their_arithmetic(results: pd.DataFrame) -> None:
    by_name = results[results["kind"] == "text"].set_index("composition")
    integers = by_name.loc["integers", "ratio"].tolist()
    of_head = [32 * bits / 8 + 4 for bits in (8, 4, 3, 2)]  # d 32, a scale and an offset
    assert integers == pytest.approx([nbytes / (32 * 2) for nbytes in of_head])
    assert by_name.loc["fp8", "ratio"] == 0.5
    assert by_name.loc["sinks-recent", "ratio"].tolist() == [0.5, 0.25]
    assert by_name.loc["snapkv", "ratio"].tolist() == [0.5, 33 / WINDOW]  # 33 tokens at least


def test_snapkv_has_no_loss_on_a_text(results: pd.DataFrame) -> None:
    of_snapkv = results[results["composition"] == "snapkv"].set_index("kind")
    assert of_snapkv.loc["text", "added_nll"].isna().all()
    assert of_snapkv.loc["task", "added_nll"].notna().all()
    others = results[results["composition"] != "snapkv"]
    assert others["added_nll"].notna().all()


def test_more_bits_lose_less(results: pd.DataFrame) -> None:
    losses = results[(results["composition"] == "integers") & (results["kind"] == "text")]
    assert losses["added_nll"].iloc[0] < 0.01 < losses["added_nll"].iloc[3]


def test_what_is_measured_is_kept(out: Path, tmp_path: Path) -> None:
    names = ("snapkv", "fp8", "grouped")
    before = pd.read_csv(out / "results.csv")
    before = before[before["composition"].isin(names)]
    folder = shutil.copytree(out, tmp_path / "again")
    assert run(folder, *names).code == 0
    after = pd.read_csv(folder / "results.csv")
    keys = ["composition", "requested_ratio", "kind"]
    ordered = [frame.sort_values(keys).reset_index(drop=True) for frame in (before, after)]
    pd.testing.assert_frame_equal(*ordered)  # with the seconds of the first run


def test_the_summary_names_the_command_and_every_method(out: Path) -> None:
    text = (out / "summary.md").read_text()
    assert "Command: `python studies/benchmark.py loss" in text
    assert all(f"| `{name}` |" in text for name in NAMES)
    assert "The uncompressed model fails it: not counted." in text


def test_times_of_decode_steps_stand_beside_losses(tmp_path: Path) -> None:
    arguments = (
        *("--text", "pydoc-topics", "--sequences", 3, "--held-out", 2, "--sequence-length", 64),
        *("--window", WINDOW, "--tasks", "--ratios", 0.5, "--out", tmp_path),
        *("--methods", "eigen-attention", "fp8", "--decode-after", 20, 40),
    )
    assert study(*arguments).code == 0
    results = pd.read_csv(tmp_path / "results.csv")
    timed = results[results["kind"] == "decode"]
    assert timed["composition"].tolist() == ["eigen-attention"] * 2
    assert timed["measured_on"].tolist() == ["20", "40"]
    assert (timed["decode_time"] > 0).all()
    text = (tmp_path / "summary.md").read_text()
    assert "| added | step after 20 | step after 40 |" in text
    shown = [f"{time:.1f}" for time in timed["decode_time"]]
    assert f"| {shown[0]} | {shown[1]} |" in text
    assert "| - | - |" in text  # of fp8, which is no plan

    stored = list((tmp_path / "steps" / "plans").glob("eigen-attention-*"))
    assert [CompressionPlan.load(folder).ratio for folder in stored] == [0.5]
    (stored[0] / "plan.json").unlink()
    for measured in (tmp_path / "steps").glob("text-*"):
        measured.unlink()
    assert "plan.json" in study(*arguments).err  # the plan is read again, not made again


def test_the_figures_show_the_table(done: tuple[Path, Done], results: pd.DataFrame) -> None:
    out, run = done
    for stem, kind, measure in (
        ("loss_against_bytes", "text", "added_nll"),
        ("answers_against_bytes", "task", "score"),
    ):
        part = results[results["kind"] == kind].set_index("composition")
        axes = run.figures[stem].axes[0]
        drawn = set(part.dropna(subset=[measure]).index)
        called = {ALIASES.get(name, name): name for name in drawn}
        assert {line.get_label() for line in axes.containers} == set(called)
        assert drawn == (set(NAMES) if kind == "task" else set(NAMES) - {"snapkv"})
        for line in axes.containers:
            expected = part.loc[[called[line.get_label()]], ["ratio", measure]].dropna()
            expected = expected.assign(ratio=1 / expected["ratio"]).sort_values("ratio")
            assert points(line.lines[0]) == [
                pytest.approx(tuple(row)) for row in expected.to_numpy()
            ]
        assert_written(out / stem)


def test_the_title_tells_the_smallest_cache_that_loses_little() -> None:
    rows = [
        *(("good", 0.125, "a", 0.009), ("good", 0.125, "b", 0.008), ("good", 0.1, "a", 0.2)),
        *(("late", 0.125, "a", 0.001), ("late", 0.125, "b", 0.02), ("late", 0.5, "a", 0.0)),
    ]
    frame = pd.DataFrame(rows, columns=["composition", "ratio", "measured_on", "added_nll"])
    frame = frame.assign(kind="text", model="tiny", nll_error=0.0)
    frame["bytes_per_token"] = 1024 * frame["ratio"]

    def title(part: pd.DataFrame) -> str:
        return draw(part)["loss_against_bytes"].get_suptitle().replace("\n", " ")

    assert title(frame).endswith("on all texts: good 8.0 times smaller, then late 2.0")
    assert "no cache measured adds at most 0.01" in title(frame.assign(added_nll=1.0))


def saved(family: str, folder: Path, **options: Any) -> Path:
    """A tiny model with the vocabulary and the tokenizer of a reference model."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED["reference-llama"])
    model = tiny_model(family, torch.float32, vocab_size=len(tokenizer), **options)
    for each in (model, tokenizer):
        each.save_pretrained(folder)
    return folder


def test_what_cannot_be_made_for_a_model_is_left_out(tmp_path: Path) -> None:
    """Layers with a sliding window hold less, of the stock cache too: ratios are those of it."""
    model = saved("gemma3", tmp_path / "model", sliding_window=32, max_position_embeddings=256)
    done = study(
        *("--model", model, "--text", "pydoc-topics", "--sequences", 3, "--held-out", 2),
        *("--sequence-length", 64, "--window", WINDOW, "--ratios", 0.5, "--out", tmp_path / "out"),
        *("--tasks", "--methods", "eigen-attention", "integers", "kivi", "fp8", *DROPPING),
    )
    assert done.code == 0, done.err
    by_name = pd.read_csv(tmp_path / "out" / "results.csv").groupby("composition")["ratio"]
    assert set(by_name.groups) == {"eigen-attention", "integers"}
    assert 0.4 < by_name.get_group("eigen-attention").item() <= 0.5
    of_head = [8 * bits / 8 + 4 for bits in (8, 4, 3, 2)]  # d 8, a scale and an offset
    assert by_name.get_group("integers").tolist() == [nbytes / 16 for nbytes in of_head]
    for name in ("fp8", *DROPPING):
        assert f"{name} at 0.5 is left out: layer 0 has a sliding window of 32 tokens" in done.err
    for bits in (4, 2):
        assert f"kivi at {bits / 16:g} is left out: layer 0 has a sliding window" in done.err
