"""The harness as a client, on local files; its model is Hugging Face's on a compressed cache."""

import copy
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv import CompressionPlan, compress, compressed, load_model, open_text
from manifoldkv.errors import ArgumentError, PlanError
from manifoldkv.evaluation import zero_shot as zero_shot_module
from manifoldkv.evaluation.zero_shot import (
    ManifoldKVLM,
    local_task,
    write_continuation_task,
    zero_shot,
)

Model = tuple[PreTrainedModel, PreTrainedTokenizerBase]
FOLDER = "studies/reference_models/reference-llama"


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(FOLDER)


@pytest.fixture(scope="module")
def data(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight items of every task in the layout of the harness's documents."""
    folder = tmp_path_factory.mktemp("tasks")
    text = open_text("pydoc-topics")
    write_continuation_task(text, model[1], folder / "continuation.jsonl", items=8, split=None)
    items = [json.loads(line) for line in (folder / "continuation.jsonl").read_text().splitlines()]
    for task in ("hellaswag", "piqa"):
        (folder / task).mkdir()
        (folder / task / "validation.jsonl").write_text("\n".join(map(json.dumps, items)))
    (folder / "mmlu").mkdir()
    questions = [
        {"question": i["query"], "choices": i["choices"], "answer": i["gold"], "subject": "a_b"}
        for i in items
    ]
    (folder / "mmlu" / "test.jsonl").write_text("\n".join(map(json.dumps, questions)))
    return folder


@pytest.fixture(scope="module")
def plan(model: Model) -> CompressionPlan:
    tokens = torch.randint(0, 4096, (2, 32), generator=torch.Generator().manual_seed(0))
    return compress(model[0], tokens, recipe="eigen-attention", ratio=0.1)


@pytest.fixture(scope="module")
def plan_folder(plan: CompressionPlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan.save(tmp_path_factory.mktemp("plan"))
    return tmp_path_factory.getbasetemp() / "plan0"


def accuracy_by_hand(model: Model, data: Path) -> float:
    """The choice with the highest log-likelihood after a space, as the harness asks it."""
    network, tokenizer = model
    right = 0
    items = [json.loads(line) for line in (data / "continuation.jsonl").read_text().splitlines()]
    for item in items:
        scores = []
        for choice in item["choices"]:
            context = tokenizer(item["query"], add_special_tokens=False)["input_ids"]
            whole = tokenizer(item["query"] + " " + choice, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits = network(input_ids=torch.tensor([whole[:-1]]), use_cache=False).logits[0]
            log_probabilities = logits.log_softmax(-1)
            span = range(len(context), len(whole))
            scores.append(sum(float(log_probabilities[i - 1, whole[i]]) for i in span))
        right += max(range(4), key=scores.__getitem__) == item["gold"]
    return right / len(items)


def test_accuracy_is_that_of_the_likeliest_choice(model: Model, data: Path) -> None:
    found = zero_shot(*model, ["continuation"], data=data).iloc[0]
    assert found["accuracy"] == pytest.approx(accuracy_by_hand(model, data))
    assert found["items"] == 8
    assert found["standard_error"] > 0


def test_requests_run_on_the_compressed_cache(
    model: Model, plan: CompressionPlan, data: Path
) -> None:
    found = zero_shot(*model, ["continuation"], plan, data=data).iloc[0]
    with compressed(model[0], plan):
        expected = accuracy_by_hand(model, data)
    assert found["accuracy"] == pytest.approx(expected)


def test_all_local_tasks(model: Model, data: Path) -> None:
    found = zero_shot(*model, ["hellaswag", "piqa", "mmlu"], data=data, limit=4)
    assert list(found["task"]) == ["hellaswag", "piqa", "mmlu"]
    assert list(found["metric"]) == ["acc_norm", "acc_norm", "acc"]
    assert set(found["items"]) == {4}
    assert found["accuracy"].between(0, 1).all()


def test_a_group_is_asked_as_a_whole(
    model: Model, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mmlu is one: tasks in groups in a group, which the harness counts leaf by leaf."""
    metric = {"aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}]}
    inner = {"group": "inner", "task": ["first", "second"]} | metric
    outer = {"group": "outer", "task": ["inner", "third"]} | metric
    files = {
        name: local_task("mmlu", data) | {"task": name} for name in ("first", "second", "third")
    }
    for name, content in (files | {"inner": inner, "outer": outer}).items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps(content))  # JSON is YAML
    of_files = partial(TaskManager, include_path=str(tmp_path))
    monkeypatch.setattr(
        zero_shot_module, "TaskManager", lambda **_: of_files(include_defaults=False)
    )
    group, task = (zero_shot(*model, [name], limit=2).iloc[0] for name in ("outer", "third"))
    assert (group["items"], task["items"]) == (6, 2)
    assert group["metric"] == task["metric"] == "acc"
    assert group["accuracy"] == pytest.approx(task["accuracy"])  # three times the same


def test_a_missing_file_is_named(model: Model, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"no documents for task piqa: .*validation\.jsonl"):
        zero_shot(*model, ["piqa"], data=tmp_path)


def test_the_registered_model_is_compressed_until_closed(
    model: Model, plan: CompressionPlan
) -> None:
    tokens = torch.arange(32).unsqueeze(0)
    plain = model[0](input_ids=tokens).logits
    with compressed(model[0], plan):
        expected = model[0](input_ids=tokens).logits
    client = ManifoldKVLM(model[0], plan, tokenizer=model[1])
    assert torch.equal(client.model(input_ids=tokens).logits, expected)
    client.close()
    assert torch.equal(model[0](input_ids=tokens).logits, plain)


def test_a_plan_of_other_weights_is_taken_if_that_is_said(
    model: Model, plan: CompressionPlan
) -> None:
    tuned = copy.deepcopy(model[0])
    tuned.model.embed_tokens.weight.data *= 1.1
    with pytest.raises(PlanError, match="other weights"):
        ManifoldKVLM(tuned, plan, tokenizer=model[1])
    client = ManifoldKVLM(tuned, plan, other_weights=True, tokenizer=model[1])
    assert client.model(input_ids=torch.arange(24).unsqueeze(0)).logits.isfinite().all()
    client.close()


def test_the_harness_finds_the_model_by_name(data: Path, plan_folder: Path) -> None:
    found = simple_evaluate(
        model="manifoldkv",
        model_args=f"pretrained={FOLDER},plan={plan_folder}",
        tasks=[local_task("continuation", data)],
        task_manager=TaskManager(include_defaults=False),
        device="cpu",
        limit=2,
    )
    assert found["results"]["continuation"]["acc,none"] in (0, 0.5, 1)


@pytest.mark.slow
def test_the_command_line_of_the_harness(data: Path, plan_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    task = local_task("continuation", data)
    (tmp_path / "tasks" / "continuation.yaml").write_text(json.dumps(task))  # JSON is YAML
    arguments = f"pretrained={FOLDER},plan={plan_folder}"
    command = [sys.executable, "-m", "manifoldkv.evaluation.zero_shot", "--model", "manifoldkv"]
    command += ["--model_args", arguments, "--tasks", "continuation", "--device", "cpu"]
    command += ["--include_path", str(tmp_path / "tasks"), "--limit", "2"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "continuation" in run.stdout


class TestContinuationTask:
    def test_every_place_is_right_equally_often(self, data: Path) -> None:
        lines = (data / "continuation.jsonl").read_text().splitlines()
        items = [json.loads(line) for line in lines]
        assert [item["gold"] for item in items] == [i % 4 for i in range(8)]
        assert all(len(set(item["choices"])) == 4 for item in items)

    def test_the_right_choice_goes_on(self, model: Model, data: Path) -> None:
        documents = list(open_text("pydoc-topics").documents(None))
        for line in (data / "continuation.jsonl").read_text().splitlines():
            item = json.loads(line)
            passage = item["query"] + item["choices"][item["gold"]]
            assert any(document.startswith(passage) for document in documents)

    def test_a_text_that_is_too_short_is_refused(self, model: Model, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("too short for an item")
        with pytest.raises(ArgumentError, match="documents of 64 tokens"):
            write_continuation_task(
                open_text(str(tmp_path / "a.txt")), model[1], tmp_path / "b", items=4, split=None
            )
