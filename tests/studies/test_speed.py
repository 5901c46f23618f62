"""`benchmark.py speed` as a user runs it, on few tokens."""

from pathlib import Path

import pandas as pd
import pytest
from measurements import random_model, shapes
from measurements.speed import lengths_of
from reports import frontier, speed

from tests.drawings import assert_written, points
from tests.studies.running import Done, finished

MEASURED = ("--tokens", 20, 40, "--batch", 2, "--rounds", 1)
KINDS = [("decode", 20, 1), ("decode", 40, 1), ("batch", 20, 2), ("prefill", 20, 1)]
METHODS = ("eigen-attention", "integers")
SHAPES = {"KV_HEADS": 2, "QUERY_HEADS": 4, "HEAD_DIM": 16, "FEATURES": 32, "PACKS": 3}


def of_methods(folder: Path) -> Done:
    return finished(
        *("benchmark", "speed", "--text", "pydoc-topics", "--sequences", 3),
        *("--sequence-length", 64, "--window", 128, "--ratios", 0.5, *MEASURED),
        *("--methods", *METHODS, "--out", folder),
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return of_methods(tmp_path_factory.mktemp("speed"))


def test_a_row_for_each_plan_and_measurement(done: Done) -> None:
    results = done.table()
    for _, part in results.groupby(["composition", "requested_ratio"]):
        assert list(part[speed.KINDS].itertuples(index=False, name=None)) == KINDS
    assert set(results["composition"]) == set(METHODS)
    times = results[["stock_seconds", "compressed_seconds", "time_ratio", "work"]]
    assert (times > 0).all(axis=None)
    assert (results["threads"] == 1).all()
    assert results["versions"].str.contains("torch").all()
    decoded = results[results["measurement"] != "prefill"]
    bytes_of_float32 = decoded["compressed_bytes"] / decoded["stock_bytes"]
    halves = decoded["composition"] == "eigen-attention"
    assert bytes_of_float32[halves].tolist() == pytest.approx([0.5] * halves.sum())
    assert results["ratio"][results["composition"] == "eigen-attention"].eq(0.5).all()
    assert decoded["compressed_working_share"].notna().all()


def test_the_figure_shows_the_table(done: Done) -> None:
    results = done.table()
    (axes,) = done.figures["time_against_work"].axes
    drawn = {line.get_label(): points(line) for line in axes.get_lines()}
    for kind in KINDS:
        rows = speed.rows_of(results, kind)
        expected = rows[["work", "time_ratio"]].itertuples(index=False, name=None)
        assert drawn[speed.title(*kind)] == [pytest.approx(pair) for pair in expected]
    assert "stock cache" in drawn
    title = done.figures["time_against_work"].get_suptitle()
    assert "reference-llama" in title
    assert "1 round, 1 thread" in title.replace("\n", " ")
    assert_written(done.folder / "time_against_work")
    assert "| plan | times smaller | work | step after 20 |" in done.text()


def test_a_repeated_run_measures_nothing_again(done: Done) -> None:
    before = done.text("results.csv")
    assert of_methods(done.folder).text("results.csv") == before


def test_saved_plans_are_timed_without_a_text(done: Done, tmp_path: Path) -> None:
    folders = sorted((done.folder / "steps" / "plans").glob("integers-*"))
    again = finished(
        *("benchmark", "speed", "--text", "no-such-text", "--tokens", 5, "--rounds", 1),
        *("--batch", 1, "--plans", *folders, "--out", tmp_path),
    ).table()
    assert list(dict.fromkeys(again["composition"])) == [folder.name for folder in folders]
    works = done.table().query("composition == 'integers'")["work"]
    assert sorted(set(again["work"])) == sorted(set(works))


def test_prompts_are_no_longer_than_the_model_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert lengths_of([8, 2000, 9, 8000], 1008) == [8, 1008, 9]
    assert "2,000 tokens are cut to 1,008: the model takes no more" in capsys.readouterr().err


@pytest.fixture
def one_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Done:
    for name, value in SHAPES.items():
        monkeypatch.setattr(random_model, name, value)
    plans = {"bands of 1": (1, False, False), "bands of 4": (4, True, True)}
    monkeypatch.setattr(random_model, "PLANS", plans)
    return finished("benchmark", "speed", "--shapes", 50, "--rounds", 2, "--out", tmp_path)


def test_parts_of_one_layer_add_up_to_its_step(one_layer: Done) -> None:
    results = one_layer.table("shapes")
    stock, bands = ["stock bfloat16", "stock float32"], ["bands of 1", "bands of 4"]
    caches = [f"{name}{way}" for name in stock for way in ("", ", grouped")] + bands
    assert list(dict.fromkeys(results["cache"])) == caches
    parts = results.pivot_table("seconds", "cache", "part")
    assert (parts[["bytes over bandwidth", "multiplications over peak"]] > 0).all(axis=None)
    assert (parts["attention"].drop(bands) > 0).all()
    ways = results.groupby("cache")["way"].first()
    assert set(ways[stock]) <= {"enable_gqa", "repeated heads"}
    assert (parts.loc[bands, ["unpacking", "softmax", "new token"]] > 0).all(axis=None)
    works = results.groupby("cache")["work"].first()
    assert works["stock bfloat16"] == 1 < works["bands of 1"] < works["bands of 4"]

    (axes,) = one_layer.figures["parts_of_a_step"].axes
    shown = {label: bars for bars in axes.containers for label in [bars.get_label()]}
    heights = [bar.get_height() for bar in shown["unpacking"]][-2:]
    assert heights == pytest.approx(list(1e3 * parts.loc[bands, "unpacking"]))
    assert_written(one_layer.folder / "parts_of_a_step")
    assert "1 sequence of 50 tokens" in one_layer.text()
    redrawn = finished("benchmark", "speed", "--redraw", "--out", one_layer.folder)
    assert set(redrawn.figures) == {"parts_of_a_step"}


def test_a_random_model_is_timed_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SHAPES.items():
        monkeypatch.setattr(random_model, name, value)
    for name in ("INTERMEDIATE", "VOCABULARY", "POSITIONS"):
        monkeypatch.setattr(random_model, name, 64)
    done = finished(
        *("benchmark", "speed", "--random", 2, "--tokens", 20, "--batch", 2, "--rounds", 1),
        *("--out", tmp_path),
    )
    results = done.table()
    assert set(results["composition"]) == {random_model.PLAN}
    assert set(results["measurement"]) == {"decode", "batch", "prefill"}
    assert "a random model of 2 layers" in done.text()


def test_parts_are_differences_of_steps() -> None:
    steps = {"step": 100.0, "new token": 3.0, "scores": 50.0, "keys only": 30.0, "softmax": 5.0}
    steps |= {"key latents only": 10.0, "mixture": 25.0, "mixed latents only": 8.0}
    assert shapes.parts_of(steps) == {
        "unpacking": 18,
        "rebuilding keys": 20,
        "rotating and scoring": 20,
        "softmax": 5,
        "mixing": 17,
        "new token": 3,
        "rest": 17,
    }
    assert shapes.parts_of({"step": 2.0, "new token": 1.0}) == {"attention": 2}
    on_gpu = {"step": 9.0, "new token": 1.0, "scores": 4.0, "softmax": 0.5, "mixture": 3.0}
    assert shapes.parts_of(on_gpu) == {
        "scores of keys": 4,
        "softmax": 0.5,
        "mixing": 3,
        "new token": 1,
        "rest": 0.5,
    }


@pytest.mark.parametrize(
    ("band", "predicts", "trellis"), [(1, False, False), (8, True, False), (1, True, True)]
)
def test_the_plan_of_one_layer_has_the_shapes_of_a_model(
    band: int, predicts: bool, trellis: bool
) -> None:
    plan = random_model.layer_plan(band, predicts, trellis, 32768)
    assert plan.ratio == pytest.approx(1 / 8, rel=0.02)
    latents = plan.layers[0].key.latents
    assert latents == plan.layers[0].value.latents == 600
    rebuilt = latents * (1 + 16 * band)  # scales, and both features of a band in every head
    rotated, scored = 2 * 128 * 8, 32 * 128
    mixed = 32 * (latents + 1) * (1 + predicts)
    assert plan.compute == (rebuilt + rotated + scored + mixed) / (2 * scored)


def test_losses_against_work_are_drawn_where_work_was_limited() -> None:
    rows = [("work-4", 3.9, 0.02), ("work-8", 7.5, 0.01), ("best", 60.0, 0.005)]
    frame = pd.DataFrame(rows, columns=["composition", "attention_work", "added_nll"])
    frame = pd.concat([frame.assign(requested_ratio=ratio) for ratio in (0.25, 0.125)])
    frame = frame.assign(kind="text", measured_on="a", nll_error=0.001, model="tiny")
    frame = frame.assign(items=2, window=64)
    figure = frontier.draw(frame)["loss_against_work"]
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.containers] == ["4 times smaller", "8 times smaller"]
    expected = [pytest.approx(row[1:]) for row in rows]
    assert all(points(line.lines[0]) == expected for line in axes.containers)
    assert not frontier.draw(frame[frame["composition"] == "best"])
