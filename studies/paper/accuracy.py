"""Zero-shot accuracy of plans through the LM Evaluation Harness, also on local documents."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv.core.errors import ArgumentError
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.serve.cache import compressed

LOCAL_TASKS: dict[str, dict[str, Any]] = {
    "hellaswag": {
        "file": "hellaswag/validation.jsonl",
        "doc_to_text": "{{query}}",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "metric": "acc_norm",
    },
    "piqa": {
        "file": "piqa/validation.jsonl",
        "doc_to_text": "{{query.strip()}}\nAnswer:",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "metric": "acc_norm",
    },
    "mmlu": {
        "file": "mmlu/test.jsonl",
        "doc_to_text": (
            "The following are multiple choice questions (with answers) about "
            "{{subject.replace('_', ' ')}}.\n\n{{question.strip()}}\nA. {{choices[0]}}\n"
            "B. {{choices[1]}}\nC. {{choices[2]}}\nD. {{choices[3]}}\nAnswer:"
        ),
        "doc_to_target": "answer",
        "doc_to_choice": ["A", "B", "C", "D"],
        "metric": "acc",
    },
}
"""The harness's prompts for ``DIR/<file>``, a JSON document per line."""
BATCH_SIZE = 16
CONTINUATION_TASK: dict[str, Any] = {
    "doc_to_text": "{{query}}",
    "doc_to_target": "gold",
    "doc_to_choice": "choices",
    "metric": "acc",
}
"""Settings of the task of `write_continuation_task`."""


def zero_shot(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    plan: CompressionPlan | None = None,
    *,
    data: Path | None = None,
    limit: int | None = None,
) -> pd.DataFrame:
    """Return the accuracy on tasks of the LM Evaluation Harness, without examples in the prompt.

    Parameters
    ----------
    model, tokenizer
        From `load_model`.
    tasks : sequence of str
        Names of tasks or groups of the harness; with `data`, of `LOCAL_TASKS` or of
        ``DIR/<task>.jsonl`` from `write_continuation_task`.
    plan : CompressionPlan, optional
        The uncompressed model is measured without one.
    data : Path, optional
        Folder of local documents; without it the harness downloads its own.
    limit : int, optional
        Number of documents per task, the first ones; all if omitted.

    Returns
    -------
    DataFrame
        ``task, metric, accuracy, standard_error, items``, one row per task or group.

    Raises
    ------
    ArgumentError
        If a local file is missing.
    """
    with nullcontext() if plan is None else compressed(model, plan):
        output = simple_evaluate(
            HFLM(pretrained=model, tokenizer=tokenizer, batch_size=BATCH_SIZE),
            tasks=[task if data is None else local_task(task, data) for task in tasks],
            limit=limit,
            num_fewshot=0,
            task_manager=TaskManager(include_defaults=data is None),
            verbosity="ERROR",
        )
    rows = []
    for task in tasks:
        scores = output["results"][task]
        metric = "acc_norm" if "acc_norm,none" in scores else "acc"
        rows.append(
            {
                "task": task,
                "metric": metric,
                "accuracy": scores[f"{metric},none"],
                "standard_error": scores[f"{metric}_stderr,none"],
                "items": _items(output, task),
            }
        )
    return pd.DataFrame(rows)


def _items(output: dict[str, Any], task: str) -> int:
    """Return the number of documents of a task, or of all tasks of a group."""
    if task in output["n-samples"]:
        return int(output["n-samples"][task]["effective"])
    return sum(_items(output, subtask) for subtask in output["group_subtasks"][task])


def local_task(task: str, data: Path) -> dict[str, Any]:
    """Return the harness's configuration of a task over a local file.

    Raises
    ------
    ArgumentError
        If the file does not exist.
    """
    settings = LOCAL_TASKS.get(task, CONTINUATION_TASK | {"file": f"{task}.jsonl"})
    path = data / settings["file"]
    if not path.is_file():
        raise ArgumentError(f"no documents for task {task}: {path} does not exist")
    metrics = ["acc", "acc_norm"] if settings["metric"] == "acc_norm" else ["acc"]
    return {
        "task": task,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "metric_list": [
            {"metric": m, "aggregation": "mean", "higher_is_better": True} for m in metrics
        ],
        **{k: v for k, v in settings.items() if k.startswith("doc_to")},
    }
