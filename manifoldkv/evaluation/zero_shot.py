"""Zero-shot accuracy through the LM Evaluation Harness, on the compressed cache.

Importing this module makes the model ``manifoldkv`` known to the harness: Hugging Face's model of
the harness with a plan, every request of which runs on a compressed cache.
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
"""The harness's own prompts over ``DIR/<file>``, a JSON document a line."""


CHOICES = 4
CONTINUATION_TASK: dict[str, Any] = {
    "doc_to_text": "{{query}}",
    "doc_to_target": "gold",
    "doc_to_choice": "choices",
    "metric": "acc",
}
"""Of `write_continuation_task`, which needs no download."""


@register_model("manifoldkv")
class ManifoldKVLM(HFLM):
    """The harness's Hugging Face model on a compressed cache.

    ``python -m manifoldkv.evaluation.zero_shot --model manifoldkv --model_args
    pretrained=MODEL,plan=FOLDER --tasks …`` is the harness's own command line with this model known
    to it.

    Parameters
    ----------
    pretrained : str or PreTrainedModel
        As HFLM takes it.
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
        known = CompressionPlan.load(plan) if isinstance(plan, str) else plan
        self.plan = known.transferred_to(self.model) if other_weights else known
        # For the life of this object: nothing the harness asks is answered uncompressed.
        self._block = compressed(self.model, self.plan)
        self._block.__enter__()

    def close(self) -> None:
        """Leave the model as it was."""
        self._block.__exit__(None, None, None)


def zero_shot(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    plan: CompressionPlan | None = None,
    *,
    data: Path | None = None,
    task_files: Path | None = None,
    limit: int | None = None,
    batch_size: int = 16,
) -> pd.DataFrame:
    """Return the accuracy on tasks of the LM Evaluation Harness, without examples in the prompt.

    Parameters
    ----------
    model, tokenizer
        From `load_model`.
    tasks : sequence of str
        Names of tasks or groups of the harness; with `data`, of `LOCAL_TASKS` or of
        ``DIR/<task>.jsonl`` as `write_continuation_task` makes it.
    plan : CompressionPlan, optional
        The uncompressed model is measured without one.
    data : Path, optional
        Folder of local documents; without it the harness downloads its own.
    task_files : Path, optional
        Folder of the harness's YAML files for tasks and groups of one's own.
    limit : int, optional
        Documents of each task, the first ones; all if omitted.
    batch_size : int
        Requests at a time.

    Returns
    -------
    DataFrame
        ``task, metric, accuracy, standard_error, items``, one row per task or group.

    Raises
    ------
    ArgumentError
        If a local file is missing.
    """
    wanted = [task if data is None else local_task(task, data) for task in tasks]
    own = None if task_files is None else str(task_files)
    manager = TaskManager(include_path=own, include_defaults=data is None and own is None)
    with nullcontext() if plan is None else compressed(model, plan):
        client = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        found = simple_evaluate(
            client,
            tasks=wanted,
            limit=limit,
            num_fewshot=0,
            task_manager=manager,
            verbosity="ERROR",
        )
    rows = []
    for task in tasks:
        scores = found["results"][task]
        metric = "acc_norm" if "acc_norm,none" in scores else "acc"
        rows.append(
            {
                "task": task,
                "metric": metric,
                "accuracy": scores[f"{metric},none"],
                "standard_error": scores[f"{metric}_stderr,none"],
                "items": _items(found, task),
            }
        )
    return pd.DataFrame(rows)


def _items(found: dict[str, Any], task: str) -> int:
    """Return how many documents were asked of a task, or of all tasks of a group."""
    if task in found["n-samples"]:
        return int(found["n-samples"][task]["effective"])
    return sum(_items(found, subtask) for subtask in found["group_subtasks"][task])


def local_task(task: str, data: Path) -> dict[str, Any]:
    """Return the harness's configuration of a task over a local file.

    Raises
    ------
    ArgumentError
        If the file does not exist.
    """
    known = LOCAL_TASKS.get(task, CONTINUATION_TASK | {"file": f"{task}.jsonl"})
    path = data / known["file"]
    if not path.is_file():
        raise ArgumentError(f"no documents for task {task}: {path} does not exist")
    metrics = ["acc", "acc_norm"] if known["metric"] == "acc_norm" else ["acc"]
    return {
        "task": task,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "metric_list": [
            {"metric": m, "aggregation": "mean", "higher_is_better": True} for m in metrics
        ],
        **{k: v for k, v in known.items() if k.startswith("doc_to")},
    }


def write_continuation_task(
    source: TextSource,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    *,
    items: int,
    context: int = 48,
    continuation: int = 16,
    split: Split | None = "held-out",
) -> None:
    """Write a four-way continuation task as a JSON file of the harness.

    Each document of a text that is long enough gives one item: its first tokens, and the choice
    between what follows and what follows in three other documents.

    Parameters
    ----------
    source : TextSource
        From `open_text`.
    tokenizer : PreTrainedTokenizerBase
        To count tokens with.
    path : Path
        To write.
    items : int
        How many.
    context, continuation : int
        Tokens of each part.
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
        if len(ids) >= context + continuation:
            start = tokenizer.decode(ids[:context])
            halves.append((start, tokenizer.decode(ids[context : context + continuation])))
        if len(halves) == items:
            break
    if len(halves) < max(items, CHOICES):
        raise ArgumentError(
            f"{source.name} has {len(halves)} documents of {context + continuation} tokens, too "
            f"few for {items} items"
        )
    lines = []
    for index, (start, _) in enumerate(halves):
        # The right answer takes every place equally often; distractors are neighbours.
        right = index % CHOICES
        choices = [halves[(index + i - right) % len(halves)][1] for i in range(CHOICES)]
        lines.append(json.dumps({"query": start, "choices": choices, "gold": right}))
    write_whole(path, ("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
