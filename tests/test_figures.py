"""Figures show what is in their table."""

from itertools import product

import pandas as pd
import pytest

from manifoldkv.figures import (
    COLOURS,
    colour_of,
    error_against_rank,
    error_against_seconds,
    errors_per_layer,
    save_figure,
)
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
    assert len(figure.axes) == 9
    line = lines(figure.axes[1])["layer-output"]
    assert line.get_xdata().tolist() == [0, 1, 2]
    expected = [((1 + layer) / 8 + 0.005) / 2 for layer in range(3)]
    assert line.get_ydata().tolist() == pytest.approx(expected)


def test_rank_axis_is_the_achieved_ratio(results):
    line = lines(error_against_rank(results).axes[0])["k-svd"]
    assert line.get_xdata().tolist() == [0.25, 0.5]
    assert line.get_ydata()[0] > line.get_ydata()[1]


def test_seconds_have_a_point_per_objective_and_solver(results):
    figure = error_against_seconds(results)
    assert len(figure.axes) == 2
    points = [line for line in figure.axes[0].get_lines() if len(line.get_xdata())]
    assert len(points) == 6
    assert points[0].get_xdata()[0] == 2  # mean over layers


def test_seeds_are_bands(results):
    assert errors_per_layer(results).axes[0].collections
    one_seed = results[results["seed"] == 0]
    assert not errors_per_layer(one_seed).axes[0].collections


def test_names_keep_their_colours():
    among = ["mine", "k-svd", "yours"]
    colours = [colour_of(name, among) for name in among]
    assert colours[1] == COLOURS["k-svd"]
    assert len(set(colours)) == 3
    assert not {colours[0], colours[2]} & set(COLOURS.values())


def test_equal_tables_give_equal_files(results, tmp_path):
    for stem in ("first", "second"):
        save_figure(errors_per_layer(results), tmp_path / stem)
    for suffix in (".png", ".pdf"):
        first, second = ((tmp_path / f"{s}{suffix}").read_bytes() for s in ("first", "second"))
        assert first == second
    assert_written(tmp_path / "first")
