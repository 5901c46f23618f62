"""Tasks of the accuracies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from manifoldkv import open_text
from manifoldkv.core.errors import ArgumentError
from manifoldkv.core.files import write_whole
from manifoldkv.text.docstrings import Split
from manifoldkv.text.sources import TextSource
from paper.accuracy import local_task
from paper.protocol import Protocol

NAMES = ("hellaswag", "piqa", "mmlu")
DOCSTRINGS = "docstring-continuation"
CHOICES = 4
CONTEXT, CONTINUATION = 48, 16
"""Tokens of the two parts of a document in a continuation task."""


@dataclass(frozen=True)
class Tasks:
    """Tasks of the LM Evaluation Harness.

    Parameters
    ----------
    names : tuple of str
        Task names of `zero_shot`.
    data : Path or None
        Folder of local documents; the harness downloads its own without it.
    items : int or None
        Number of items of each task; all if None.
    spread : bool
        Whether items are spread over a larger file.
    """

    names: tuple[str, ...]
    data: Path | None
    items: int | None
    spread: bool = False

    def documents(self) -> dict[str, str]:
        """Return the SHA-256 of the documents of each local task.

        Raises
        ------
        ArgumentError
            If a file is missing.
        """
        if self.data is None:
            return {}
        return {
            task: hashlib.sha256(file_of(task, self.data).read_bytes()).hexdigest()
            for task in self.names
        }


def tasks_from(data: Path | None, protocol: Protocol, folder: Path) -> Tasks:
    """Return the paper's tasks, from local documents if `data` is set.

    Parameters
    ----------
    data : Path or None
        Folder of all local documents.
    protocol : Protocol
        Number of items.
    folder : Path
        Folder that selected documents are written to.

    Raises
    ------
    ArgumentError
        If a file is missing.
    """
    if data is None or protocol.items is None:
        return Tasks(NAMES, data, protocol.items)
    wanted = dict.fromkeys(NAMES, protocol.items)
    if protocol.mmlu_items is not None:
        wanted["mmlu"] = protocol.mmlu_items
    return Tasks(NAMES, spread_tasks(wanted, data, folder), protocol.items, spread=True)


def continuation_task(
    tokenizer: PreTrainedTokenizerBase, protocol: Protocol, folder: Path
) -> Tasks:
    """Return a task of held-out docstrings, for the models trained on docstrings."""
    folder.mkdir(parents=True, exist_ok=True)
    path, items = folder / f"{DOCSTRINGS}.jsonl", protocol.items or 1000
    write_continuation_task(open_text("docstrings"), tokenizer, path, items=items)
    return Tasks((DOCSTRINGS,), folder, protocol.items)


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


def spread_tasks(items: Mapping[str, int], data: Path, folder: Path) -> Path:
    """Write documents of tasks, spread evenly over each file, and return the folder of them.

    The first ones are of one kind: MMLU is sorted by subject, HellaSwag by source.

    Parameters
    ----------
    items : mapping
        Number of documents by task; all if a file has fewer.
    data : Path
        Folder of local documents in the layout of `zero_shot`.
    folder : Path
        Folder that is written to, in the same layout.

    Raises
    ------
    ArgumentError
        If a file is missing.
    """
    for task, count in items.items():
        source = file_of(task, data)
        lines = [line for line in source.read_bytes().splitlines(keepends=True) if line.strip()]
        count = min(count, len(lines))
        target = folder / source.relative_to(data)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, b"".join(lines[i * len(lines) // count] for i in range(count)))
    return folder


def file_of(task: str, data: Path) -> Path:
    """Return the documents of a local task."""
    return Path(local_task(task, data)["dataset_kwargs"]["data_files"]["test"])
