"""A bounded folder of contents by key, which several processes share."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from manifoldkv.core.errors import ArgumentError, RunError
from manifoldkv.serve.engines.store import CHECK_BYTES, Store

KEYS = [f"{number:02x}" for number in range(6)]
CALLS = st.lists(
    st.one_of(
        st.dictionaries(st.sampled_from(KEYS), st.binary(max_size=60), max_size=3),
        st.lists(st.sampled_from(KEYS), max_size=3),
    ),
    max_size=12,
)


def nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.kv"))


@given(calls=CALLS, bound=st.integers(CHECK_BYTES + 1, 300))
def test_a_store_is_never_larger_than_its_bound_and_returns_what_was_written(
    calls: list[dict[str, bytes] | list[str]], bound: int
) -> None:
    written: dict[str, set[bytes]] = {key: {None} for key in KEYS}
    with TemporaryDirectory() as folder:
        store = Store(folder, bound)
        for call in calls:
            if isinstance(call, list):
                store.touch(call)
                continue
            store.write(call)
            assert nbytes(Path(folder)) <= bound
            for key, content in call.items():
                written[key].add(content)
            for key in KEYS:
                assert store.read(key) in written[key]


@given(order=st.permutations(KEYS), more=st.integers(1, len(KEYS)))
def test_the_least_recently_used_are_evicted(order: list[str], more: int) -> None:
    """Every content takes a sixth of the store; touched keys stay, the last of them least."""
    with TemporaryDirectory() as folder:
        store = Store(folder, len(KEYS) * (CHECK_BYTES + 8))
        store.write({key: bytes(8) for key in KEYS})
        assert store.held(KEYS) == len(KEYS)
        store.touch(order)
        store.write({f"new{number}": bytes(8) for number in range(more)})
        kept = order[: len(KEYS) - more]
        assert {key for key in KEYS if store.read(key) is not None} == set(kept)
        assert store.held(order) == len(kept)


def test_the_first_contents_that_fit_are_written(tmp_path: Path) -> None:
    store = Store(tmp_path, 2 * CHECK_BYTES + 10)
    store.write({"a": bytes(5), "b": bytes(5), "c": bytes(5)})
    assert store.held(["a", "b", "c"]) == 2


@pytest.mark.parametrize("damage", [lambda x: x[:-1], lambda x: b"", lambda x: x[:-1] + b"!"])
def test_a_damaged_file_is_deleted_and_missing(tmp_path: Path, damage) -> None:
    store = Store(tmp_path, 1000)
    store.write({"a": b"content", "b": b"content"})
    path = tmp_path / "a.kv"
    path.write_bytes(damage(path.read_bytes()))
    assert store.read("a") is None
    assert not path.exists()
    (tmp_path / "b.kv").rename(path)  # the file of another key
    assert store.read("a") is None


def test_temporary_files_of_killed_writers_are_deleted_and_others_are_not(tmp_path: Path) -> None:
    partial, other = tmp_path / ".0123.partial", tmp_path / "notes.txt"
    for path in (partial, other):
        path.write_bytes(bytes(2000))
    store = Store(tmp_path, 1000)
    assert not partial.exists()
    partial.write_bytes(bytes(2000))
    store.write({"a": b"content"})
    assert not partial.exists()
    assert other.exists()
    assert store.read("a") == b"content"


def test_concurrent_writers_keep_the_bound(tmp_path: Path) -> None:
    """Half of the keys are those of all, and contents belong to their keys."""

    def work(writer: int) -> None:
        store = Store(tmp_path, 2000)
        for turn in range(15):
            key = f"{turn % 7}" if turn % 2 else f"{writer}-{turn}"
            store.write({key: key.encode() * 50})
            assert nbytes(tmp_path) <= 2000
            for path in tmp_path.glob("*.kv"):
                assert store.read(path.stem) in (None, path.stem.encode() * 50)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


WRITER = """
import sys
from manifoldkv.serve.engines.store import Store
store = Store(sys.argv[1], 100_000)
print("ready", flush=True)
for turn in range(10**6):
    store.write({f"{turn % 40}": str(turn % 40).encode() * 2000})
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_a_store_that_works(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    store = Store(tmp_path, 100_000)
    while store.read("7") is None:
        pass
    writer.kill()
    writer.wait()
    writer.stdout.close()
    store.write({"mine": b"content"})  # the lock has ended with its process
    assert nbytes(tmp_path) <= 100_000
    assert not list(tmp_path.glob("*.partial"))
    for number in range(40):
        assert store.read(str(number)) in (None, str(number).encode() * 2000)


def test_bad_stores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="a store of 0 bytes holds nothing"):
        Store(tmp_path, 0)
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot write to"):
        Store(tmp_path / "file", 1000)


def test_a_reader_waits_for_no_lock(tmp_path: Path) -> None:
    store = Store(tmp_path, 1000)
    store.write({"a": b"content"})
    with FileLock(tmp_path / ".lock"):
        assert store.read("a") == b"content"
        store.touch(["a"])
        assert store.held(["a", "b"]) == 1
    assert os.listdir(tmp_path)
