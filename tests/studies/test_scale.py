"""scale as a user runs it, on one layer of a large model's shape."""

from pathlib import Path

import pandas as pd
import pytest
from scale import GIB

from tests.drawings import assert_written, lines_of
from tests.studies.running import Done, run_here

SMALL = (
    *("--shape", "llama-3-8b", "--layers", 1, 3, "--sequences", 1),
    *("--sequence-length", 32, "--steps", 1),
)


def study(*arguments: object) -> Done:
    return run_here("scale", *arguments)


def measured(out: Path, solver: str) -> pd.DataFrame:
    results = pd.read_csv(out / "results.csv")
    return results[results["solver"] == solver].reset_index()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    folder = tmp_path_factory.mktemp("scale")
    done = study(*SMALL, "--out", folder)
    assert done.code == 0, done.err
    return folder, done


@pytest.fixture(scope="module")
def out(done: tuple[Path, Done]) -> Path:
    return done[0]


def test_operations_are_those_of_the_layer(out: Path) -> None:
    results = measured(out, "riemannian-adam")
    weights = 4096 * 4096 + 3 * 4096 * 14336  # W_O and MLP: forward, and back to their inputs
    projections = 4096 * (4096 + 2 * 1024)  # forward, for the queries of steps on keys
    for site, again in (("key", projections), ("value", 0)):
        lowest = 2 * (2 * weights + again) * 32
        flops = results[f"{site}_flops_per_sequence"]
        assert ((flops > lowest) & (flops < 1.1 * lowest)).all()
        fast = results[f"{site}_fast_flops_per_step"]  # four sequences, each with all of its rows
        assert ((fast > 4 * lowest) & (fast < 1.1 * 4 * lowest)).all()


def test_operations_of_closed_forms_are_their_gram_matrices(out: Path) -> None:
    """Each once for keys, queries and values, of which the layer makes its inputs once more."""
    results = measured(out, "closed-form")
    projections = 2 * 4096 * (4096 + 2 * 1024)
    together, by_query_head = 2 * 1024**2, 2 * 32 * 128**2
    keys = results["key_closed_flops_per_token"]
    values = results["value_closed_flops_per_token"]
    assert keys.item() == pytest.approx(projections + together + by_query_head, rel=0.01)
    reader = 2 * 32 * 128**2 * 4096  # of W_O, whatever the tokens
    assert values.item() == pytest.approx(projections + together + reader / 32, rel=0.01)


def test_memory_does_not_grow_with_the_layers(out: Path) -> None:
    results = measured(out, "riemannian-adam")
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert (results["layer_weights"] == layer).all()
    assert (results["layer_bytes"] == 2 * layer).all()
    one, three = results["peak_bytes"]
    assert three < one + 0.25 * results["layer_bytes"][0]  # not two layers more
    assert one > results["imported_bytes"][0] + results["layer_bytes"][0]


def test_what_is_measured_is_not_measured_again(out: Path) -> None:
    before = pd.read_csv(out / "results.csv")
    assert study(*SMALL, "--out", out).code == 0
    pd.testing.assert_frame_equal(pd.read_csv(out / "results.csv"), before)


def test_estimates_are_marked(out: Path) -> None:
    text = (out / "summary.md").read_text()
    assert "## Estimates for the whole model, not measurements" in text
    assert "sustained 100 TFLOP/s" in text
    assert "| llama-3-8b | predictor | 15.0 GiB |" in text  # 8.03 billion weights of two bytes


def test_figures_show_the_table(done: tuple[Path, Done]) -> None:
    out, run = done
    steps, closed = measured(out, "riemannian-adam"), measured(out, "closed-form")
    memory = steps["peak_bytes"] / GIB
    (axes,) = run.figures["memory_against_tokens"].axes
    assert lines_of(axes) == {
        "llama-3-8b, riemannian-adam": [pytest.approx((32, memory[0]))],
        "llama-3-8b, closed-form": [pytest.approx((32, closed["peak_bytes"][0] / GIB))],
    }
    left, right = run.figures["cost_against_layers"].axes
    for axes, column in ((left, memory), (right, steps["seconds"])):
        expected = [pytest.approx((1, column[0])), pytest.approx((3, column[1]))]
        assert lines_of(axes)["llama-3-8b"] == expected
    weights = steps["layer_bytes"][0] / GIB
    expected = [pytest.approx((count, count * weights)) for count in (1, 3)]
    assert lines_of(left)["llama-3-8b, weights of all layers"] == expected
    for name in ("memory_against_tokens", "cost_against_layers"):
        assert_written(out / name)


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    run = study("--layers", 0, "--out", tmp_path)
    assert run.code == 2
    assert run.err.strip() == ("scale: layers, sequences, lengths, steps and rate must be positive")
