"""Studies as a user runs them: in this process, which is quick, or in one of their own."""

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pandas as pd
import torch
from matplotlib.figure import Figure

STUDIES = Path(__file__).parents[2] / "studies"


class Done(NamedTuple):
    """Exit code, output, figures by file stem, and the folder of a run's results."""

    code: int
    out: str
    err: str
    figures: dict[str, Figure]
    folder: Path

    @property
    def last_line(self) -> str:
        return self.err.strip().splitlines()[-1]

    def table(self, name: str = "results") -> pd.DataFrame:
        return pd.read_csv(self.folder / f"{name}.csv")

    def text(self, name: str = "summary.md") -> str:
        return (self.folder / name).read_text(encoding="utf-8")


def run_here(study: str, *arguments: object) -> Done:
    """Call a study's main in this process, with its arguments, and catch its output.

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
    return Done(code, out.getvalue(), err.getvalue(), figures, folder_of(arguments))


def run_apart(study: str, *arguments: object) -> Done:
    """Run a study as a process."""
    command = [sys.executable, str(STUDIES / f"{study}.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return Done(done.returncode, done.stdout, done.stderr, {}, folder_of(arguments))


def folder_of(arguments: tuple[object, ...]) -> Path:
    return Path(str(arguments[arguments.index("--out") + 1] if "--out" in arguments else ""))


def finished(study: str, *arguments: object) -> Done:
    """Run a study here, and fail if it fails."""
    done = run_here(study, *arguments)
    assert done.code == 0, done.err[-3000:]
    return done
