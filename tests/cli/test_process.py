"""The process: its streams, its exit codes, Ctrl-C."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest

from manifoldkv.cli import inputs, main, planning
from tests.cli.running import FEW, MODEL, Done, interrupt, run

COMMAND = [sys.executable, "-c", "from manifoldkv.cli import main; main()"]
STREAMS = {
    "full": (2, "manifoldkv: cannot write to standard output: No space left on device\n"),
    "unread": (0, ""),
}


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version") == (0, f"manifoldkv {version('manifoldkv')}\n", "")


class TestStandardOutput:
    """A result is printed whole, or its loss is told."""

    @pytest.fixture(params=STREAMS)
    def stream(self, request: pytest.FixtureRequest) -> Iterator[tuple[int, tuple[int, str]]]:
        """A full disk, or a pipe whose reader is gone; exit code and message."""
        if request.param == "full":
            descriptor = os.open("/dev/full", os.O_WRONLY)
        else:
            other, descriptor = os.pipe()
            os.close(other)
        yield descriptor, STREAMS[request.param]
        os.close(descriptor)

    def test_of_a_process(self, stream: tuple) -> None:
        ask = [*COMMAND, "--help"]
        done = subprocess.run(ask, stdout=stream[0], stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stderr) == stream[1]

    @pytest.mark.parametrize("ask", [("compress", "--help"), ("inspect", "--json"), ("inspect",)])
    def test_of_every_kind_of_command(self, ask: tuple, stream: tuple) -> None:
        with open(stream[0], "w", closefd=False) as file:
            done = run(*ask, stdout=file)
        assert (done.code, done.err) == stream[1]

    def test_closed(self, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What Python makes of ``>&-``."""
        monkeypatch.setattr(sys, "__stdout__", None)
        said = "manifoldkv: standard output is closed: there is nowhere to print results\n"
        assert run("inspect", plan) == (2, "", said)

    def test_an_encoding_without_the_characters(self, plan: Path) -> None:
        with open(os.devnull, "w", encoding="ascii") as file:
            ask = ("evaluate", MODEL, "--plan", plan, "--sequences", 2, "--length", 8)
            assert run(*ask, stdout=file).code == 0  # writes ×

    def test_standard_error_may_be_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stderr", None)
        monkeypatch.setattr(sys, "argv", ["manifoldkv", "inspect", "nowhere"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2


class TestInterruption:
    @pytest.mark.parametrize("command", ["evaluate", "bench", "report"])
    def test_it_is_told(self, command: str, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(inputs, "load_model", interrupt)
        done = run(command, MODEL, "--plan", plan)
        assert done == Done(130, "", "manifoldkv: interrupted\n")

    def test_saved_work_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(planning, "find_plan", interrupt)
        ask = ("compress", MODEL, "--out", tmp_path / "plan")
        done = run(*ask)
        assert (done.code, done.out) == (130, "")
        assert done.err.endswith(
            "nothing is saved; with --checkpoints FOLDER the same command resumes\n"
        )
        done = run(*ask, "--checkpoints", tmp_path / "w")
        assert done.code == 130
        assert f"interrupted: finished parts are in {tmp_path / 'w'}; the same comm" in done.err

    @pytest.mark.slow
    def test_a_real_one(self, tmp_path: Path) -> None:
        work = tmp_path / "work"
        ask = ("compress", MODEL, "--recipe", "low-rank", *map(str, FEW))
        with subprocess.Popen(
            [*COMMAND, *ask, "--checkpoints", str(work), "--out", str(tmp_path / "plan")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell starts what runs in the background with Ctrl-C ignored.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        ) as running:
            for line in running.stderr:
                if "choosing ranks" in line:
                    running.send_signal(signal.SIGINT)
                    break
            out, err = running.communicate()
        assert (running.returncode, out) == (130, "")
        assert err == (
            f"manifoldkv: interrupted: finished parts are in {work}; the same command resumes "
            "there\n"
        )
        assert len(list(work.glob("layer-*"))) == 108  # bases at all ranks
        assert not (tmp_path / "plan").exists()
