"""The commands and their options; their work is imported when one is called."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer

from manifoldkv.cli.command import command
from manifoldkv.cli.options import (
    FILE,
    FOLDER,
    TEXT,
    Force,
    Length,
    ModelInMemory,
    ModelOptions,
    OtherWeights,
    Plan,
    TextOptions,
    Windows,
)
from manifoldkv.cli.quantities import parse_bytes, parse_tokens

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
    or the work cannot be done, and the message says why; 130 interrupted. A run with --checkpoints
    resumes.
    """


@command(app, "planning.compress")
class Compress(ModelOptions):
    """Find a plan for a model and save it."""

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
    compute: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            show_default="4 with recipe bits, inf with best",
            help="Most multiplications of a decode step over those of uncompressed attention; inf "
            "is no limit.",
        ),
    ] = None
    nats: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            show_default="as --ratio says",
            help="Largest loss per token, instead of a ratio: the smallest cache that stays within "
            "it on held-out calibration text.",
        ),
    ] = None
    recipe: Annotated[
        str, typer.Option(help="How the plan is made; `manifoldkv inspect` shows the recipes.")
    ] = "bits"
    objective: Annotated[
        str | None,
        typer.Option(
            show_default="the recipe's",
            help="What errors cost: fisher, kq-svd, k-svd, layer-output, with recipe low-rank "
            "eigen-attention too, or a registered one.",
        ),
    ] = None
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
    out: Annotated[Path, typer.Option(**FOLDER, help="Folder to save the plan in.")] = Path("plan")
    force: Force = False
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            **FOLDER,
            show_default="nowhere",
            help="Folder of checkpoints, from which an interrupted run resumes.",
        ),
    ] = None
    executor: Annotated[
        Literal["local", "ray"],
        typer.Option(help="Where statistics are collected and bases are solved."),
    ] = "local"
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only print the bytes of the cache and an estimate of the loss by --compute.",
        ),
    ] = False


@command(app, "generating.generate")
class Generate(ModelOptions):
    """Write text on the compressed cache, or from a stored one."""

    prompt: Annotated[str, typer.Option(help="Beginning of the text, or the question with --chat.")]
    plan: Annotated[
        Path | None,
        typer.Option(
            **FOLDER,
            show_default="the stock cache",
            help="Folder of the plan whose cache is used.",
        ),
    ] = None
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Ask in the model's chat template, and print the answer only."),
    ] = False
    cache: Annotated[
        Path | None,
        typer.Option(
            **FILE,
            show_default="no file",
            help="File of the prompt's stored cache (plan of recipe stored): read if it holds the "
            "beginning of this prompt, written otherwise.",
        ),
    ] = None
    other_weights: OtherWeights = False
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


@command(app, "measuring.evaluate")
class Evaluate(TextOptions, ModelOptions):
    """Measure perplexity, answers to questions or errors of layers."""

    plan: Plan
    sequences: Windows = 32
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            show_default="none, perplexity is measured",
            help="Tasks that look back in the text, instead of perplexity: passkey, long-passkey, "
            "uuid, four-passkeys, copying, number-list, key-value, mapping. --length is then that "
            "of a prompt (1024, or half of what the model takes).",
        ),
    ] = None
    items: Annotated[int, typer.Option(min=1, help="Number of questions of each task.")] = 20
    layers: Annotated[
        bool,
        typer.Option(
            "--layers",
            help="Errors of every layer, instead of perplexity: each has the inputs of the "
            "uncompressed model and attends to its compressed cache.",
        ),
    ] = False
    prefill: Annotated[
        Literal["exact", "compressed"],
        typer.Option(
            help="Prompts read by the uncompressed model and only answers from the compressed "
            "cache (exact), or both from the compressed cache (compressed)."
        ),
    ] = "exact"
    seed: Annotated[int, typer.Option(help="Seed of the choice of questions.")] = 0


@command(app, "comparing.compare")
class Compare(TextOptions, ModelOptions):
    """Show two plans side by side, in numbers and in text."""

    first: Annotated[
        Path, typer.Argument(**FOLDER | {"metavar": "FIRST"}, help="Folder of a plan.")
    ]
    second: Annotated[
        Path, typer.Argument(**FOLDER | {"metavar": "SECOND"}, help="Folder of another plan.")
    ]
    prompt: Annotated[
        str | None,
        typer.Option(
            show_default="a window of the held-out text",
            help="Beginning of a text to continue on both caches.",
        ),
    ] = None
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Largest number of new tokens on each cache.")
    ] = 60


@command(app, "describing.inspect")
class Inspect:
    """Show a plan and its provenance, or the recipes and their parts."""

    plan: Annotated[
        Path | None,
        typer.Argument(
            **FOLDER | {"metavar": "PLAN"},
            show_default="recipes, objectives, solvers and rank rules",
            help="Folder of the plan.",
        ),
    ] = None


@command(app, "measuring.bench")
class Bench(ModelInMemory):
    """Time decoding with the compressed cache and without."""

    plan: Plan
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="512, or what the model takes",
            help="Number of tokens in the cache when decoding begins.",
        ),
    ] = None
    new_tokens: Annotated[int, typer.Option(min=1, help="Number of tokens decoded in a round.")] = (
        16
    )
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds of each cache.")] = 3
    other_weights: OtherWeights = False


@command(app, "measuring.report")
class Report(TextOptions, ModelOptions):
    """Write an HTML report of a plan, measured on held-out text."""

    plan: Plan
    out: Annotated[Path, typer.Option(**FILE, help="HTML file to write.")] = Path("report.html")
    self_contained: Annotated[
        bool,
        typer.Option(
            "--self-contained/--no-self-contained",
            help="Embed plotly in the report (one file of 2 MB), or write plotly.min.js beside it.",
        ),
    ] = True


@command(app, "packing.pack")
class Pack:
    """Make a saved slot of llama.cpp smaller, or restore it.

    A slot of llama-server (/slots/0?action=save) or a prompt cache of llama-completion
    (--prompt-cache): one sequence from position 0 on, keys and values in f16 or q8_0. The plan is
    one of recipe stored.
    """

    slot: Annotated[
        Path,
        typer.Argument(
            **FILE | {"metavar": "SLOT"},
            help="File that llama.cpp saved, or with --unpack its packed file.",
        ),
    ]
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="Model of the slot: its .gguf file, a folder, or an id on the Hub.",
        ),
    ]
    plan: Plan
    out: Annotated[
        Path,
        typer.Option(**FILE, help="Packed file to write, or with --unpack the file of llama.cpp."),
    ]
    unpack: Annotated[
        bool, typer.Option("--unpack", help="Write the file of llama.cpp of a packed file.")
    ] = False
