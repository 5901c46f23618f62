"""Writing results: checked before long work, and whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

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
        raise OutputError(f"cannot write to {folder}: {error.strerror}") from error
    finally:
        if probe.exists():
            probe.unlink()


def write_whole(path: Path, content: bytes) -> None:
    """Write all of a file or nothing: a reader never sees a part, not even after a crash.

    Raises
    ------
    OutputError
        If it cannot be written; what was there before is still there.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror}") from error


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Make a folder if need be and keep other runs out of it; an end by any signal frees it.

    Raises
    ------
    OutputError
        If another run is at work there, or the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", blocking=False)
        lock.acquire()
    except Timeout as error:
        raise OutputError(
            f"another run is at work in {folder}: wait for it, or take another folder"
        ) from error
    except OSError as error:
        raise OutputError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()
