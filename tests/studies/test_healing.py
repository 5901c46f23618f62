"""healing as a user runs it, on few tokens."""

from pathlib import Path

import healing
import numpy as np
import pandas as pd
import pytest
import torch
from transformers import PreTrainedModel

from manifoldkv import compress, load_model, open_text, sample_tokens
from manifoldkv.export.heal import heal
from tests.drawings import assert_written
from tests.studies.running import STUDIES, Done, run_here

FEW = (
    *("--sequences", 4, "--length", 48, "--windows", 2, "--sequences-per-step", 2),
    *("--held-out-texts", "docstrings", "pydoc-topics", "--steps", 40, 2),
)


def some_model_and_tokens() -> tuple[PreTrainedModel, torch.Tensor]:
    model, tokenizer = load_model(str(STUDIES / "reference_models" / "reference-llama"))
    text = open_text("docstrings")
    return model, sample_tokens(text, tokenizer, sequences=4, length=48, split="calibration")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("healing")


@pytest.fixture(scope="module")
def plan(out: Path) -> Path:
    """A plan that loses much: an eighth of the cache."""
    model, tokens = some_model_and_tokens()
    compress(model, tokens, recipe="commuting", ratio=0.125).save(out / "plan")
    return out / "plan"


@pytest.fixture(scope="module")
def run(out: Path, plan: Path) -> Done:
    done = run_here("healing", *FEW, "--plan", plan, "--out", out)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def results(run: Done, out: Path) -> pd.DataFrame:
    return pd.read_csv(out / "results.csv")


def test_more_steps_lose_less(results: pd.DataFrame) -> None:
    assert results["steps"].tolist() == [0, 0, 2, 2, 40, 40]
    assert results["tokens"].tolist() == [0, 0, 192, 192, 3840, 3840]
    assert set(results["ratio"]) == {0.125}
    added = results[results["text"] == "docstrings"].set_index("steps")["added_nll"]
    assert added[40] < added[0]


def test_the_figure_shows_the_table(run: Done, results: pd.DataFrame, out: Path) -> None:
    assert_written(out / "added_nats")
    (axes,) = run.figures["added_nats"].axes
    for bars, (_, part) in zip(axes.containers, results.groupby("text", sort=False), strict=True):
        healed = part[part["steps"] > 0]
        drawn = bars[0].get_xydata()
        np.testing.assert_allclose(drawn, healed[["tokens", "added_nll"]])
    assert axes.get_ylim()[0] == 0
    assert "(logarithmic)" in axes.get_xlabel()


def test_the_summary_has_every_row(run: Done, results: pd.DataFrame, out: Path) -> None:
    written = (out / "summary.md").read_text()
    for _, row in results.iterrows():
        (line,) = (line for line in written.splitlines() if line.startswith(f"| {row['steps']} |"))
        assert f"{row['added_nll']:.3f} ± {row['standard_error']:.3f}" in line


def test_a_second_run_measures_nothing(
    run: Done, out: Path, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (out / "results.csv").read_bytes()

    def refused(*arguments: object) -> None:
        raise AssertionError("this is stored")

    monkeypatch.setattr(healing.Healing, "healed", refused)
    assert run_here("healing", *FEW, "--plan", plan, "--out", out).code == 0
    assert (out / "results.csv").read_bytes() == before


def test_a_plan_is_made_where_none_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healed_on = []

    def recorded(original: object, made: object, tokens: torch.Tensor, **options: object) -> float:
        healed_on.append(tokens)
        return heal(original, made, tokens, **options)

    monkeypatch.setattr(healing, "heal", recorded)
    done = run_here("healing", *FEW[:-2], 1, "--precision", "medium", "--out", tmp_path)
    assert done.code == 0, done.err
    results = pd.read_csv(tmp_path / "results.csv")
    assert set(results["ratio"]) == {0.5}
    assert set(results["precision"]) == {"medium"}
    assert "float32 matmul precision `medium`" in (tmp_path / "summary.md").read_text()
    _, expected = some_model_and_tokens()
    assert torch.equal(healed_on[0], expected)  # nothing of what it is measured on


def test_a_model_that_cannot_be_folded_is_refused(tmp_path: Path) -> None:
    done = run_here("healing", "--model", "reference-qwen3", *FEW, "--out", tmp_path)
    assert done.code == 2
    assert "norm" in done.last_line
