"""Arguments that several commands take.

Nothing here imports torch: ``manifoldkv --help`` answers at once. Defaults that help names are
compared with the library's by a test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

TEXT = (
    "Text: a .txt file, a .jsonl file with a 'text' field, 'docstrings' (of installed packages), "
    "'pydoc-topics', or a Hub data set as NAME[:CONFIG[:SPLIT]] (wikitext:wikitext-2-raw-v1, "
    "allenai/c4:en)."
)


class Interrupted(Exception):  # noqa: N818 (not an error)
    """Ends a command that Ctrl-C has met, and says what is left of its work."""


def _path(name: str | Path) -> Path:
    """Refuse an empty name, which pathlib takes for the current folder."""
    if not str(name).strip():
        raise typer.BadParameter("the name is empty; the current folder is '.'")
    return Path(name)


FOLDER: dict[str, Any] = {"parser": _path, "metavar": "FOLDER"}
FILE: dict[str, Any] = {"parser": _path, "metavar": "FILE"}

Dtype = Literal["float32", "bfloat16", "float16"]

ModelOption = Annotated[
    str, typer.Option("--model", help="Folder, GGUF file, id on the Hub, or smollm2.")
]
PlanOption = Annotated[Path, typer.Option("--plan", **FOLDER, help="Folder of a plan.")]
TextOption = Annotated[str, typer.Option("--text", help=TEXT)]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Of the weights.")]
DeviceOption = Annotated[str, typer.Option("--device", help="Where the model runs: cpu, cuda, …")]
OffloadOption = Annotated[
    bool,
    typer.Option("--offload", help="Read each layer's weights from its shards when it runs."),
]
OtherWeightsOption = Annotated[
    bool,
    typer.Option("--other-weights", help="Take the plan of another model of the same shape."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
SequencesOption = Annotated[
    int, typer.Option("--sequences", min=1, help="Windows of the held-out text.")
]
LengthOption = Annotated[
    int | None,
    typer.Option("--length", min=2, help="Tokens in a window (512, or all the model takes)."),
]


class GivenModel(NamedTuple):
    """A model as a command is given it."""

    name: str
    dtype: str
    device: str
    offload: bool = False


class GivenPlan(NamedTuple):
    """A plan as a command is given it."""

    folder: Path
    other_weights: bool


class GivenTasks(NamedTuple):
    """Questions as a command is given them; `prefill` says how their prompts are read."""

    names: list[str]
    items: int
    prefill: Literal["exact", "compressed"]
    seed: int


class GivenText(NamedTuple):
    """The held-out part of a text as a command is given it; its length is the model's if None."""

    name: str
    sequences: int
    length: int | None
