"""Zero-shot accuracy through the LM Evaluation Harness, on the compressed cache.

Importing this module registers the model ``manifoldkv`` with the harness: its Hugging Face model
with a plan and a compressed cache.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
from lm_eval import simple_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv.cache import compressed
from manifoldkv.errors import ArgumentError
from manifoldkv.models.decoder import Decoder
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.runs.files import write_whole
from manifoldkv.text.docstrings import Split
from manifoldkv.text.sources import TextSource

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
CHOICES = 4
CONTEXT, CONTINUATION = 48, 16
"""Tokens of the two parts of a document in a continuation task."""
CONTINUATION_TASK: dict[str, Any] = {
    "doc_to_text": "{{query}}",
    "doc_to_target": "gold",
    "doc_to_choice": "choices",
    "metric": "acc",
}
"""Settings of the task of `write_continuation_task`."""


@register_model("manifoldkv")
class ManifoldKVLM(HFLM):
    """The harness's Hugging Face model on a compressed cache.

    ``python -m manifoldkv.evaluation.zero_shot --model manifoldkv --model_args
    pretrained=MODEL,plan=FOLDER --tasks …`` is the harness's command line with this model.

    Parameters
    ----------
    pretrained : str or PreTrainedModel
        As in HFLM.
    plan : str or CompressionPlan
        A plan, or the folder of one.
    other_weights : bool
        Whether the plan may be that of another model of the same shape.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        plan: str | CompressionPlan,
        other_weights: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(pretrained=pretrained, **kwargs)
        if isinstance(plan, str):
            plan = CompressionPlan.load(plan)
        self.plan = plan.transferred_to(Decoder.of(self.model)) if other_weights else plan
        # For the life of this object: no request runs uncompressed.
        self._block = compressed(self.model, self.plan)
        self._block.__enter__()

    def close(self) -> None:
        """Restore the model."""
        self._block.__exit__(None, None, None)


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


def write_continuation_task(
    source: TextSource,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    *,
    items: int,
    split: Split | None = "held-out",
) -> None:
    """Write a four-way continuation task as a JSON file of the harness.

    An item consists of the first tokens of a document, the next ones and those of three other
    documents.

    Parameters
    ----------
    source : TextSource
        From `open_text`.
    tokenizer : PreTrainedTokenizerBase
        To count tokens with.
    path : Path
        Destination.
    items : int
        Number of items.
    split : {"calibration", "held-out"}, optional
        Of the text.

    Raises
    ------
    ArgumentError
        If the text has too few documents of that length.
    """
    halves = []
    for document in source.documents(split):
        ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= CONTEXT + CONTINUATION:
            start = tokenizer.decode(ids[:CONTEXT])
            halves.append((start, tokenizer.decode(ids[CONTEXT : CONTEXT + CONTINUATION])))
        if len(halves) == items:
            break
    if len(halves) < max(items, CHOICES):
        raise ArgumentError(
            f"{source.name} has {len(halves)} documents of {CONTEXT + CONTINUATION} tokens, too "
            f"few for {items} items"
        )
    lines = []
    for index, (start, _) in enumerate(halves):
        # The right answer is at every position equally often; distractors are neighbours.
        right = index % CHOICES
        choices = [halves[(index + i - right) % len(halves)][1] for i in range(CHOICES)]
        lines.append(json.dumps({"query": start, "choices": choices, "gold": right}))
    write_whole(path, ("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
