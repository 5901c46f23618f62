"""The paper's figures show what is in their table."""

from itertools import product

import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from paper.tables import table_of_results

from manifoldkv.evaluate.diagnostics.figures import (
    accuracy,
    bases_comparison,
    mark_of,
    perplexities,
    policies,
    quantization,
    rank_profile,
)

MEASURES = {
    "perplexity": ("docstrings", "pydoc-topics"),
    "accuracy": ("hellaswag", "piqa", "mmlu"),
}


@pytest.fixture
def evaluations() -> pd.DataFrame:
    rows = []
    for measure, targets in MEASURES.items():
        for of, seed in product(targets, (0, 1)):
            common = {"model": "tiny", "measure": measure, "of": of, "seed": seed, "bits": 16}
            common |= {"standard_error": 0.01, "policy": "sequential"}
            base = {"method": "uncompressed", "requested_ratio": None, "ratio": 1.0, "point": 1}
            rows.append(common | base | {"bytes_ratio": 1.0, "value": 10.0})
            for method, ratio, policy in product(
                ("eigen-attention", "layer-output", "mine"), (0.5, 0.9), ("sequential", "uniform")
            ):
                achieved = ratio - 0.02
                value = 10 + len(method) / ratio + seed + (policy == "uniform")
                found = {"method": method, "policy": policy, "requested_ratio": ratio}
                found |= {
                    "point": ratio,
                    "ratio": achieved + seed / 100 - 0.005,
                    "bytes_ratio": achieved,
                    "value": value,
                }
                rows.append(common | found)
    return pd.DataFrame(rows)


def lines(figure: Figure, panel: int = 0) -> dict:
    return {str(line.get_label()): line for line in figure.axes[panel].get_lines()}


def sequential(evaluations: pd.DataFrame) -> pd.DataFrame:
    return evaluations[evaluations["policy"] == "sequential"]


@pytest.mark.parametrize(
    ("draw", "measure"), [(accuracy, "accuracy"), (perplexities, "perplexity")]
)
def test_tradeoffs_show_means_at_the_achieved_ratio(draw, measure, evaluations) -> None:
    figure = draw(sequential(evaluations), title="tiny")
    assert [axes.get_title() for axes in figure.axes] == list(MEASURES[measure])
    for panel in range(len(figure.axes)):
        found = lines(figure, panel)
        named = {"uncompressed", "EigenAttention", "StiefAttention", "mine"}
        assert set(found) - {"chance"} == named
        line = found["StiefAttention"]
        assert line.get_xdata().tolist() == pytest.approx([0.48, 0.88])
        assert line.get_ydata().tolist() == pytest.approx([10.5 + 12 / 0.5, 10.5 + 12 / 0.9])
        assert line.get_color() == mark_of("layer-output").colour
        assert set(found["uncompressed"].get_ydata()) == {10.0}
        assert len(figure.axes[panel].collections) == 3  # a band over seeds for every method


def test_chance_is_drawn_where_it_is_known(evaluations) -> None:
    figure = accuracy(sequential(evaluations).assign(value=0.6), title="tiny")
    for panel, chance in enumerate((0.25, 0.5, 0.25)):  # of four answers, or of two
        assert set(lines(figure, panel)["chance"].get_ydata()) == {chance}
        assert figure.axes[panel].get_ylim()[0] == 0
    renamed = sequential(evaluations).replace({"of": {"mmlu": "another"}})
    assert "chance" not in lines(accuracy(renamed, title="tiny"), 2)


def test_logarithmic_axes_say_so(evaluations) -> None:
    for axes in perplexities(sequential(evaluations), title="tiny").axes:
        assert axes.get_yscale() == "log"
        assert axes.get_ylabel() == "perplexity (logarithmic)"


def test_titles_tell_the_numbers(evaluations) -> None:
    title = accuracy(sequential(evaluations), title="tiny").get_suptitle().replace("\n", " ")
    assert "hellaswag, ratio 0.48: EigenAttention 40.500, StiefAttention 34.500" in title


def test_policies_are_lines_of_one_method(evaluations) -> None:
    figure = policies(evaluations[evaluations["method"] == "layer-output"], title="tiny")
    found = lines(figure)
    assert set(found) == {"sequential", "uniform"}
    assert found["uniform"].get_color() != found["sequential"].get_color()
    assert found["uniform"].get_marker() != found["sequential"].get_marker()
    difference = found["uniform"].get_ydata() - found["sequential"].get_ydata()
    assert difference.tolist() == pytest.approx([1, 1])


