"""Some documents of local tasks, spread over all there are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from manifoldkv.evaluation.zero_shot import local_task
from manifoldkv.runs.files import write_whole


def spread_tasks(items: Mapping[str, int], data: Path, folder: Path) -> Path:
    """Write documents of tasks, spread evenly over each file, and return the folder of them.

    The first ones are of one kind: MMLU is sorted by subject, HellaSwag by where it comes from.

    Parameters
    ----------
    items : mapping
        Task to how many documents; all where there are fewer.
    data : Path
        Folder of local documents, as `zero_shot` takes it.
    folder : Path
        Written to, in the same layout.

    Raises
    ------
    TextError
        If a file is missing.
    """
    for task, count in items.items():
        source = Path(local_task(task, data)["dataset_kwargs"]["data_files"]["test"])
        lines = [line for line in source.read_bytes().splitlines(keepends=True) if line.strip()]
        count = min(count, len(lines))
        target = folder / source.relative_to(data)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, b"".join(lines[i * len(lines) // count] for i in range(count)))
    return folder
