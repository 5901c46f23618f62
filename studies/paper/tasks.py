"""Tasks of the accuracies."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from manifoldkv import open_text
from manifoldkv.evaluation.zero_shot import local_task, write_continuation_task
from manifoldkv.runs.files import write_whole
from paper.protocol import Protocol

NAMES = ("hellaswag", "piqa", "mmlu")
CONTINUATION = "docstring-continuation"


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
    path, items = folder / f"{CONTINUATION}.jsonl", protocol.items or 1000
    write_continuation_task(open_text("docstrings"), tokenizer, path, items=items)
    return Tasks((CONTINUATION,), folder, protocol.items)


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
