"""reproduce_paper as a user runs it, small."""

import json
from dataclasses import replace
from functools import wraps
from pathlib import Path

import pandas as pd
import pytest
import reproduce_paper
from paper import measurements, plans
from paper.search import ReleaseSearch
from transformers import PreTrainedModel

from manifoldkv.diagnostics import LayerErrors
from manifoldkv.evaluation import Perplexity
from manifoldkv.evaluation.zero_shot import ManifoldKVLM
from manifoldkv.runs import checkpoints
from manifoldkv.solvers import Predictor, RiemannianAdam
from tests.drawings import assert_points_in_every_panel, assert_written
from tests.studies.running import Done, run_here

STEMS = ("accuracy", "ppl", "quantization", "bases_comparison", "policy_uniform", "ranks")


def study(*arguments: object) -> Done:
    return run_here("reproduce_paper", *arguments)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    folder = tmp_path_factory.mktemp("paper")
    done = study("--quick", "--model", "reference-qwen3", "--out", folder)
    assert done.code == 0, done.err[-3000:]
    return folder, done


@pytest.fixture(scope="module")
def out(run: tuple[Path, Done]) -> Path:
    return run[0]


@pytest.fixture(scope="module")
def tasks_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    choices = {"choices": ["one two", "three", "four", "five"], "gold": 1, "answer": 2}
    for file in ("hellaswag/validation.jsonl", "piqa/validation.jsonl", "mmlu/test.jsonl"):
        documents = [
            choices | {"query": f"item {i} is", "question": f"item {i}?", "subject": "sets"}
            for i in range(20)
        ]
        (folder / file).parent.mkdir()
        (folder / file).write_text("\n".join(map(json.dumps, documents)))
    return folder


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, tasks_data: Path) -> tuple[Path, set[str]]:
    """Return the folder of the protocol for real models, made small, and what was measured on."""
    small = {"sequences": 4, "length": 96, "window": 128, "epochs": 1, "windows": 3}
    small |= {"second_windows": 3, "items": 4, "mmlu_items": 2, "adam": RiemannianAdam(steps=3)}
    small |= {"ratios": (0.8, 0.5), "candidates": (0.25, 0.5, 1.0), "error_budgets": (0.05, 0.3)}
    protocol = replace(reproduce_paper.PROTOCOLS["real"], **small)
    folder, dtypes = tmp_path_factory.mktemp("real"), set()
    measure = measurements.perplexity

    def watched(model: PreTrainedModel, *rest: object) -> Perplexity:
        dtypes.add(str(model.dtype))
        return measure(model, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(reproduce_paper.PROTOCOLS, "real", protocol)
        patch.setattr(measurements, "perplexity", watched)
        done = study(
            *("--protocol", "real", "--model", "reference-qwen3", "--out", folder),
            *("--tasks-data", tasks_data),
        )
    assert done.code == 0, done.err[-3000:]
    return folder, dtypes


def test_the_protocol_for_real_models_sets_the_predictor_beside_another_solver(
    real: tuple[Path, set[str]],
) -> None:
    out, _ = real
    errors = pd.read_csv(out / "solvers_qwen.csv")
    assert set(errors["layer"]) == {0, 2, 5} or len(set(errors["layer"])) == 3
    counted = errors.groupby(["layer", "site"])["solver"].apply(set)
    assert len(counted) == 6
    assert all(found == {"EigenAttention", "Riemannian Adam", "predictor"} for found in counted)
    assert (errors["layer_output_error"] > 0).all()
    seconds = errors[errors["solver"] == "predictor"]["seconds"].mean()
    layers = 1 + errors["layer"].max()
    text = (out / "captions.md").read_text()
    assert f"{seconds * 2 * layers * 2 / 3600:.2f} hours" in text.split("predictor 0.")[1]
    assert "3 steps of 4 × 64 query rows" in text


def test_real_models_are_measured_in_sixteen_bits(real: tuple[Path, set[str]]) -> None:
    out, dtypes = real
    assert dtypes == {"torch.bfloat16"}
    assert "perplexities and accuracies in bfloat16" in (out / "captions.md").read_text()


def test_tasks_are_asked_of_the_plans_nearest_to_a_ratio(real: tuple[Path, set[str]]) -> None:
    out, _ = real
    frame = pd.read_csv(out / "ppl_qwen.csv")
    asked = pd.read_csv(out / "accuracy_qwen.csv")
    asked = asked[asked["measure"] == "accuracy"]
    compared = frame[frame["measure"] == "perplexity"]
    for method in ("eigen-attention", "layer-output", "grouped kq-svd"):
        distances = (compared[compared["method"] == method]["ratio"] - 0.5).abs()
        (chosen,) = set(asked[asked["method"] == method]["ratio"])
        assert abs(chosen - 0.5) == distances.min()
        assert len(set(compared[compared["method"] == method]["ratio"])) > 1


def test_where_the_optimal_rule_takes_hours_it_is_left_out(real: tuple[Path, set[str]]) -> None:
    out, _ = real
    rules, bases = pd.read_csv(out / "table3.csv"), pd.read_csv(out / "table2.csv")
    assert set(rules["ranks"]) == {"sequential", "uniform"}
    assert set(bases["bases"]) == {"layer-output", "eigen-attention", "grouped kq-svd"}
    text = (out / "captions.md").read_text()
    assert "no optimal rule" in text
    assert "grouped kq-svd by the sequential rule for the paper's bases" in text


def test_every_step_is_timed(real: tuple[Path, set[str]]) -> None:
    seconds = pd.read_csv(real[0] / "seconds_qwen.csv").set_index("step")
    assert (seconds["seconds"] > 0).all()
    assert seconds.loc["accuracy", "times"] == 4  # three methods and the uncompressed model
    assert seconds.loc["EigenAttention's search", "times"] == 1
    assert seconds.loc["plans of layer-output", "times"] == 5  # two rules, two ratios, d / 2


def test_documents_are_spread_over_the_file(real: tuple[Path, set[str]]) -> None:
    lines = (real[0] / "steps" / "qwen" / "mmlu" / "test.jsonl").read_text().splitlines()
    assert [json.loads(line)["question"] for line in lines] == ["item 0?", "item 10?"]


@pytest.mark.parametrize("stem", STEMS)
def test_every_figure_has_its_csv(run: tuple[Path, Done], stem: str) -> None:
    """What is on a figure is tested in `tests/diagnostics/test_paper_figures.py`."""
    out, done = run
    label = f"{stem}_qwen"
    assert len(pd.read_csv(out / f"{label}.csv")) > 2
    assert_points_in_every_panel(done.figures[label])
    assert_written(out / label)


def test_plans_stay_within_their_ratio(out: Path) -> None:
    frame = pd.read_csv(out / "ppl_qwen.csv").dropna(subset=["requested_ratio"])
    assert len(frame)
    assert (frame["ratio"] <= frame["requested_ratio"] + 1e-9).all()


def test_the_papers_numbers_stand_beside_ours_and_are_marked(out: Path) -> None:
    table = pd.read_csv(out / "table1.csv")
    theirs = table[table["method"].str.contains("the paper's number")]
    assert set(theirs["model"]) == {"Llama3-8B", "Qwen3-8B"}
    assert theirs["WikiText"].notna().all()
    ours = table.drop(theirs.index)
    assert set(ours["model"]) == {"qwen"}
    assert ours["WikiText"].isna().all()
    text = (out / "table1.md").read_text()
    assert "predictor capped at 1 epochs" in text
    assert (
        "surfaces of the sequential and the threshold rule on 4 sequences × 64 query rows" in text
    )
    assert r"\begin{tabular}" in (out / "table1.tex").read_text()


def test_bases_and_rank_rules_are_compared_one_at_a_time(out: Path) -> None:
    bases, rules = pd.read_csv(out / "table2.csv"), pd.read_csv(out / "table3.csv")
    assert set(bases["bases"]) == {"layer-output", "eigen-attention", "grouped kq-svd"}
    for ratio in ("ratio 0.8", "ratio 0.5"):  # in brackets, what is achieved: the same ranks
        achieved = bases[ratio].str.extract(r"\((.*)\)")[0]
        assert len(set(zip(bases["model"], achieved, strict=True))) == 1
        kept = rules[ratio].str.extract(r"\((.*)\)")[0].astype(float)
        assert (kept <= float(ratio.split()[1])).all()
    assert set(rules["ranks"]) == {"uniform", "sequential", "threshold", "optimal"}
    assert set(rules["bases"]) == {"layer-output", "eigen-attention"}


def test_rounding_is_drawn_as_the_paper_does_it_and_rotated_beside_it(out: Path) -> None:
    frame = pd.read_csv(out / "quantization_qwen.csv")
    counted = frame.groupby(["method", "rotation"])["bits"].apply(set).to_dict()
    for method in ("eigen-attention", "layer-output"):
        assert counted[method, "none"] == {16, 8, 4, 3, 2}
        assert counted[method, "hadamard"] == {8, 4, 3, 2}


def test_captions_say_how_much_was_measured(out: Path) -> None:
    text = (out / "captions.md").read_text()
    assert all(f"`{stem}_qwen`" in text for stem in STEMS)
    assert "EigenAttention's search on 4" in text
    assert "perplexity on 4 and 4 held-out windows of 96 tokens" in text


def test_the_papers_protocol_caps_nothing_but_what_it_says() -> None:
    paper = reproduce_paper.PROTOCOLS["paper"]
    assert paper.windows is paper.surface_sequences is paper.surface_rows is None
    assert paper.search_sequences is paper.items is None
    assert (paper.sequences, paper.length, paper.epochs) == (512, 2048, 50)
    text = paper.caption(2048, [140, 256])
    assert "on all 512 sequences, EigenAttention's search on all 512" in text
    assert "140 and 256 held-out windows" in text


def test_accuracy_is_asked_for_before_anything_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*ignored: object, **also_ignored: object) -> None:
        raise reproduce_paper.ManifoldKVError("the harness does not work")

    monkeypatch.setattr(measurements, "zero_shot", broken)
    monkeypatch.setattr(plans, "compress", None)
    done = study("--quick", "--out", tmp_path)
    assert done.code == 2
    assert "the harness does not work" in done.last_line


