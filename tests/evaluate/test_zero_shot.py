"""The LM Evaluation Harness as a client; its model is Hugging Face's on a compressed cache."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv import CompressionPlan, compress, compressed, load_model
from manifoldkv.core.errors import PlanError
from manifoldkv.evaluate.zero_shot import ManifoldKVLM

Model = tuple[PreTrainedModel, PreTrainedTokenizerBase]
FOLDER = "studies/reference_models/reference-llama"


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(FOLDER)


@pytest.fixture
def task(tmp_path: Path) -> dict[str, Any]:
    """Two items of a task, in the harness's configuration."""
    choices = ["a list", "a number", "a string", "nothing"]
    items = [{"query": f"Return the {name} of", "choices": choices} for name in ("sum", "name")]
    (tmp_path / "items.jsonl").write_text("\n".join(json.dumps(i | {"gold": 1}) for i in items))
    return {
        "task": "continuation",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "items.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "doc_to_text": "{{query}}",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
    }


@pytest.fixture(scope="module")
def plan(model: Model) -> CompressionPlan:
    tokens = torch.randint(0, 4096, (2, 32), generator=torch.Generator().manual_seed(0))
    return compress(model[0], tokens, recipe="eigen-attention", ratio=0.1)


@pytest.fixture(scope="module")
def plan_folder(plan: CompressionPlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan.save(tmp_path_factory.mktemp("plan"))
    return tmp_path_factory.getbasetemp() / "plan0"


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


def test_the_harness_finds_the_model_by_name(task: dict[str, Any], plan_folder: Path) -> None:
    found = simple_evaluate(
        model="manifoldkv",
        model_args=f"pretrained={FOLDER},plan={plan_folder}",
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),
        device="cpu",
        limit=2,
    )
    assert found["results"]["continuation"]["acc,none"] in (0, 0.5, 1)


@pytest.mark.slow
def test_the_command_line_of_the_harness(
    task: dict[str, Any], plan_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "continuation.yaml").write_text(json.dumps(task))  # JSON is YAML
    arguments = f"pretrained={FOLDER},plan={plan_folder}"
    command = [sys.executable, "-m", "manifoldkv.evaluate.zero_shot", "--model", "manifoldkv"]
    command += ["--model_args", arguments, "--tasks", "continuation", "--device", "cpu"]
    command += ["--include_path", str(tmp_path / "tasks"), "--limit", "2"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "continuation" in run.stdout
