"""Figures show what is in their table."""

from itertools import product

import pandas as pd
import pytest
from reports.objectives import error_against_rank, errors_per_layer

from manifoldkv.evaluate.diagnostics.figures import save_figure
from tests.drawings import assert_written


@pytest.fixture
def results():
    cells = product(
        range(3),
        ("key", "value", "both"),
        ("k-svd", "layer-output", "mine"),
        ("predictor", "riemannian-adam"),
        (8, 16),
        ("calibration", "held-out"),
        (0, 1),
    )
    names = ["layer", "site", "objective", "solver", "rank", "split", "seed"]
    frame = pd.DataFrame(cells, columns=names)
    error = (1 + frame["layer"]) / frame["rank"] + 0.01 * frame["seed"]
    error += 0.1 * (frame["solver"] == "predictor") + 5 * (frame["split"] == "calibration")
    return frame.assign(
        model="tiny",
        key_grouping="shared",
        value_grouping=1,
        rank_ratio=frame["rank"] / 32,
        attention_output_error=error,
        layer_output_error=error / 2,
        cosine_similarity=1 - error / 100,
        seconds=1 + frame["layer"],
    )


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def test_layers_are_drawn_from_held_out_rows_of_the_best_solver(results):
    figure = errors_per_layer(results)
    assert len(figure.axes) == 6
    for axes in figure.axes:
        line = lines(axes)["layer-output"]
        assert line.get_xdata().tolist() == [0, 1, 2]
        assert line.get_ydata().tolist() == pytest.approx([0, 0, 0])  # as good as the baseline


def test_layers_are_compared_with_eigen_attention(results):
    results = results.replace({"objective": {"k-svd": "eigen-attention"}})
    twice = results["objective"] == "layer-output"
    for error in ("attention_output_error", "layer_output_error"):
        results[error] *= 1 + twice
    figure = errors_per_layer(results)
    for axes in figure.axes:
        drawn = lines(axes)
        assert drawn["layer-output"].get_ydata().tolist() == pytest.approx([100, 100, 100])
        assert drawn["mine"].get_ydata().tolist() == pytest.approx([0, 0, 0])
        assert "eigen-attention" not in drawn
        assert set(drawn["eigen-attention (0)"].get_ydata()) == {0}
    assert "layer-output the highest" in figure.get_suptitle().replace("\n", " ")


def test_rank_axis_is_the_achieved_ratio(results):
    line = lines(error_against_rank(results).axes[0])["k-svd"]
    assert line.get_xdata().tolist() == [0.25, 0.5]
    assert line.get_ydata()[0] > line.get_ydata()[1]


def test_seeds_are_bands(results):
    assert errors_per_layer(results).axes[0].collections
    one_seed = results[results["seed"] == 0]
    assert not errors_per_layer(one_seed).axes[0].collections


def test_a_basis_per_head_has_a_mark_of_its_own(results):
    of_head = results[results["objective"] == "k-svd"]
    kq_svd = [of_head.assign(objective="kq-svd", key_grouping=g) for g in ("shared", "1")]
    figure = error_against_rank(pd.concat([results, *kq_svd]))
    drawn = lines(figure.axes[0])
    shared, alone = drawn["kq-svd"], drawn["kq-svd, a basis per head"]
    assert shared.get_color() != alone.get_color()
    assert shared.get_marker() != alone.get_marker()


def test_equal_tables_give_equal_files(results, tmp_path):
    for stem in ("first", "second"):
        save_figure(errors_per_layer(results), tmp_path / stem)
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()
    assert_written(tmp_path / "first")
