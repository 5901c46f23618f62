"""Parts that all studies share: arguments, exit codes, checkpoints, tables and summaries."""

from __future__ import annotations

import argparse
import importlib.util
import math
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv import ManifoldKVError, load_model, open_text, sample_tokens
from manifoldkv.core.errors import ArgumentError, RunError
from manifoldkv.core.files import check_writable
from manifoldkv.evaluate.diagnostics.figures import save_figure
from manifoldkv.learn.objectives import OBJECTIVES
from manifoldkv.learn.solvers import SOLVERS
from manifoldkv.models.loading import check_device
from manifoldkv.runs.checkpoints import Checkpoints
from manifoldkv.runs.executors import set_threads
from manifoldkv.text.docstrings import Split
from manifoldkv.text.sources import HELP as TEXT_HELP

HERE = Path(__file__).resolve().parent
FIGURES = HERE.parent / "figures"
EMBEDDED = {
    name: str(HERE / "reference_models" / name) for name in ("reference-llama", "reference-qwen3")
}
"""Folders of this repository's reference models by name."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose help keeps the lines of a study's docstring."""

    def __init__(self, description: str | None, **options: Any) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,
        )

    def add_model(self) -> None:
        self.add_argument(
            "--model",
            default="reference-llama",
            help=f"{', '.join(EMBEDDED)}, a local folder, a GGUF file, a Hub id or smollm2 "
            "(%(default)s)",
        )

    def add_text(self) -> None:
        self.add_argument(
            "--text", default="docstrings", help=f"{TEXT_HELP}; a fifth is held out (%(default)s)"
        )

    def add_list(
        self,
        option: str,
        default: Iterable[Any],
        described: str = "",
        *,
        type: Callable[[str], Any] = str,
        metavar: str = "NAME",
        nargs: str = "+",
    ) -> None:
        """Add an option of several values; defaults are shown in the help and parsed like input."""
        shown = [str(value) for value in default]
        self.add_argument(
            option,
            nargs=nargs,
            type=type,
            default=[type(value) for value in shown],
            metavar=metavar,
            help=f"{described} ({' '.join(shown) or 'none'})".strip(),
        )

    def add_threads(self, default: int = 2) -> None:
        self.add_argument(
            "--threads", type=int, default=default, help="processor threads (%(default)s)"
        )

    def add_device(self) -> None:
        self.add_argument("--device", default="cpu", help="(%(default)s)")

    def add_out(self, default: str) -> None:
        """Add the output folder and the options that compute or draw its results again."""
        self.add_argument("--out", type=folder_named, help=f"output folder ({default})")
        self.add_argument("--force", action="store_true", help="compute every step again")
        self.add_argument(
            "--redraw",
            action="store_true",
            help="draw the figures again from the CSV in --out, measure nothing",
        )


def folder_named(name: str) -> Path:
    """Refuse an empty name, which pathlib reads as the current folder."""
    if not name.strip():
        raise argparse.ArgumentTypeError("the name is empty; the current folder is '.'")
    return Path(name)


class Stages:
    """Lines that say how far a run is: ``stage 2 of 6: perplexities``."""

    def __init__(self, total: int) -> None:
        self._total, self._begun = total, 0

    def begin(self, stage: str) -> None:
        self._begun += 1
        print(f"stage {self._begun} of {self._total}: {stage}", flush=True)


def run_study(parser: Parser, study: Callable[[argparse.Namespace], None]) -> int:
    """Parse the arguments, run a study, and return its exit code.

    0: done; 2: the input cannot be used, and one line on standard error says why; 130: interrupted.
    """
    given = parser.parse_args()
    name = Path(sys.argv[0]).stem
    try:
        if getattr(given, "threads", None) is not None:
            set_threads(given.threads)
        if getattr(given, "device", None) is not None:
            check_device(given.device)
        study(given)
    except ManifoldKVError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted; the same command resumes the run", file=sys.stderr)
        return 130
    return 0


def output_folder(given: argparse.Namespace, *default: str) -> Path:
    """Return the writable folder of the results, created if it does not exist.

    Parameters
    ----------
    given : Namespace
        Its ``out`` is the folder, or None for the default.
    default : str
        Default folder below that of the figures.
    """
    out = given.out or FIGURES.joinpath(*default)
    check_writable(out)
    out.mkdir(parents=True, exist_ok=True)
    return Path(out)


def stored_in(out: Path, given: argparse.Namespace) -> Checkpoints:
    """Return the checkpoints of a study, in a folder beside its results."""
    return Checkpoints(out / "steps", force=given.force)


def draw(
    out: Path, figures: Callable[[pd.DataFrame], Mapping[str, Figure]], table: str = "results.csv"
) -> None:
    """Draw figures from a table, and from nothing else.

    Parameters
    ----------
    out : Path
        Folder of the table and the figures.
    figures : function
        Function of the table that returns figures by file stem.
    table : str
        File name of the table.

    Raises
    ------
    RunError
        If the table does not exist.
    """
    if not (out / table).is_file():
        raise RunError(f"{out} has no {table} to draw; without --redraw it is measured")
    for stem, figure in figures(pd.read_csv(out / table)).items():
        save_figure(figure, out / stem)


def load(name: str, **options: object) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model by a name of `EMBEDDED`, a folder or an id on the Hub."""
    return load_model(EMBEDDED.get(name, name), **options)  # type: ignore[arg-type]


def import_methods(path: Path | None) -> None:
    """Run a Python file whose decorators register objectives or solvers, if there is one.

    Raises
    ------
    ArgumentError
        If the file cannot be run, or registers nothing.
    """
    if path is None:
        return
    known = [*OBJECTIVES.names(), *SOLVERS.names()]
    name = f"imported_{path.stem}"  # no module of a study has it
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ArgumentError(f"--import {path}: there is no such Python file")
    sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules[name])
    except Exception as error:
        raise ArgumentError(f"--import {path}: {type(error).__name__}: {error}") from error
    if known == [*OBJECTIVES.names(), *SOLVERS.names()]:
        raise ArgumentError(
            f"--import {path} registers nothing: decorate a class with @register_objective or "
            "@register_solver"
        )


def tokens_of(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    split: Split | None,
    sequences: int | None,
    length: int,
) -> Tensor:
    """Return token ids (sequences, length) of a part of a text, or of all of it without a split."""
    source = open_text(text)
    return sample_tokens(source, tokenizer, sequences=sequences, length=length, split=split)


def short(name: str) -> str:
    """Return the name of a text without its folders."""
    return Path(name).name if Path(name).suffix in (".txt", ".jsonl") else name


def counted(number: int, noun: str) -> str:
    """Return a number and a noun in English: ``1 thread``, ``2 threads``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def with_error(mean: float, error: float, digits: int) -> str:
    """Return a mean with its standard error, which is undefined for one sequence."""
    if math.isnan(mean):
        return "-"
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ({error:.{digits}f})")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [list(columns), ["---"] * len(columns), *([str(cell) for cell in row] for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def write_summary(out: Path, lines: Sequence[str], shown: Sequence[str] | None = None) -> None:
    """Write summary.md, with the command of this run; print it, or what is shown of it."""
    script = f"studies/{Path(sys.argv[0]).name}"
    command = shlex.join(["python", script, *sys.argv[1:]])
    text = "\n".join([*lines, "", f"Command: `{command}`", ""])
    (out / "summary.md").write_text(text, encoding="utf-8")
    print(text if shown is None else "\n".join(shown))
    print(f"written to {out}")
