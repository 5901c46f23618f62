"""memory as a user runs it, and its bytes against those that plans count."""

from pathlib import Path

import pandas as pd
import pytest
from memory import memory

from manifoldkv import CompressionPlan, Quantization, full_rank_plan, quantize
from tests.drawings import assert_written, lines_of
from tests.families import tiny_model, tiny_tokens
from tests.plans import bits_plan
from tests.studies.running import run_here

WINDOW = 64
STOCK = 3 * 2 * 2 * 8 * 2
"""Bytes of a token: layers, K and V, heads, d, 16 bits."""


@pytest.fixture(scope="module")
def plans() -> dict[str, CompressionPlan]:
    model, tokens = tiny_model("llama"), tiny_tokens()
    integers = quantize(full_rank_plan(model), model, tokens, Quantization(4, "token"))
    best = bits_plan(model, tokens, ratio=0.5, context=WINDOW, below=1)
    assert best.sinks == 4
    return {"best": best, "integers": integers}


@pytest.fixture(scope="module")
def frontier(plans: dict[str, CompressionPlan], tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {"model": "tiny", "composition": name, "requested_ratio": requested, "window": WINDOW}
        | {"ratio": plans[name].nbytes(WINDOW) / (STOCK * WINDOW)}
        | {"bytes_per_token": plans[name].nbytes(WINDOW) / WINDOW}
        | {"basis_bytes": plans[name].basis_nbytes()}
        for name, requested in (("best", 0.5), ("integers", 0.25))
    ]
    folder = tmp_path_factory.mktemp("frontier")
    pd.DataFrame(rows).to_csv(folder / "results.csv", index=False)
    return folder


def test_bytes_are_those_that_plans_count(
    plans: dict[str, CompressionPlan], frontier: Path
) -> None:
    found = memory(pd.read_csv(frontier / "results.csv"), 2, 640, [1, 3])
    for name, plan in plans.items():
        rows = found[found["cache"] == name]
        expected = [
            plan.basis_nbytes() + plan.nbytes(tokens, batch=batch)
            for tokens, batch in zip(rows["tokens"], rows["sequences"], strict=True)
        ]
        assert rows["nbytes"].tolist() == pytest.approx(expected)
    stock = found[found["cache"] == "uncompressed"]
    assert (stock["nbytes"] == STOCK * stock["tokens"] * stock["sequences"]).all()


def test_the_figure_shows_the_table(frontier: Path, tmp_path: Path) -> None:
    arguments = ("--frontier", frontier, "--times", 2, "--context", 640, "--batches", 1, 3)
    done = run_here("memory", *arguments, "--out", tmp_path)
    assert done.code == 0, done.err
    results = pd.read_csv(tmp_path / "results.csv")
    panels = done.figures["memory_against_context"].axes
    for axes, batch in zip(panels, (1, 3), strict=True):
        rows = results[(results["sequences"] == batch) & (results["cache"] == "best")]
        (label,) = (name for name in lines_of(axes) if name.startswith("best"))
        points = zip(rows["tokens"], rows["nbytes"] / 2**20, strict=True)
        assert lines_of(axes)[label] == [pytest.approx(point) for point in points]
    assert_written(tmp_path / "memory_against_context")
    assert "Command: `python studies/memory.py" in (tmp_path / "summary.md").read_text()


def test_what_was_not_measured_is_named(frontier: Path, tmp_path: Path) -> None:
    done = run_here("memory", "--frontier", frontier, "--times", 7, "--out", tmp_path)
    assert done.code == 2
    assert done.last_line == "memory: frontier has not measured best at a ratio of 0.142857"
    done = run_here("memory", "--frontier", tmp_path, "--out", tmp_path)
    assert "has no results.csv of frontier" in done.last_line
