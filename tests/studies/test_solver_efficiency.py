"""solver_efficiency as a user runs it, on few tokens."""

import pandas as pd
import pytest
from solver_efficiency import at_equal_error, relative

from tests.drawings import assert_written, lines_of
from tests.studies.running import Done, finished


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return finished(
        *("solver_efficiency", "--text", "pydoc-topics", "--layers", 1, "--sequences", 8),
        *("--held-out", 2, "--sequence-length", 128, "--epochs", 2, 3, "--budgets", 5, 20),
        *("--out", tmp_path_factory.mktemp("solver_efficiency")),
    )


def test_every_run_is_counted(done: Done) -> None:
    results = done.table()
    assert len(results) == 2 * 4
    counted = results.set_index(["site", "solver", "size"])["layer_tokens"]
    assert counted["key", "predictor", 3] == counted["value", "predictor", 3] == 3 * 8 * 128
    assert counted["key", "riemannian-adam", 20] == 20 * 4 * 64
    assert (results["held_out_error"] > 0).all()


ROWS = [
    # site, solver, size, seconds, layer-tokens, held-out error
    ("key", "predictor", 12, 10.0, 1000, 0.100),
    ("key", "predictor", 50, 40.0, 4000, 0.101),  # more epochs are no better here
    ("key", "riemannian-adam", 5, 0.5, 100, 0.110),
    ("key", "riemannian-adam", 9, 2.0, 200, 0.099),
    ("value", "predictor", 12, 1.0, 100, 0.200),
    ("value", "riemannian-adam", 5, 1.0, 10, 0.201),
]
COLUMNS = ["site", "solver", "size", "seconds", "layer_tokens", "held_out_error"]


def test_solvers_are_compared_at_equal_error() -> None:
    runs = relative(pd.DataFrame(ROWS, columns=COLUMNS).assign(layer=0))
    strict = at_equal_error(runs, 0.0)
    assert strict.index.to_list() == [(0, "key")]  # values never reach it
    assert strict["times_faster"].tolist() == [5.0]  # 10 s, not the 40 of most epochs, by 2 s
    assert strict["times_fewer"].tolist() == [5.0]
    loose = at_equal_error(runs, 0.01)
    assert loose["times_faster"].tolist() == [5.0, 1.0]
    assert at_equal_error(runs, -0.5).empty


def test_the_figure_shows_the_table(done: Done) -> None:
    panels = done.figures["error_against_seconds"].axes
    results = done.table()
    for axes, site in zip(panels, ("key", "value"), strict=True):
        assert axes.get_title() == f"{site}s"
        of_site = results[results["site"] == site]
        best = of_site.loc[of_site["solver"] == "predictor", "held_out_error"].min()
        drawn = lines_of(axes)
        for solver in ("predictor", "riemannian-adam"):
            rows = of_site[of_site["solver"] == solver].sort_values("size")
            error = 100 * (rows["held_out_error"] / best - 1)
            expected = zip(rows["seconds"], error, strict=True)
            assert drawn[solver] == [pytest.approx(point, abs=1e-9) for point in expected]
    assert_written(done.folder / "error_against_seconds")


def test_the_summary_names_the_command(done: Done) -> None:
    assert "Command: `python studies/solver_efficiency.py" in done.text()
    assert " of 2 |" in done.text()  # problems in which both solvers reach a tolerance
