"""What all studies share: arguments, exit codes, checkpoints, tables and the line at the end."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv import ManifoldKVError, load_model, open_text, sample_tokens
from manifoldkv.diagnostics.figures import save_figure
from manifoldkv.errors import RunError
from manifoldkv.models.loading import check_device
from manifoldkv.runs.checkpoints import Checkpoints
from manifoldkv.runs.executors import set_threads
from manifoldkv.runs.files import check_writable
from manifoldkv.text.sources import HELP as TEXT_HELP

HERE = Path(__file__).resolve().parent
FIGURES = HERE.parent / "figures"
EMBEDDED = {
    name: str(HERE / "reference_models" / name) for name in ("reference-llama", "reference-qwen3")
}
"""The reference models of this repository, by the names studies give them."""


class Parser(argparse.ArgumentParser):
    """A parser whose help begins with the study's own description.

    Parameters
    ----------
    description : str
        The study's docstring.
    """

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
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

    def add_threads(self) -> None:
        self.add_argument("--threads", type=int, default=2, help="of the processor (%(default)s)")

    def add_device(self) -> None:
        self.add_argument("--device", default="cpu", help="(%(default)s)")

    def add_out(self, default: str) -> None:
        """Add where results go, and whether those that are there are computed again."""
        self.add_argument("--out", type=folder_named, help=f"output folder ({default})")
        self.add_argument("--force", action="store_true", help="compute again what is stored")
        self.add_argument(
            "--redraw", action="store_true", help="only draw again, from the CSV that is in --out"
        )


def folder_named(name: str) -> Path:
    """Refuse an empty name as a folder, which pathlib takes for the current one."""
    if not name.strip():
        raise argparse.ArgumentTypeError("the name is empty; the current folder is '.'")
    return Path(name)


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
        print(f"\n{name}: interrupted; the same command goes on from there", file=sys.stderr)
        return 130
    return 0


def output_folder(given: argparse.Namespace, *default: str) -> Path:
    """Return the folder that results go to, which can be written to.

    Parameters
    ----------
    given : Namespace
        With ``out``, or None for the default.
    default : str
        Path below the folder of figures.
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
    """Draw the figures of a table that lies in a folder, from nothing but what is in it.

    Parameters
    ----------
    out : Path
        With the table; figures are written beside it.
    figures : function
        From the table to figures by the stems of their files.
    table : str
        Its name.

    Raises
    ------
    RunError
        If there is no such table.
    """
    if not (out / table).is_file():
        raise RunError(f"{out} has no {table} to draw; without --redraw it is measured")
    for stem, figure in figures(pd.read_csv(out / table)).items():
        save_figure(figure, out / stem)


def load(name: str, **options: object) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model by a name of `EMBEDDED`, a folder or an id on the Hub."""
    return load_model(EMBEDDED.get(name, name), **options)  # type: ignore[arg-type]


def calibration_and_held_out(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequences: int,
    held_out: int,
    length: int,
) -> tuple[Tensor, Tensor]:
    """Return token ids of both parts of a text, (sequences, length) and (held_out, length)."""
    source = open_text(text)
    return (
        sample_tokens(source, tokenizer, sequences=sequences, length=length, split="calibration"),
        sample_tokens(source, tokenizer, sequences=held_out, length=length, split="held-out"),
    )


def short(name: str) -> str:
    """Return the name of a text without the folders it lies in."""
    return Path(name).name if Path(name).suffix in (".txt", ".jsonl") else name


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 thread``, ``2 threads``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [list(columns), ["---"] * len(columns), *([str(cell) for cell in row] for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def write_summary(out: Path, lines: Sequence[str]) -> None:
    """Write summary.md with the command that made it, and print it."""
    script = f"studies/{Path(sys.argv[0]).name}"
    command = shlex.join(["python", script, *sys.argv[1:]])
    text = "\n".join([*lines, "", f"Command: `{command}`", ""])
    (out / "summary.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"written to {out}")
