"""frontier as a user runs it, on few tokens."""

from pathlib import Path

import pandas as pd
import pytest
from frontier import COMPOSITIONS, attention_work, windowed_perplexity

from manifoldkv import RECIPES
from manifoldkv.evaluation import perplexity
from tests.drawings import assert_written, points
from tests.families import tiny_model, tiny_tokens
from tests.plans import random_plan
from tests.studies.running import Done, run_here

NAMES = ("eigen-attention", "grouped-optimal", "grouped-optimal-recent", "forget-older")


def study(*arguments: object) -> Done:
    return run_here("frontier", *arguments)


def run(folder: Path, *names: str) -> Done:
    return study(
        *("--text", "pydoc-topics", "--sequences", 3, "--held-out", 2, "--sequence-length", 64),
        *("--ratios", 0.5, "--out", folder, "--compositions", *names),
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    folder = tmp_path_factory.mktemp("frontier")
    done = run(folder, *NAMES)
    assert done.code == 0, done.err
    return folder, done


@pytest.fixture(scope="module")
def out(done: tuple[Path, Done]) -> Path:
    return done[0]


def test_a_row_per_plan_at_the_achieved_ratio(out: Path) -> None:
    results = pd.read_csv(out / "results.csv").set_index("composition")
    assert tuple(results.index) == NAMES
    assert (results["ratio"] <= 0.5).all()
    full = results["bytes_per_token"] / results["ratio"]
    assert full.to_numpy() == pytest.approx(6 * 2 * 2 * 32 * 2)  # layers, K and V, heads, d, bytes
    recent = results.loc["grouped-optimal-recent"]
    assert recent["recent"] == 8
    assert recent["long_run_ratio"] < recent["ratio"]
    assert recent["added_nll"] < results.loc["grouped-optimal", "added_nll"]
    assert results.loc["forget-older", ["recent", "long_run_ratio"]].tolist() == [32, 0]


def test_what_is_measured_is_kept(out: Path) -> None:
    before = pd.read_csv(out / "results.csv")
    assert run(out, *reversed(NAMES)).code == 0
    after = pd.read_csv(out / "results.csv")
    by_name = [frame.set_index("composition").sort_index() for frame in (before, after)]
    pd.testing.assert_frame_equal(*by_name)  # with the seconds of the first run


def test_the_summary_names_the_command_and_every_composition(out: Path) -> None:
    text = (out / "summary.md").read_text()
    assert "Command: `python studies/frontier.py" in text
    assert all(f"| {name} |" in text for name in NAMES)


def test_the_figure_shows_the_table(done: tuple[Path, Done]) -> None:
    out, run = done
    results = pd.read_csv(out / "results.csv").set_index("composition")
    drawn = run.figures["loss_against_bytes"].axes[0].containers
    assert {line.get_label() for line in drawn} == set(NAMES)
    for line in drawn:
        expected = results.loc[line.get_label(), ["bytes_per_token", "added_nll"]]
        assert points(line.lines[0]) == [pytest.approx(tuple(expected))]
    assert_written(out / "loss_against_bytes")


def test_every_recipe_is_a_composition() -> None:
    assert {name: COMPOSITIONS[name][0] for name in RECIPES} == RECIPES


def test_unknown_compositions_are_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "nothing")
    assert done.code == 2
    assert "unknown composition 'nothing'; known: eigen-attention" in done.err


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_window_as_long_as_the_text_forgets_nothing(family: str) -> None:
    model, tokens = tiny_model(family), tiny_tokens(2, 12)
    whole = windowed_perplexity(model, tokens, 12)
    assert whole.by_sequence == pytest.approx(perplexity(model, tokens).by_sequence, rel=1e-6)
    assert whole.predicted == 2 * 11


def test_forgetting_is_what_a_model_with_a_sliding_window_does() -> None:
    tokens = tiny_tokens(2, 12)
    sliding, model = tiny_model("mistral"), tiny_model("llama")  # a window of 5 tokens
    model.load_state_dict(sliding.state_dict())
    found = windowed_perplexity(model, tokens, 5).by_sequence
    assert found == pytest.approx(perplexity(sliding, tokens).by_sequence, rel=1e-6)
    assert found != pytest.approx(perplexity(model, tokens).by_sequence, rel=1e-3)


def test_attention_work_is_counted_by_hand() -> None:
    model = tiny_model("llama")  # 4 query heads, 2 KV heads, d 8
    plan = random_plan(model, key_rank=4, value_rank=4, rotary="post")
    assert attention_work(plan, 4) == 0.5
    grouped = random_plan(
        model, key_rank=4, value_rank=4, rotary="post", key_grouping="all", value_grouping="all"
    )
    assert attention_work(grouped, 4) == 1.0
    pre = random_plan(model, key_rank=4, value_rank=4)
    scores, expansion, mixture = 4 * 8, 2 * 8 * 4, 4 * 4
    assert attention_work(pre, 4) == (scores + expansion + mixture) / (2 * 4 * 8)
