"""The verdict and the figure say what is in their tables."""

from itertools import product
from math import nan

import pandas as pd
import pytest
from reports.objectives import best_errors, in_words, in_words_coded, overview, verdict

from manifoldkv.evaluate.diagnostics.figures import save_figure
from tests.drawings import assert_written, lines_of

ERRORS = {"k-svd": 0.4, "eigen-attention": 0.5, "layer-output": 0.2, "mine": 0.3}


@pytest.fixture
def results():
    names = ["layer", "site", "objective", "solver", "rank", "seed"]
    solvers = ("predictor", "riemannian-adam")
    cells = product(range(3), ("key", "value", "both"), ERRORS, solvers, (8, 16, 24), (0, 1))
    frame = pd.DataFrame(cells, columns=names)
    error = frame["objective"].map(ERRORS) * 16 / frame["rank"] + 0.01 * frame["seed"]
    error += 0.1 * (frame["solver"] == "predictor") + (frame["site"] != "both")
    return frame.assign(
        model="tiny",
        key_grouping="shared",
        value_grouping=1,
        rank_ratio=frame["rank"] / 32,
        layer_output_error=error,
    )


@pytest.fixture
def coded():
    losses = [("k-svd", 0.3), ("eigen-attention", nan), ("layer-output", 0.2), ("mine", 0.1)]
    frame = pd.DataFrame(losses, columns=["objective", "added_nll"])
    return frame.assign(nll_error=frame["added_nll"] / 10, sequences=16, reason="")


def test_errors_are_of_both_sites_by_the_best_solver(results):
    errors, solvers = best_errors(results)
    assert list(errors.index) == ["layer-output", "mine", "k-svd", "eigen-attention"]
    assert errors.loc["mine"].tolist() == pytest.approx([0.605, 0.305, 0.205])
    assert set(solvers.values()) == {"riemannian-adam"}


def test_bases_of_another_sharing_are_left_out(results):
    alone = results[results["objective"] == "k-svd"].assign(key_grouping="1", layer_output_error=0)
    errors, _ = best_errors(pd.concat([results, alone]))
    assert errors.index[0] == "layer-output"


def test_the_verdict_in_words(results, coded):
    table, first, second = verdict(results, coded)[:-3], *verdict(results, coded)[-2:]
    assert table[2] == "| layer-output | riemannian-adam | 0.4050 | 0.2050 | 0.1383 | {} |".format(
        "0.2000 ± 0.0200"
    )
    assert table[-1].endswith("| - |")  # eigen-attention has no metric
    assert first == (
        "At half the rank layer-output has the least error at the layer's output (0.205), mine "
        "next (0.305); eigen-attention 0.505."
    )
    assert second == (
        "Coded at an eighth of the bytes, mine adds 0.1000 ± 0.0100 nats per token, layer-output "
        "0.2000 ± 0.0200, k-svd 0.3000 ± 0.0300 (± the standard error over 16 sequences)."
    )


def test_a_verdict_of_little(results, coded):
    one = results[(results["objective"] == "mine") & (results["rank"] == 24)]
    assert in_words(best_errors(one)[0]) == (
        "At 0.75 of the rank mine has the least error at the layer's output (0.205)."
    )
    without = coded[coded["objective"] == "eigen-attention"]
    assert "No objective has a metric" in in_words_coded(without)
    many = [results.assign(objective=results["objective"] + f"-{x}") for x in range(3)]
    more = [coded.assign(objective=coded["objective"] + f"-{x}") for x in range(3)]
    assert len(verdict(pd.concat(many), pd.concat(more))) == 2 + 8 + 3


def test_ranks_are_beside_coded_losses(results, coded):
    ranks, losses = overview(results, coded).axes
    drawn = lines_of(ranks)
    assert [x for x, _ in drawn["mine"]] == [0.25, 0.5, 0.75]
    assert drawn["mine"][1][1] == pytest.approx(100 * (0.305 / 0.505 - 1))
    assert {y for _, y in drawn["eigen-attention"]} == {0}
    names = [label.get_text() for label in losses.get_xticklabels()]
    assert names == ["mine", "layer-output", "k-svd"]
    heights = [line.get_ydata()[0] for line in losses.get_lines() if line.get_marker() in "v^X"]
    assert heights == pytest.approx([0.1, 0.2, 0.3])


def test_losses_that_were_not_measured_have_no_panel(results, coded):
    alone = overview(results, None)
    assert len(alone.axes) == 1
    assert len(alone.get_suptitle().splitlines()) <= 2
    assert len(overview(results, coded.assign(added_nll=nan)).axes) == 1


def test_equal_tables_give_equal_files(results, coded, tmp_path):
    for stem in ("first", "second"):
        save_figure(overview(results, coded), tmp_path / stem)
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()
    assert_written(tmp_path / "first")
