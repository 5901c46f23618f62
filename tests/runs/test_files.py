"""Files written whole, by one writer or by several at once."""

import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from manifoldkv import CompressionPlan
from manifoldkv.core.errors import PlanError, RunError
from manifoldkv.core.files import write_whole
from tests.families import tiny_model
from tests.plans import random_plan

WRITERS, WRITES = 3, 40
VERSIONS = [bytes([65 + writer]) * 50_000 for writer in range(WRITERS)]


def side_by_side(write: Callable[[int], None], read: Callable[[], None]) -> int:
    """Write as several writers, each many times, and read until all are done; return the reads."""
    done = Event()

    def writing(writer: int) -> None:
        for _ in range(WRITES):
            write(writer)

    def reading() -> int:
        reads = 0
        while not done.is_set():
            read()
            reads += 1
        return reads

    with ThreadPoolExecutor(WRITERS + 1) as pool:
        reader = pool.submit(reading)
        writers = [pool.submit(writing, writer) for writer in range(WRITERS)]
        try:
            for writer in writers:
                writer.result()
        finally:
            done.set()
        return reader.result()


def test_writers_of_one_path_never_fail_and_readers_see_one_whole_version(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, VERSIONS[0])

    def read() -> None:
        assert path.read_bytes() in VERSIONS

    assert side_by_side(lambda writer: write_whole(path, VERSIONS[writer]), read) > 10
    assert path.read_bytes() in VERSIONS
    assert os.listdir(tmp_path) == ["file"]


def test_writers_of_one_plan_leave_files_that_belong_together(tmp_path: Path) -> None:
    model = tiny_model("llama")
    plans = [random_plan(model, key_rank=3 + writer) for writer in range(WRITERS)]
    plans[0].save(tmp_path)
    refused: list[str] = []

    def read() -> None:
        try:
            assert CompressionPlan.load(tmp_path) in plans
        except PlanError as error:
            refused.append(str(error))

    reads = side_by_side(lambda writer: plans[writer].save(tmp_path), read)
    assert CompressionPlan.load(tmp_path) in plans
    assert len(refused) <= reads / 10
    assert all("not the file that plan.json describes" in said for said in refused)
    assert sorted(os.listdir(tmp_path)) == ["plan.json", "plan.safetensors"]


def test_files_of_two_plans_are_never_the_last_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer comes between the two files of a plan."""
    model = tiny_model("llama")
    mine, other = random_plan(model, key_rank=3), random_plan(model, key_rank=4)
    replace, replaced = os.replace, []

    def interleaved(source: Any, target: Any) -> None:
        replace(source, target)
        replaced.append(Path(target).name)
        if replaced == ["plan.safetensors"]:
            other.save(tmp_path)

    monkeypatch.setattr(os, "replace", interleaved)
    mine.save(tmp_path)
    assert CompressionPlan.load(tmp_path) == mine


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_what_fails_leaves_what_was_there_and_nothing_else(
    step: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def failing(*ignored: object) -> None:
        raise error

    monkeypatch.setattr(os, step, failing)
    expected = RunError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        write_whole(path, b"after")
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"")
    write_whole(tmp_path / "file", b"")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_a_name_as_long_as_the_file_system_takes(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 255)
    write_whole(path, b"content")
    assert path.read_bytes() == b"content"


@pytest.mark.parametrize("name", ["", ".", "/", "nowhere/file", "a file/below"])
def test_a_path_that_is_no_file_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a file").write_bytes(b"")
    with pytest.raises(RunError, match="cannot write"):
        write_whole(Path(name), b"")
    assert os.listdir(tmp_path) == ["a file"]