def test_quantization_has_a_point_per_width(evaluations) -> None:
    part = sequential(evaluations)
    part = part[(part["requested_ratio"] == 0.5) & (part["measure"] == "perplexity")]
    rounded = [
        part.assign(bits=bits, bytes_ratio=part["bytes_ratio"] * (bits + 0.5) / 16, value=20 - bits)
        for bits in (8, 4, 2)
    ]
    plain = pd.concat([part, *rounded]).assign(rotation="none")
    turned = pd.concat(rounded).assign(rotation="hadamard", value=11.0)
    figure = quantization(pd.concat([plain, turned]), title="tiny")
    assert lines(figure)["EigenAttention, hadamard"].get_ydata().tolist()[:3] == [11] * 3
    line = lines(figure)["EigenAttention"]
    assert line.get_xdata().tolist() == pytest.approx([0.075, 0.135, 0.255, 0.48])
    assert line.get_ydata().tolist()[:3] == [18, 16, 12]
    (above,) = figure.axes[0].child_axes
    assert [label.get_text() for label in above.get_xticklabels()] == ["2", "4", "8", "exact"]


def test_errors_larger_than_a_perplexity_leave_the_axis_as_it_is(evaluations) -> None:
    part = evaluations[evaluations["seed"] == 0].assign(rotation="none")
    part = part[(part["measure"] == "perplexity") & (part["policy"] == "sequential")]
    plain = quantization(part.assign(standard_error=0.0), title="tiny")
    uncertain = quantization(part.assign(standard_error=1000.0), title="tiny")
    for axes, expected in zip(uncertain.axes, plain.axes, strict=True):
        low, high = axes.get_ylim()
        assert 0 < low < high
        assert low <= expected.get_ylim()[1] <= high
        assert axes.get_yticks().size < 20


def test_a_single_point_shows_its_error(evaluations) -> None:
    part = sequential(evaluations)
    part = part[(part["seed"] == 0) & (part["requested_ratio"] != 0.9)]
    axes = accuracy(part, title="tiny").axes[0]
    bars = [bar.get_segments()[0] for bar in axes.collections if hasattr(bar, "get_segments")]
    assert [high[1] - low[1] for low, high in bars] == pytest.approx([0.02] * 3)


def test_bases_comparison_has_three_panels() -> None:
    rows = [
        {
            "layer": layer,
            "method": method,
            "seed": 0,
            "attention_output_error": layer + 0.1,
            "layer_output_error": layer + 0.2,
            "cosine_similarity": 1 - layer / 10,
        }
        for layer, method in product(range(3), ("eigen-attention", "layer-output"))
    ]
    figure = bases_comparison(pd.DataFrame(rows), title="tiny")
    assert len(figure.axes) == 3
    assert lines(figure, 1)["EigenAttention"].get_ydata().tolist() == [0.2, 1.2, 2.2]
    assert lines(figure, 2)["StiefAttention"].get_ydata().tolist() == [1, 0.9, 0.8]


def test_rank_profile_averages_budgets() -> None:
    rows = [
        {"layer": layer, "site": site, "rank_ratio": ratio, "requested_ratio": ratio}
        for layer, site, ratio in product(range(2), ("key", "value"), (0.5, 0.9))
    ]
    figure = rank_profile(pd.DataFrame(rows), title="tiny")
    assert lines(figure)["keys"].get_ydata().tolist() == pytest.approx([0.7, 0.7])


def test_table_has_a_row_per_ratio_and_a_column_per_measure(evaluations) -> None:
    table = table_of_results(sequential(evaluations))
    assert list(table.columns[:4]) == ["model", "method", "requested_ratio", "ratio"]
    names = [name for names in MEASURES.values() for name in names]
    assert list(table.columns[4:]) == [c for name in names for c in (name, f"{name} SE")]
    assert len(table) == 1 + 3 * 2
    row = table[(table["method"] == "mine") & (table["requested_ratio"] == 0.5)].iloc[0]
    assert row["docstrings"] == pytest.approx(10.5 + 4 / 0.5)
    assert row["ratio"] == pytest.approx(0.48)  # of seeds that achieve 0.475 and 0.485
    assert table[table["method"] == "uncompressed"]["mmlu"].tolist() == [10]


def test_titles_and_legends_fit_a_single_panel(evaluations) -> None:
    one_task = sequential(evaluations)
    one_task = one_task[one_task["of"] == "mmlu"]
    figure = accuracy(one_task, title="a model: " + "a cap of the protocol; " * 12)
    FigureCanvasAgg(figure).draw()
    width, height = figure.bbox.size
    assert figure._suptitle is not None
    for part in (figure._suptitle, *figure.legends):
        box = part.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= width
        assert 0 <= box.y0 < box.y1 <= height
