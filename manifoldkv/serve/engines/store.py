"""A folder of files of bounded size, shared by several processes.

Files are named by their keys and hold a checksum before their content. They are written whole or
not at all. Writers hold a lock of the folder, evict the least recently used files, and delete
temporary files of killed writers. Readers hold no lock: a file may vanish at any time.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from manifoldkv.core.errors import ArgumentError, RunError
from manifoldkv.core.files import check_writable, write_together

CHECK_BYTES = 16
SUFFIX = ".kv"


@dataclass(frozen=True)
class _File:
    """A file of the store, with the time of its last use in nanoseconds."""

    used: int
    nbytes: int
    path: Path


class Store:
    """Contents by key in a folder, at most `nbytes` bytes of them.

    Parameters
    ----------
    folder : str or Path
        Made if missing. Files with other names in it are not touched.
    nbytes : int
        Largest sum of the sizes of all files, checksums included.

    Raises
    ------
    ArgumentError
        If there is no room for a byte.
    RunError
        If the folder cannot be written to.
    """

    def __init__(self, folder: str | Path, nbytes: int) -> None:
        if nbytes <= CHECK_BYTES:
            raise ArgumentError(f"a store of {nbytes} bytes holds nothing: give it 1GiB")
        self._folder, self._nbytes = Path(folder), nbytes
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._lock():
                check_writable(self._folder)
                self._delete_partials()
        except OSError as error:
            raise RunError(f"cannot write to {folder}: {error.strerror}") from error

    def held(self, keys: Sequence[str]) -> int:
        """Return how many of the first keys have a file."""
        for count, key in enumerate(keys):
            if not self._path(key).exists():
                return count
        return len(keys)

    def read(self, key: str) -> bytes | None:
        """Return the content of a key, or None if it is missing; a damaged file is deleted."""
        path = self._path(key)
        try:
            stored = path.read_bytes()
        except OSError:
            return None
        content = stored[CHECK_BYTES:]
        if stored[:CHECK_BYTES] != _check(key, content):
            self.delete(key)
            return None
        return content

    def delete(self, key: str) -> None:
        """Delete the file of a key, if there is one."""
        with suppress(OSError):
            self._path(key).unlink()

    def touch(self, keys: Sequence[str]) -> None:
        """Set the time of the last use of files to now; of these the last key is evicted first."""
        now = time.time_ns()
        for age, key in enumerate(keys):
            with suppress(OSError):
                os.utime(self._path(key), ns=(now - age, now - age))

    def write(self, contents: Mapping[str, bytes]) -> None:
        """Write contents, in their order as far as the store has room, and evict others for them.

        Keys that have a file are not written again.

        Raises
        ------
        RunError
            If a file cannot be written.
        """
        with self._lock():
            self._delete_partials()
            made, room = {}, self._nbytes
            for key, content in contents.items():
                room -= CHECK_BYTES + len(content)
                if room < 0:
                    break
                if not self._path(key).exists():
                    made[self._path(key)] = _check(key, content) + content
            if self._evict(sum(map(len, made.values())), keep=set(map(self._path, contents))):
                write_together(made)

    def _evict(self, nbytes: int, keep: set[Path]) -> bool:
        """Delete files, those to keep last, until the store has room for a number of bytes."""
        files = self._files()
        excess = sum(file.nbytes for file in files) + nbytes - self._nbytes
        for file in sorted(files, key=lambda file: (file.path in keep, file.used)):
            if excess <= 0:
                break
            with suppress(OSError):  # as on a system where readers keep it from being deleted
                file.path.unlink()
                excess -= file.nbytes
        return excess <= 0

    def _files(self) -> list[_File]:
        found = []
        for path in self._folder.glob(f"*{SUFFIX}"):
            with suppress(OSError):  # deleted by a reader that has found it damaged
                status = path.stat()
                found.append(_File(status.st_mtime_ns, status.st_size, path))
        return found

    def _delete_partials(self) -> None:
        """Delete temporary files; with the lock held, their writers are dead."""
        for path in self._folder.glob(".*.partial"):
            with suppress(OSError):
                path.unlink()

    def _lock(self) -> FileLock:
        return FileLock(self._folder / ".lock")

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{SUFFIX}"


def _check(key: str, content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=CHECK_BYTES, key=key.encode()[:64]).digest()
