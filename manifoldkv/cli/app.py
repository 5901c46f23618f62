"""The commands and their options; their work is imported when one is called."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from manifoldkv.cli.command import command
from manifoldkv.cli.options import (
    FILE,
    FOLDER,
    Force,
    ModelInMemory,
    ModelOptions,
    OtherWeights,
    PlanOptions,
    RunOptions,
    SamplingOptions,
    TaskOptions,
    TextOptions,
)

FEW_WINDOWS, MORE_WINDOWS = TextOptions(), TextOptions(sequences=32)
NO_TASKS, GREEDY, DEFAULT_RUN = TaskOptions(), SamplingOptions(), RunOptions()

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"manifoldkv {version('manifoldkv')}")
        raise typer.Exit


@app.callback()
def manifoldkv(
    asked_version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """A smaller key-value cache for language models.

    A model, some text and a ratio make a plan (compress); the plan makes the model run on the
    smaller cache (generate), and what that costs is measured (evaluate, compare, bench).

    Every default is shown with its option; an option without a value is off by default. Results
    are printed on standard output at the end (with --json as one JSON object), a line for each
    phase of the work and errors on standard error. Exit codes: 0 done; 2 the input cannot be used
    or the work cannot be done, and the message says why; 130 interrupted. A run with --work
    resumes.
    """


@command(app, "planning")
def compress(
    model: ModelOptions,
    run: RunOptions = DEFAULT_RUN,
    out: Annotated[Path, typer.Option(**FOLDER, help="Folder to save the plan in.")] = Path("plan"),
    force: Force = False,
    work: Annotated[
        Path | None,
        typer.Option(
            **FOLDER,
            show_default="nowhere",
            help="Folder of checkpoints, from which an interrupted run resumes.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only estimate time, memory and bytes; save nothing."),
    ] = False,
) -> None:
    """Find a plan for a model and save it."""


@command(app, "generating")
def generate(
    model: ModelOptions,
    prompt: Annotated[
        str, typer.Option(help="Beginning of the text, or the question with --chat.")
    ],
    plan: Annotated[
        Path | None,
        typer.Option(
            **FOLDER,
            show_default="the stock cache",
            help="Folder of the plan whose cache is used.",
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Ask in the model's chat template, and print the answer only."),
    ] = False,
    sampling: SamplingOptions = GREEDY,
    cache: Annotated[
        Path | None,
        typer.Option(
            **FILE,
            show_default="no file",
            help="File of the prompt's stored cache (plan of recipe stored): read if it holds the "
            "beginning of this prompt, written otherwise.",
        ),
    ] = None,
    other_weights: OtherWeights = False,
) -> None:
    """Write text on the compressed cache, or from a stored one."""


@command(app, "measuring")
def evaluate(
    model: ModelOptions,
    plan: PlanOptions,
    text: TextOptions = MORE_WINDOWS,
    tasks: TaskOptions = NO_TASKS,
) -> None:
    """Measure perplexity on held-out text, or answer questions."""


@command(app, "exporting")
def export(
    model: ModelInMemory,
    plan: PlanOptions,
    out: Annotated[Path, typer.Option(**FOLDER, help="Folder to write the checkpoint to.")],
    force: Force = False,
    text: TextOptions = FEW_WINDOWS,
) -> None:
    """Write a plain checkpoint with the smaller cache.

    The plan is one of the recipe commuting. The checkpoint needs no manifoldkv: transformers and
    other engines load it like any model. Its card says what was lost on held-out text.
    """


@command(app, "comparing")
def compare(
    model: ModelOptions,
    first: Annotated[
        Path, typer.Argument(**FOLDER | {"metavar": "FIRST"}, help="Folder of a plan.")
    ],
    second: Annotated[
        Path, typer.Argument(**FOLDER | {"metavar": "SECOND"}, help="Folder of another plan.")
    ],
    text: TextOptions = FEW_WINDOWS,
    prompt: Annotated[
        str | None,
        typer.Option(
            show_default="a window of the held-out text",
            help="Beginning of a text to continue on both caches.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Largest number of new tokens on each cache.")
    ] = 60,
    other_weights: OtherWeights = False,
) -> None:
    """Show two plans side by side, in numbers and in text."""


@command(app, "describing")
def inspect(
    plan: Annotated[
        Path, typer.Argument(**FOLDER | {"metavar": "PLAN"}, help="Folder of the plan.")
    ],
) -> None:
    """Show what a plan stores, and its provenance."""


@command(app, "measuring")
def bench(
    model: ModelInMemory,
    plan: PlanOptions,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="512, or what the model takes",
            help="Number of tokens in the cache when decoding begins.",
        ),
    ] = None,
    new_tokens: Annotated[
        int, typer.Option(min=1, help="Number of tokens decoded in a round.")
    ] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds of each cache.")] = 3,
) -> None:
    """Time decoding with the compressed cache and without."""


@command(app, "measuring")
def diagnose(model: ModelOptions, plan: PlanOptions, text: TextOptions = FEW_WINDOWS) -> None:
    """Measure the error of every layer on held-out text.

    Each layer has the inputs of the uncompressed model and attends to its compressed cache.
    """


@command(app, "measuring")
def report(
    model: ModelOptions,
    plan: PlanOptions,
    out: Annotated[Path, typer.Option(**FILE, help="HTML file to write.")] = Path("report.html"),
    text: TextOptions = FEW_WINDOWS,
    self_contained: Annotated[
        bool,
        typer.Option(
            "--self-contained/--no-self-contained",
            help="Embed plotly in the report (one file of 2 MB), or write plotly.min.js beside it.",
        ),
    ] = True,
) -> None:
    """Write an HTML report of a plan, measured on held-out text."""


@command(app, "listing")
def list_() -> None:
    """List recipes, objectives, solvers and rank rules."""
