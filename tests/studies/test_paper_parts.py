"""The parts of reproduce_paper that are tested without a model."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from paper.solvers import solvers_caption
from paper.steps import Steps
from paper.tasks import spread_tasks

from manifoldkv.core.errors import ArgumentError
from manifoldkv.runs.checkpoints import Checkpoints


def test_documents_are_spread_evenly_and_a_short_file_is_taken_whole(tmp_path: Path) -> None:
    for items in (1838, 7):
        source = tmp_path / str(items) / "piqa" / "validation.jsonl"
        source.parent.mkdir(parents=True)
        source.write_text("\n".join(json.dumps({"number": i}) for i in range(items)) + "\n\n")
        folder = spread_tasks({"piqa": 500}, source.parents[1], tmp_path / f"some-{items}")
        lines = (folder / "piqa" / "validation.jsonl").read_text().splitlines()
        numbers = [json.loads(line)["number"] for line in lines]
        if items < 500:
            assert numbers == list(range(items))
            continue
        assert len(numbers) == len(set(numbers)) == 500
        assert {after - before for before, after in pairwise(numbers)} == {3, 4}
        assert numbers[0] == 0
        assert numbers[-1] >= items - 4


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no documents for task mmlu"):
        spread_tasks({"mmlu": 2}, tmp_path, tmp_path / "some")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = 0.0
    monkeypatch.setattr("paper.steps.time.process_time", lambda: now)

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    return advance


def test_seconds_of_a_step_are_those_of_the_run_that_made_it(
    tmp_path: Path, clock: Callable[[float], None]
) -> None:
    def run(seconds: float) -> pd.DataFrame:
        steps, checkpoints = Steps(), Checkpoints(tmp_path)

        def computed() -> pd.DataFrame:
            clock(seconds)
            return pd.DataFrame({"x": [1]})

        for window in (1, 2):
            for _ in range(2):  # asked for twice, counted once
                steps.frame(checkpoints.keyed(window=window), "nll", "perplexity", computed)
        steps.value(checkpoints, "plans", lambda: clock(seconds))
        return steps.table()

    first = run(5.0)
    assert first.to_dict("records") == [
        {"step": "perplexity", "times": 2, "seconds": 10.0},
        {"step": "plans", "times": 1, "seconds": 5.0},
    ]
    pd.testing.assert_frame_equal(run(700.0), first)


def test_the_time_for_all_layers_is_extrapolated() -> None:
    rows = [
        (layer, site, solver, seconds, error)
        for layer in (0, 3)
        for site in ("key", "value")
        for solver, seconds, error in (
            ("EigenAttention", 0.0, 0.3),
            ("predictor", 30.0 if site == "key" else 90.0, 0.2),
        )
    ]
    columns = ["layer", "site", "solver", "seconds", "layer_output_error"]
    text = solvers_caption(pd.DataFrame(rows, columns=columns), layers=30, candidates=4)
    # 30 layers of a key basis and a value basis at 4 ranks: 120 × (30 + 90) seconds.
    assert "predictor 0.2000 in 60.0 processor seconds a basis" in text
    assert "take 4.00 hours" in text
    assert "in layers 0, 3 at half the rank" in text
