"""Studies as a user runs them: in this process, which is quick, or in one of their own."""

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from matplotlib.figure import Figure

STUDIES = Path(__file__).parents[2] / "studies"


class Done(NamedTuple):
    """What a run has ended in, and the figures it has drawn, by the stems of their files."""

    code: int
    out: str
    err: str
    figures: dict[str, Figure]

    @property
    def last_line(self) -> str:
        return self.err.strip().splitlines()[-1]


def run_here(study: str, *arguments: object) -> Done:
    """Call a study's main in this process, with its arguments, and catch what it prints.

    On one thread unless they say otherwise: two starve each other where tests run side by side.
    """
    one_thread = [] if "--threads" in arguments else ["--threads", "1"]
    command = [str(STUDIES / f"{study}.py"), *map(str, arguments), *one_thread]
    threads = torch.get_num_threads()
    figures: dict[str, Figure] = {}
    write = Figure.savefig

    def kept(figure: Figure, path: Path, **options: Any) -> None:
        figures[path.stem] = figure
        write(figure, path, **options)

    with (
        mock.patch.object(Figure, "savefig", kept),
        mock.patch.object(sys, "argv", command),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        try:
            code = import_module(study).main()
        except SystemExit as stopped:
            code = stopped.code
        finally:
            torch.set_num_threads(threads)
    return Done(code, out.getvalue(), err.getvalue(), figures)


def run_apart(study: str, *arguments: object) -> Done:
    """Run a study as a process."""
    command = [sys.executable, str(STUDIES / f"{study}.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return Done(done.returncode, done.stdout, done.stderr, {})
