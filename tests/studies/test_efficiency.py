"""Error against solving time, in compare_objectives --full."""

import math

import common
import efficiency
import pandas as pd
import pytest
from reports.efficiency import at_equal_error, curves, nested_against_separate

from tests.drawings import assert_written, lines_of
from tests.studies.running import Done, finished

SIZES = {
    "predictor": ("epochs", (2, 3)),
    "riemannian-l-bfgs": ("steps", (4, 8)),
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(efficiency, "SIZES", SIZES)
        patch.setattr(efficiency, "SEQUENCES", {"calibration": 8, "held-out": 2})
        patch.setattr(efficiency, "LENGTH", 128)
        patch.setattr(efficiency, "RATIOS", (0.5, 0.75))
        return finished(
            *("compare_objectives", "--full", "--text", "pydoc-topics", "--layers", 1),
            *("--objectives", "layer-output", "--solvers", *SIZES, "flag"),
            *("--seeds", 0, "--rank-ratios", 0.5, 0.75, "--sequences", 2),
            *("--sequence-length", 32, "--epochs", 2, "--steps", 5),
            *("--out", tmp_path_factory.mktemp("efficiency")),
        )


def test_every_run_is_counted(done: Done) -> None:
    results = done.table("efficiency")
    assert len(results) == 2 * (2 * 2 + 2 * 2)  # sites, runs of growing size, ranks of two
    counted = results.set_index(["site", "solver", "size", "rank"])["layer_tokens"]
    for site in ("key", "value"):
        assert counted[site, "predictor", 3, 16] == 3 * 8 * 128
        assert counted[site, "riemannian-l-bfgs", 8, 16] >= (1 + 8) * 256  # descent, stream
        assert counted[site, "flag", 0, 16] == counted[site, "flag", 0, 24]
    assert (results["held_out_error"] > 0).all()


ROWS = [
    # site, solver, size, rank, seconds, held-out error
    ("key", "predictor", 12, 16, 10.0, 0.100),
    ("key", "predictor", 25, 16, 40.0, 0.101),  # more epochs are no better here
    ("key", "riemannian-adam", 75, 16, 0.5, 0.110),
    ("key", "riemannian-adam", 150, 16, 2.0, 0.099),
    ("value", "predictor", 12, 16, 1.0, 0.200),
    ("value", "riemannian-adam", 75, 16, 1.0, 0.201),
    ("key", "riemannian-adam", 0, 16, 2.0, 0.100),
    ("key", "riemannian-adam", 0, 24, 4.0, 0.050),
    ("key", "flag", 0, 16, 3.0, 0.101),
    ("key", "flag", 0, 24, 3.0, 0.050),
]
COLUMNS = ["site", "solver", "size", "rank", "seconds", "held_out_error"]
RESULTS = pd.DataFrame(ROWS, columns=COLUMNS).assign(layer=0)


def test_solvers_are_compared_at_equal_error() -> None:
    runs = curves(RESULTS)
    strict = at_equal_error(runs, "riemannian-adam", 0.0)
    assert strict[0, "key"] == 5.0  # 10 s, not the 40 of most epochs, by 2 s
    assert math.isnan(strict[0, "value"])  # never reached
    loose = at_equal_error(runs, "riemannian-adam", 0.01)
    assert loose.to_list() == [5.0, 1.0]
    assert at_equal_error(runs, "riemannian-adam", -0.5).empty


def test_nested_bases_are_compared_with_all_separate_solves() -> None:
    compared = nested_against_separate(RESULTS).set_index("rank")
    assert compared["times_sooner"].to_list() == [2.0, 2.0]
    assert compared["error"].to_list() == pytest.approx([0.01, 0.0])


def test_the_figure_shows_the_table(done: Done) -> None:
    results = done.table("efficiency")
    for axes, site in zip(done.figures["error_against_seconds"].axes, SITES, strict=True):
        assert axes.get_title() == f"{site}s"
        of_site = results[(results["site"] == site) & (results["size"] > 0)]
        best = of_site.loc[of_site["solver"] == "predictor", "held_out_error"].min()
        drawn = {name.split(" ")[0]: line for name, line in lines_of(axes).items()}
        for solver in SIZES:
            rows = of_site[of_site["solver"] == solver].sort_values("size")
            error = 100 * (rows["held_out_error"] / best - 1)
            expected = zip(rows["seconds"], error, strict=True)
            assert drawn[solver] == [pytest.approx(point, abs=1e-9) for point in expected]
    assert_written(done.folder / "error_against_seconds")


SITES = ("key", "value")


def test_the_summary_has_the_tables(done: Done) -> None:
    for text in (
        "## Solving times",
        "8 calibration sequences of 128 tokens",
        "| riemannian-l-bfgs |",
        " of 2 |",  # problems in which a solver reaches a tolerance
        "Nested bases of ranks 16, 24 by one solve",
    ):
        assert text in done.text()


def test_both_tables_are_drawn_again(done: Done) -> None:
    (done.folder / "error_against_seconds.png").unlink()
    finished("compare_objectives", "--redraw", "--out", done.folder)
    assert_written(done.folder / "error_against_seconds")


def test_the_committed_figure_is_of_all_layers() -> None:
    folder = common.FIGURES / "compare_objectives" / "reference-llama"
    results = pd.read_csv(folder / "efficiency.csv")
    assert set(results["layer"]) == set(range(6))
    assert set(results["solver"]) == {*efficiency.SIZES, *efficiency.NESTED}
