"""Accuracies of the paper's tasks, on local files."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from lm_eval.tasks import TaskManager
from paper import accuracy
from paper.accuracy import local_task, zero_shot
from paper.tasks import write_continuation_task
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv import CompressionPlan, compress, compressed, load_model, open_text
from manifoldkv.core.errors import ArgumentError

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
    monkeypatch.setattr(accuracy, "TaskManager", lambda **_: of_files(include_defaults=False))
    group, task = (zero_shot(*model, [name], limit=2).iloc[0] for name in ("outer", "third"))
    assert (group["items"], task["items"]) == (6, 2)
    assert group["metric"] == task["metric"] == "acc"
    assert group["accuracy"] == pytest.approx(task["accuracy"])  # three times the same


def test_a_missing_file_is_named(model: Model, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"no documents for task piqa: .*validation\.jsonl"):
        zero_shot(*model, ["piqa"], data=tmp_path)


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
