"""Atomic writes of results, and checks before long work."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from filelock import FileLock, Timeout

from manifoldkv.core.errors import RunError

PROBE_BYTES = 4 << 20


def check_writable(folder: Path) -> None:
    """Write a few megabytes into a folder and remove them again, with the folder if it was missing.

    Raises
    ------
    RunError
        If the folder is read-only, the disk full, or a file in the way.
    """
    probe = folder / ".probe"
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(bytes(PROBE_BYTES))
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {error.strerror}") from error
    finally:
        if probe.exists():
            probe.unlink()
        with suppress(OSError):  # another process may have written there
            for path in missing:
                path.rmdir()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: readers never see a part, even after a crash.

    Of several writers of one path, the last one wins.

    Raises
    ------
    RunError
        If the file cannot be written; an existing one is then unchanged.
    """
    write_together({path: content})


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Write several files as `write_whole` does, replacing them right after each other."""
    # Unique names, for concurrent writers of the same path.
    partials = {path: path.parent / f".{uuid4().hex}.partial" for path in contents}
    try:
        try:
            for path, content in contents.items():
                _write_new(partials[path], content)
            for path, partial in partials.items():
                os.replace(partial, path)
        finally:
            for partial in partials.values():
                with suppress(OSError):  # renamed, or never created
                    partial.unlink()
    except OSError as error:
        paths = " and ".join(map(str, contents))
        raise RunError(f"cannot write {paths}: {error.strerror}") from error
    for folder in {path.parent for path in contents}:
        _sync_folder(folder)


def _write_new(path: Path, content: bytes) -> None:
    """Write a new file, and wait until it is on disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Wait until the names of a folder are on disk, on systems that support it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Create a folder if missing and lock it; the lock ends with the process.

    Raises
    ------
    RunError
        If another run uses the folder, or it cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", blocking=False)
        lock.acquire()
    except Timeout as error:
        raise RunError(
            f"another run is at work in {folder}: wait for it, or take another folder"
        ) from error
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()
