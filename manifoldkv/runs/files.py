"""Writing results: checked before long work, and whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from filelock import FileLock, Timeout

from manifoldkv.errors import RunError

PROBE_BYTES = 4 << 20


def check_writable(folder: Path) -> None:
    """Write a few megabytes into a folder and remove them again.

    A missing folder is created with its parents and removed again: a run that fails later leaves no
    empty folder.

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
        with suppress(OSError):  # another process may write there by now
            for path in missing:
                path.rmdir()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader never sees a part, not even after a crash.

    Of several writers of one path, the last one wins.

    Raises
    ------
    RunError
        If it cannot be written; a former file is unchanged.
    """
    write_together({path: content})


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Write several files, each as `write_whole` does, and replace them right after each other.

    Raises
    ------
    RunError
        If one cannot be written.
    """
    # Unique names: another writer of the same path has others.
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
        If another run is at work there, or the folder cannot be written to.
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
