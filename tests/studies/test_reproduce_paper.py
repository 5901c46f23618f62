"""reproduce_paper as a user runs it, small."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import reproduce_paper
from paper import measurements, plans
from paper.accuracy import zero_shot
from paper.search import ReleaseSearch
from transformers import PreTrainedModel

from manifoldkv.diagnostics import LayerErrors
from manifoldkv.evaluation import Perplexity
from manifoldkv.runs import checkpoints
from manifoldkv.solvers import SOLVERS, ObliqueFlag, Predictor
from tests.drawings import assert_points_in_every_panel, assert_written
from tests.studies.running import Done, finished, run_here

STEMS = ("accuracy", "ppl", "quantization", "bases_comparison", "policy_uniform", "ranks")


QUICK = ("reproduce_paper", "--quick", "--model", "reference-qwen3", "--out")
METHODS = {"layer-output", "eigen-attention", "grouped kq-svd"}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return finished(*QUICK, tmp_path_factory.mktemp("paper"))


def write_tasks(folder: Path) -> None:
    choices = {"choices": ["one two", "three", "four", "five"], "gold": 1, "answer": 2}
    for file in ("hellaswag/validation.jsonl", "piqa/validation.jsonl", "mmlu/test.jsonl"):
        documents = [
            choices | {"query": f"item {i} is", "question": f"item {i}?", "subject": "sets"}
            for i in range(20)
        ]
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text("\n".join(map(json.dumps, documents)))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, set[str]]:
    """The protocol for real models, made small, and the data types it measured in."""
    small = {"sequences": 4, "length": 96, "window": 128, "epochs": 1, "windows": 3}
    small |= {"second_windows": 3, "items": 4, "mmlu_items": 2, "descent": ObliqueFlag(steps=3)}
    small |= {"ratios": (0.8, 0.5), "candidates": (0.25, 0.5, 1.0), "error_budgets": (0.05, 0.3)}
    protocol = replace(reproduce_paper.PROTOCOLS["real"], **small)
    folder, dtypes = tmp_path_factory.mktemp("real"), set()
    write_tasks(folder / "tasks")
    measure = measurements.perplexity

    def watched(model: PreTrainedModel, *rest: object) -> Perplexity:
        dtypes.add(str(model.dtype))
        return measure(model, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(reproduce_paper.PROTOCOLS, "real", protocol)
        patch.setattr(measurements, "perplexity", watched)
        done = finished(
            *("reproduce_paper", "--protocol", "real", "--model", "reference-qwen3"),
            *("--tasks-data", folder / "tasks", "--out", folder),
        )
    return done, dtypes


def test_the_protocol_for_real_models_compares_the_predictor_with_another_solver(
    real: tuple[Done, set[str]],
) -> None:
    done, _ = real
    errors = done.table("solvers_qwen")
    by_problem = errors.groupby(["layer", "site"])["solver"].apply(set)
    assert len(by_problem) == 3 * 2
    assert all(x == {"EigenAttention", "oblique-flag", "predictor"} for x in by_problem)
    assert (errors["layer_output_error"] > 0).all()
    seconds = errors[errors["solver"] == "predictor"]["seconds"].mean()
    layers = 1 + errors["layer"].max()
    text = done.text("captions.md")
    assert f"{seconds * 2 * layers * 2 / 3600:.2f} hours" in text.split("predictor 0.")[1]
    assert "tolerance 0.1, steps 3, step_size 0.8" in text


def test_real_models_are_measured_in_sixteen_bits(real: tuple[Done, set[str]]) -> None:
    done, dtypes = real
    assert dtypes == {"torch.bfloat16"}
    assert "perplexities and accuracies in bfloat16" in done.text("captions.md")


def test_tasks_are_measured_on_the_plans_nearest_to_a_ratio(real: tuple[Done, set[str]]) -> None:
    done, _ = real
    accuracy, compared = done.table("accuracy_qwen"), done.table("ppl_qwen")
    accuracy = accuracy[accuracy["measure"] == "accuracy"]
    compared = compared[compared["measure"] == "perplexity"]
    for method in METHODS:
        ratios = compared[compared["method"] == method]["ratio"]
        (chosen,) = set(accuracy[accuracy["method"] == method]["ratio"])
        assert abs(chosen - 0.5) == (ratios - 0.5).abs().min()
        assert len(set(ratios)) > 1
    lines = done.text("steps/qwen/mmlu/test.jsonl").splitlines()  # spread over the file
    assert [json.loads(line)["question"] for line in lines] == ["item 0?", "item 10?"]


def test_the_optimal_rule_is_left_out_where_it_takes_hours(real: tuple[Done, set[str]]) -> None:
    done, _ = real
    assert set(done.table("table3")["ranks"]) == {"sequential", "uniform"}
    assert set(done.table("table2")["bases"]) == METHODS
    text = done.text("captions.md")
    assert "no optimal rule" in text
    assert "grouped kq-svd by the sequential rule for the paper's bases" in text


def test_every_step_is_timed(real: tuple[Done, set[str]]) -> None:
    seconds = real[0].table("seconds_qwen").set_index("step")
    assert (seconds["seconds"] > 0).all()
    assert seconds.loc["accuracy", "times"] == 4  # three methods and the uncompressed model
    assert seconds.loc["EigenAttention's search", "times"] == 1
    assert seconds.loc["plans of layer-output", "times"] == 5  # two rules, two ratios, d / 2


@pytest.mark.parametrize("stem", STEMS)
def test_every_figure_has_its_csv(quick: Done, stem: str) -> None:
    """Their lines are tested in `tests/diagnostics/test_paper_figures.py`."""
    label = f"{stem}_qwen"
    assert len(quick.table(label)) > 2
    assert_points_in_every_panel(quick.figures[label])
    assert_written(quick.folder / label)
    assert f"`{label}`" in quick.text("captions.md")


def test_plans_stay_within_their_ratio(quick: Done) -> None:
    frame = quick.table("ppl_qwen").dropna(subset=["requested_ratio"])
    assert len(frame)
    assert (frame["ratio"] <= frame["requested_ratio"] + 1e-9).all()


def test_the_papers_numbers_stand_beside_ours_and_are_marked(quick: Done) -> None:
    table = quick.table("table1")
    theirs = table[table["method"].str.contains("the paper's number")]
    assert set(theirs["model"]) == {"Llama3-8B", "Qwen3-8B"}
    assert theirs["WikiText"].notna().all()
    ours = table.drop(theirs.index)
    assert set(ours["model"]) == {"qwen"}
    assert ours["WikiText"].isna().all()
    surfaces = "surfaces of the sequential and the threshold rule on 4 sequences × 64 query rows"
    for text in ("predictor capped at 1 epochs", surfaces):
        assert text in quick.text("table1.md")
    for text in ("EigenAttention's search on 4", "on 4 and 4 held-out windows of 96 tokens"):
        assert text in quick.text("captions.md")
    assert r"\begin{tabular}" in quick.text("table1.tex")


def test_bases_and_rank_rules_are_compared_one_at_a_time(quick: Done) -> None:
    bases, rules = quick.table("table2"), quick.table("table3")
    assert set(bases["bases"]) == METHODS
    for ratio in ("ratio 0.8", "ratio 0.5"):  # in brackets, the achieved ratio: the same ranks
        achieved = bases[ratio].str.extract(r"\((.*)\)")[0]
        assert len(set(zip(bases["model"], achieved, strict=True))) == 1
        kept = rules[ratio].str.extract(r"\((.*)\)")[0].astype(float)
        assert (kept <= float(ratio.split()[1])).all()
    assert set(rules["ranks"]) == {"uniform", "sequential", "threshold", "optimal"}
    assert set(rules["bases"]) == {"layer-output", "eigen-attention"}


def test_rounding_is_drawn_as_in_the_paper_and_with_rotation(quick: Done) -> None:
    frame = quick.table("quantization_qwen")
    bits = frame.groupby(["method", "rotation"])["bits"].apply(set).to_dict()
    for method in ("eigen-attention", "layer-output"):
        assert bits[method, "none"] == {16, 8, 4, 3, 2}
        assert bits[method, "hadamard"] == {8, 4, 3, 2}


def test_the_papers_protocol_caps_nothing_but_what_it_says() -> None:
    paper = reproduce_paper.PROTOCOLS["paper"]
    assert paper.windows is paper.surface_sequences is paper.surface_rows is None
    assert paper.search_sequences is paper.items is None
    assert (paper.sequences, paper.length, paper.epochs) == (512, 2048, 50)
    text = paper.caption(2048, [140, 256])
    assert "on all 512 sequences, EigenAttention's search on all 512" in text
    assert "140 and 256 held-out windows" in text


def failing(message: str) -> Callable[..., None]:
    def fail(*ignored: object, **also_ignored: object) -> None:
        raise reproduce_paper.ManifoldKVError(message)

    return fail


def test_accuracy_is_measured_before_anything_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurements, "zero_shot", failing("the harness does not work"))
    monkeypatch.setattr(plans, "compress", None)
    done = run_here("reproduce_paper", "--quick", "--out", tmp_path)
    assert done.code == 2
    assert "the harness does not work" in done.last_line


@pytest.mark.parametrize("name", ["oblique-flag", "riemannian-adam", "predictor"])
def test_the_solver_of_the_papers_bases_is_taken_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def study(*parts: Any) -> None:
        seen.append(parts[3])
        raise reproduce_paper.ManifoldKVError("seen")

    monkeypatch.setattr(reproduce_paper, "Study", study)
    run_here("reproduce_paper", "--quick", "--solver", name, "--out", tmp_path)
    assert SOLVERS.describe(seen[0].solver)["name"] == name
    said = seen[0].caption(96, [4, 4])
    assert (f"the paper's bases by {name} in" in said) == (name != "predictor")
    assert "steps " in said or "capped at 1 epochs" in said


def test_another_model_than_the_papers_is_reported() -> None:
    assert reproduce_paper.mismatches("Llama3-8B", {"WikiText": 6.2, "C4": 9.5}) == []
    (line,) = reproduce_paper.mismatches("Llama3-8B", {"WikiText": 6.2, "C4": 12.0})
    assert "12.00 on C4" in line
    assert "the paper's row says 9.60" in line


def test_a_repeated_run_measures_nothing_and_draws_the_same(
    quick: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in quick.folder.iterdir() if path.is_file()}
    again = failing("measured again")
    for name in ("perplexity", "zero_shot"):
        monkeypatch.setattr(measurements, name, again)
    monkeypatch.setattr(reproduce_paper, "diagnose", again)
    monkeypatch.setattr(Predictor, "solve", again)
    finished(*QUICK, quick.folder)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("changed", [ReleaseSearch, Perplexity, zero_shot, LayerErrors])
def test_results_of_other_code_are_measured_again(
    changed: type, quick: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = checkpoints.digest_of_code

    @wraps(stock)  # or the digest would see this function where that one was
    def edited(*parts: type) -> str:
        return "edited" if changed in parts else stock(*parts)

    monkeypatch.setattr(checkpoints, "digest_of_code", edited)
    monkeypatch.setattr(measurements, "zero_shot", failing("measured again"))
    done = run_here(*QUICK, quick.folder)
    assert done.code == 2
    assert "measured again" in done.last_line


def test_a_quick_run_says_so_in_every_title_and_caption(quick: Done) -> None:
    assert set(quick.figures) == {f"{stem}_qwen" for stem in STEMS}
    for figure in quick.figures.values():
        assert "quick" in figure.get_suptitle()
    for page in ("captions.md", "table1.md", "table2.md", "table3.md"):
        assert "qwen, quick run (reference-qwen3)" in quick.text(page)


def test_a_run_announces_every_stage(quick: Done, real: tuple[Done, set[str]]) -> None:
    for done, protocol in ((quick, "quick"), (real[0], "real")):
        stages = [line for line in done.out.splitlines() if line.startswith("stage ")]
        last = 6 + 2 + (protocol == "real")
        assert [line.partition(":")[0] for line in stages] == [
            f"stage {n} of {last}" for n in range(1, last + 1)
        ]
    assert "error surfaces" in stages[2]
