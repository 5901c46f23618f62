"""`benchmark.py loss` as a user runs it, on few tokens."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from common import EMBEDDED
from reports.loss import ALIASES, draw
from transformers import AutoTokenizer

from manifoldkv import CompressionPlan
from tests.drawings import assert_written, points
from tests.families import tiny_model
from tests.studies.running import Done, finished, run_here

RATIOS = (0.5, 0.25)
PLANS = ("eigen-attention", "grouped", "grouped-4-bit")
DROPPING = ("sinks-recent", "snapkv")
NAMES = (*PLANS, "integers", "kivi", "fp8", *DROPPING)
STOCK_BYTES = 6 * 2 * 2 * 32 * 2  # layers, K and V, heads, d, bytes
WINDOW = 128
TEXTS = (
    *("benchmark", "loss", "--text", "pydoc-topics", "--sequences", 3, "--held-out", 2),
    *("--sequence-length", 64, "--window", WINDOW),
)


def run(folder: Path, *names: str) -> Done:
    return finished(
        *(*TEXTS, "--tasks", "passkey", "--task-length", 90, "--items", 3),
        *("--ratios", *RATIOS, "--out", folder, "--methods", *names),
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return run(tmp_path_factory.mktemp("loss"), *NAMES)


@pytest.fixture(scope="module")
def results(done: Done) -> pd.DataFrame:
    return done.table()


def test_a_row_per_measurement_at_the_achieved_bytes(results: pd.DataFrame) -> None:
    assert list(dict.fromkeys(results["composition"])) == list(NAMES)
    rows = (2 + 2 + 1) + 4 + 2 + 1 + 2 * len(DROPPING)  # four bits are no half of sixteen
    counted = results.groupby("kind")["composition"].count().to_dict()
    assert counted == {"text": rows, "task": rows}
    per_token = results["bytes_per_token"] / results["ratio"]
    assert per_token.to_numpy() == pytest.approx(STOCK_BYTES)
    reached = results[results["composition"].isin((*PLANS, "sinks-recent"))]
    assert (reached["ratio"] <= reached["requested_ratio"] + 1e-9).all()
    assert (reached["ratio"] > 0.85 * reached["requested_ratio"]).all()


def test_bytes_of_baselines_are_those_of_their_arithmetic(results: pd.DataFrame) -> None:
    by_name = results[results["kind"] == "text"].set_index("composition")
    integers = by_name.loc["integers", "ratio"].tolist()
    of_head = [32 * bits / 8 + 4 for bits in (8, 4, 3, 2)]  # d 32, a scale and an offset
    assert integers == pytest.approx([nbytes / (32 * 2) for nbytes in of_head])
    assert by_name.loc["fp8", "ratio"] == 0.5
    assert by_name.loc["sinks-recent", "ratio"].tolist() == [0.5, 0.25]
    assert by_name.loc["snapkv", "ratio"].tolist() == [0.5, 33 / WINDOW]  # 33 tokens at least


def test_more_bits_lose_less_and_snapkv_has_no_loss_on_a_text(results: pd.DataFrame) -> None:
    losses = results.set_index(["composition", "kind"])["added_nll"].sort_index()
    integers = losses["integers", "text"]
    assert integers.iloc[0] < 0.01 < integers.iloc[3]
    assert losses["snapkv", "text"].isna().all()
    assert losses.drop(("snapkv", "text")).notna().all()


def test_the_summary_has_sizes_without_tokens_that_are_held_uncompressed(tmp_path: Path) -> None:
    texts = (*TEXTS[:-1], 160)  # 132 of them uncompressed
    done = finished(*texts, "--tasks", "--out", tmp_path, "--methods", "aqua-kv", "fp8")
    lines = [line for line in done.text().splitlines() if line.startswith(("| method", "| `"))]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[:5]]
    assert cells[0][3] == "times smaller without exact tokens"
    expected = []
    for bits in (4, 3, 2):
        layers = [64 * width // 8 + 2 for width in (4, *[bits] * 5)]  # one block of 64 features
        expected.append(f"{6 * 64 * 2 / sum(layers):.2f}")
    assert [row[3] for row in cells[1:]] == [*expected, "-"]


def test_a_repeated_run_measures_nothing_again(done: Done, tmp_path: Path) -> None:
    names = ("snapkv", "fp8", "grouped")
    before = done.table()
    before = before[before["composition"].isin(names)]
    after = run(shutil.copytree(done.folder, tmp_path / "again"), *names).table()
    keys = ["composition", "requested_ratio", "kind"]
    ordered = [frame.sort_values(keys).reset_index(drop=True) for frame in (before, after)]
    pd.testing.assert_frame_equal(*ordered)  # with the seconds of the first run


def test_the_summary_names_the_command_and_every_method(done: Done) -> None:
    text = done.text()
    assert "Command: `python studies/benchmark.py loss" in text
    assert all(f"| `{name}` |" in text for name in NAMES)
    assert "The uncompressed model fails it: not counted." in text


def test_times_of_decode_steps_stand_beside_losses(tmp_path: Path) -> None:
    arguments = (*TEXTS, "--tasks", "--ratios", 0.5, "--out", tmp_path, "--methods")
    arguments += ("eigen-attention", "fp8", "--decode-after", 20, 40)
    done = finished(*arguments)
    results = done.table()
    timed = results[results["kind"] == "decode"]
    assert timed["composition"].tolist() == ["eigen-attention"] * 2
    assert timed["measured_on"].tolist() == ["20", "40"]
    assert (timed["decode_time"] > 0).all()
    assert "| added | step after 20 | step after 40 |" in done.text()
    assert "| {:.1f} | {:.1f} |".format(*timed["decode_time"]) in done.text()
    assert "| - | - |" in done.text()  # of fp8, which is no plan

    (plan,) = (tmp_path / "steps" / "plans").glob("eigen-attention-*")
    assert CompressionPlan.load(plan).ratio == 0.5
    (plan / "plan.json").unlink()
    for step in (tmp_path / "steps").glob("text-*"):
        step.unlink()
    assert "plan.json" in run_here(*arguments).err  # the plan is loaded, not solved again


def test_the_figures_show_the_table(done: Done, results: pd.DataFrame) -> None:
    for stem, kind, measure, names in (
        ("loss_against_bytes", "text", "added_nll", set(NAMES) - {"snapkv"}),
        ("answers_against_bytes", "task", "score", set(NAMES)),
    ):
        part = results[results["kind"] == kind].set_index("composition")
        labels = {ALIASES.get(name, name): name for name in names}
        lines = done.figures[stem].axes[0].containers
        assert {line.get_label() for line in lines} == set(labels)
        for line in lines:
            expected = part.loc[[labels[line.get_label()]], ["ratio", measure]].dropna()
            expected = expected.assign(ratio=1 / expected["ratio"]).sort_values("ratio")
            drawn = [pytest.approx(tuple(row)) for row in expected.to_numpy()]
            assert points(line.lines[0]) == drawn
        assert_written(done.folder / stem)


def test_the_title_names_the_smallest_cache_that_loses_little() -> None:
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


def test_a_method_that_does_not_support_the_model_is_left_out(tmp_path: Path) -> None:
    """Layers with a sliding window hold less, of the stock cache too: ratios are those of it."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED["reference-llama"])
    options = {"sliding_window": 32, "max_position_embeddings": 256}
    model = tiny_model("gemma3", torch.float32, vocab_size=len(tokenizer), **options)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    done = finished(
        *(*TEXTS, "--model", tmp_path / "model", "--ratios", 0.5, "--out", tmp_path / "out"),
        *("--tasks", "--methods", "eigen-attention", "integers", "kivi", "fp8", *DROPPING),
    )
    by_name = done.table().groupby("composition")["ratio"]
    assert set(by_name.groups) == {"eigen-attention", "integers"}
    assert 0.4 < by_name.get_group("eigen-attention").item() <= 0.5
    of_head = [8 * bits / 8 + 4 for bits in (8, 4, 3, 2)]  # d 8, a scale and an offset
    assert by_name.get_group("integers").tolist() == [nbytes / 16 for nbytes in of_head]
    for name in ("fp8", *DROPPING):
        assert f"{name} at 0.5 is left out: layer 0 has a sliding window of 32 tokens" in done.err
    for bits in (4, 2):
        assert f"kivi at {bits / 16:g} is left out: layer 0 has a sliding window" in done.err