def test_another_model_than_the_papers_is_told() -> None:
    assert reproduce_paper.mismatches("Llama3-8B", {"WikiText": 6.2, "C4": 9.5}) == []
    (line,) = reproduce_paper.mismatches("Llama3-8B", {"WikiText": 6.2, "C4": 12.0})
    assert "12.00 on C4" in line
    assert "the paper's row says 9.60" in line


def test_a_repeated_run_measures_nothing_and_draws_the_same(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in out.iterdir() if path.is_file()}

    def again(*ignored: object, **also_ignored: object) -> None:
        raise AssertionError("done already")

    for module, name in (
        (measurements, "perplexity"),
        (measurements, "zero_shot"),
        (reproduce_paper, "diagnose"),
    ):
        monkeypatch.setattr(module, name, again)
    monkeypatch.setattr(Predictor, "solve", again)
    done = study("--quick", "--model", "reference-qwen3", "--out", out)
    assert done.code == 0, done.err[-3000:]
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("changed", [ReleaseSearch, Perplexity, ManifoldKVLM, LayerErrors])
def test_what_other_code_measured_is_not_taken(
    changed: type, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = checkpoints.digest_of_code

    @wraps(stock)  # or the digest would see this function where that one was
    def edited(*parts: type) -> str:
        return "edited" if changed in parts else stock(*parts)

    def again(*ignored: object, **also_ignored: object) -> None:
        raise reproduce_paper.ManifoldKVError("measured again")

    monkeypatch.setattr(checkpoints, "digest_of_code", edited)
    monkeypatch.setattr(measurements, "zero_shot", again)
    done = study("--quick", "--model", "reference-qwen3", "--out", out)
    assert done.code == 2
    assert "measured again" in done.last_line


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    for arguments, message in (
        (("--model", tmp_path / "nowhere"), "no model at"),
        (("--seeds", 0), "--seeds must be at least 1"),
        (("--tasks-data", tmp_path), "no documents for task"),
    ):
        run = study("--quick", "--out", tmp_path / "out", *arguments)
        assert run.code == 2
        assert run.last_line.startswith("reproduce_paper: ")
        assert message in run.last_line
