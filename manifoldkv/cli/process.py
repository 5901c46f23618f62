"""The process of a command: its streams, its phases as lines, its exit code."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress

from manifoldkv.cli.app import app
from manifoldkv.core.errors import ManifoldKVError, RunError

FAILED, INTERRUPTED = 2, 130


class Interrupted(Exception):  # noqa: N818 (not an error)
    """Ends a command after Ctrl-C with a message on the work that is saved."""


def main() -> None:
    """Run the command, with every error of ours as one line."""
    results = io.StringIO()
    # A closed standard error is None, which nothing can be printed to.
    with open(os.devnull, "w", encoding="utf-8") as null, redirect_stderr(sys.stderr or null):
        with _phases_printed(), redirect_stdout(results):
            code = _run()
        sys.exit(_delivered(results.getvalue()) or code)


def _run() -> int:
    """Run the command and return the exit code."""
    try:
        if sys.__stdout__ is None:
            raise RunError("standard output is closed: there is nowhere to print results")
        app(standalone_mode=True)
    except Interrupted as interruption:
        return _complain(interruption, INTERRUPTED)
    except ManifoldKVError as error:
        return _complain(error, FAILED)
    except SystemExit as ended:
        code = int(ended.code or 0)
        return _complain("interrupted", code) if code == INTERRUPTED else code
    return 0


def _complain(message: object, code: int) -> int:
    with suppress(OSError):  # where standard error is full, the exit code remains
        print(f"manifoldkv: {message}", file=sys.stderr, flush=True)
    return code


@contextmanager
def _phases_printed() -> Iterator[None]:
    """Print the library's log on standard error while it runs, each line with the time of day.

    Progress bars are for terminals; these lines also tell who reads a log hours later.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger = logging.getLogger("manifoldkv")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _delivered(results: str) -> int:
    """Print all results at once and return 0, or the exit code if that does not work.

    A closed pipe (``| head -1``) is no failure: its reader has enough.
    """
    if not results:
        return 0
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):  # not every encoding has every character
            sys.stdout.reconfigure(errors="backslashreplace")
        sys.stdout.write(results)
        sys.stdout.flush()
    except OSError as error:
        # The rest of the buffer would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0
        return _complain(f"cannot write to standard output: {error.strerror}", FAILED)
    return 0
