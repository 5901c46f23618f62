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

    A folder that does not exist is made for it, with its parents, and removed again: long work
    that fails afterwards leaves no empty folder.

    Raises
    ------
    RunError
        If that does not work: a read-only folder, a full disk, a file in the way.
    """
    probe = folder / ".probe"
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(bytes(PROBE_BYTES))
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {error.strerror}") from error
    finally:
        if probe.exists():
            probe.unlink()
        with suppress(OSError):  # another process may write there by now
            for path in made:
                path.rmdir()


def write_whole(path: Path, content: bytes) -> None:
    """Write all of a file or nothing: a reader never sees a part, not even after a crash.

    Of several writers of one path, the last one counts.

    Raises
    ------
    RunError
        If it cannot be written; what was there before is still there.
    """
    write_together({path: content})


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Write several files, each as `write_whole` does, and replace them right after each other.

    Raises
    ------
    RunError
        If one cannot be written.
    """
    # Names of this call alone: another writer of the same path has other ones.
    partials = {path: path.parent / f".{uuid4().hex}.partial" for path in contents}
    try:
        try:
            for path, content in contents.items():
                _write_new(partials[path], content)
            for path, partial in partials.items():
                os.replace(partial, path)
        finally:
            for partial in partials.values():
                with suppress(OSError):  # it was renamed, or never made
                    partial.unlink()
    except OSError as error:
        named = " and ".join(map(str, contents))
        raise RunError(f"cannot write {named}: {error.strerror}") from error
    for folder in {path.parent for path in contents}:
        _sync_folder(folder)


def _write_new(path: Path, content: bytes) -> None:
    """Write a file that is not there yet, and wait until it is on disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Wait until the names of a folder are on disk, on systems that can be asked to."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Make a folder if need be and keep other runs out of it; an end by any signal frees it.

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
