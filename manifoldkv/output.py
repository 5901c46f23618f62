"""Writing results: checked before long work, and whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from manifoldkv.errors import OutputError

PROBE_BYTES = 4 << 20


def check_writable(folder: Path) -> None:
    """Make a folder if need be, write a few megabytes into it and remove them again.

    Raises
    ------
    OutputError
        If that does not work: a read-only folder, a full disk, a file in the way.
    """
    probe = folder / ".probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(bytes(PROBE_BYTES))
    except OSError as error:
        raise OutputError(f"cannot write to --out {folder}: {error.strerror}") from error
    finally:
        if probe.exists():
            probe.unlink()


def write_whole(path: Path, content: bytes) -> None:
    """Write all of a file or nothing: a reader never sees a part, not even after a crash."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
