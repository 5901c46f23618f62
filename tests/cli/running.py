"""The command in this process, as a user types it."""

import io
import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from unittest import mock

import pytest

from manifoldkv.cli import main

MODEL = str(Path(__file__).parents[2] / "studies" / "reference_models" / "reference-llama")
FEW = ("--sequences", 4, "--length", 64)
EIGHT = ("--sequences", 8, "--length", 32)
"""As few as leave one held out."""


class Done(NamedTuple):
    """Exit code, standard output and standard error of a command."""

    code: int
    out: str
    err: str

    @property
    def phases(self) -> list[str]:
        """First words of the lines on standard error, without progress bars."""
        lines = [re.fullmatch(r"\d\d:\d\d:\d\d (\w+) .+", line) for line in self.err.splitlines()]
        assert all(lines), self.err
        return [line[1] for line in lines if line]


def run(*arguments: object, stdout: TextIO | None = None) -> Done:
    """Run the command; `stdout` replaces the stream that is read back."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["manifoldkv", *map(str, arguments)]),
        redirect_stdout(stdout or out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    return Done(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def facts(*arguments: object) -> dict[str, Any]:
    """Results of a command that works, read by a strict JSON reader."""
    done = run(*arguments, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out, parse_constant=mock.Mock(side_effect=AssertionError))


def lines(*arguments: object) -> str:
    """Results of a command that works, for people."""
    done = run(*arguments)
    assert done.code == 0, done.err
    assert not re.search(r"\bnan\b", done.out)
    return done.out


def interrupt(*ignored: object, **also_ignored: object) -> None:
    """Stand in for a function during which Ctrl-C is pressed."""
    raise KeyboardInterrupt


def fail(*ignored: object, **also_ignored: object) -> None:
    """Stand in for a function that must not be called."""
    raise AssertionError
