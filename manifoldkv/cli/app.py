"""The commands and their arguments; what they do is imported when one is called."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer

from manifoldkv.cli.answers import show
from manifoldkv.cli.options import (
    FILE,
    FOLDER,
    CalibrationOption,
    DeviceOption,
    DtypeOption,
    GivenModel,
    GivenPlan,
    GivenTasks,
    GivenText,
    JsonOption,
    LengthOption,
    ModelArgument,
    OffloadOption,
    OtherWeightsOption,
    PlanOption,
    Sampling,
    SequencesOption,
    TextOption,
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

    Every default is shown with its option; an option without a value is off unless it is given.
    Results are printed on standard output when all is done (with --json as one JSON object), a line
    for each phase of the work and errors on standard error. Exit codes: 0 done; 2 the input cannot
    be used or the work cannot be done, and the message says why; 130 interrupted. A run that was
    given --work resumes.
    """


@app.command()
def compress(
    model: ModelArgument,
    text: CalibrationOption = None,
    ratio: Annotated[
        float | None,
        typer.Option(
            show_default="0.5",
            help="Largest share of the uncompressed cache, in (0, 1].",
        ),
    ] = None,
    nbytes: Annotated[
        int | None,
        typer.Option(
            "--bytes",
            parser=parse_bytes,
            metavar="SIZE",
            show_default="as --ratio says",
            help="Most bytes of the cache of one text of --context tokens: 1GiB, 500MB.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            parser=parse_tokens,
            metavar="TOKENS",
            show_default="those of a window",
            help="Length of the text that the ratio holds for: 4000, or 32k, which is 32768.",
        ),
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(help="How the plan is made; `manifoldkv list` shows the recipes."),
    ] = "best",
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
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(min=1, show_default="64", help="Number of calibration windows."),
    ] = None,
    length: LengthOption = None,
    out: Annotated[Path, typer.Option(**FOLDER, help="Folder to save the plan in.")] = Path("plan"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing plan.")] = False,
    work: Annotated[
        Path | None,
        typer.Option(
            **FOLDER,
            show_default="nowhere",
            help="Folder of checkpoints, from which an interrupted run resumes.",
        ),
    ] = None,
    offload: OffloadOption = False,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only estimate time, memory and bytes; save nothing."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find a plan for a model and save it."""
    from manifoldkv.cli import planning

    request = planning.Request(
        model=GivenModel(model, dtype, device, offload),
        text=text,
        ratio=ratio,
        nbytes=nbytes,
        context=context,
        recipe=recipe,
        settings=tuple(settings or ()),
        sequences=sequences,
        length=length,
    )
    if dry_run:
        show(planning.estimate(request), as_json)
    else:
        show(planning.compress(request, out, work, force=force), as_json)


@app.command()
def generate(
    model: ModelArgument,
    prompt: Annotated[
        str, typer.Option(help="Beginning of the text, or the question with --chat.")
    ],
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            **FOLDER,
            show_default="the stock cache",
            help="Folder of the plan whose cache is used.",
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Ask in the model's chat template, and print the answer only."),
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="100, or all the model takes",
            help="Largest number of new tokens.",
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(min=0, help="Sampling temperature; 0 is greedy."),
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            help="Probability mass of nucleus sampling, in (0, 1]; needs a --temperature above 0."
        ),
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling (same seed, same text).")] = 0,
    cache: Annotated[
        Path | None,
        typer.Option(
            **FILE,
            show_default="no file",
            help="File of the prompt's stored cache (plan of recipe stored): read if it holds the "
            "beginning of this prompt, written otherwise.",
        ),
    ] = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    offload: OffloadOption = False,
    other_weights: OtherWeightsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write text on the compressed cache, or from a stored one."""
    from manifoldkv.cli import measuring

    given = GivenModel(model, dtype, device, offload)
    known = None if plan is None else GivenPlan(plan, other_weights)
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    show(measuring.generate(given, known, prompt, sampling, cache, chat=chat), as_json)


@app.command()
def evaluate(
    model: ModelArgument,
    plan: PlanOption,
    text: TextOption = None,
    sequences: SequencesOption = 32,
    length: LengthOption = None,
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
    ] = None,
    items: Annotated[int, typer.Option(min=1, help="Number of questions of each task.")] = 20,
    prefill: Annotated[
        Literal["exact", "compressed"],
        typer.Option(
            help="Prompts read by the uncompressed model and only answers from the compressed "
            "cache (exact), or both from the compressed cache (compressed)."
        ),
    ] = "exact",
    seed: Annotated[int, typer.Option(help="Seed of the choice of questions.")] = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    offload: OffloadOption = False,
    other_weights: OtherWeightsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity on held-out text, or answer questions."""
    from manifoldkv.cli import measuring

    given, known = GivenModel(model, dtype, device, offload), GivenPlan(plan, other_weights)
    source = GivenText(text, sequences, length)
    if tasks is None:
        show(measuring.evaluate(given, known, source), as_json)
    else:
        asked = GivenTasks(tasks.split(","), items, prefill, seed)
        show(measuring.answer(given, known, source, asked), as_json)


@app.command()
def export(
    model: ModelArgument,
    plan: PlanOption,
    out: Annotated[Path, typer.Option(**FOLDER, help="Folder to write the checkpoint to.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing checkpoint.")] = False,
    text: TextOption = None,
    sequences: SequencesOption = 8,
    length: LengthOption = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    other_weights: OtherWeightsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a plain checkpoint with the smaller cache.

    The plan is one of the recipe commuting. The checkpoint needs no manifoldkv: transformers and
    other engines load it like any model. Its card says what was lost on held-out text.
    """
    from manifoldkv.cli import exporting

    given, known = GivenModel(model, dtype, device), GivenPlan(plan, other_weights)
    source = GivenText(text, sequences, length)
    show(exporting.export(given, known, out, source, force=force), as_json)


@app.command()
def compare(
    model: ModelArgument,
    first: Annotated[
        Path, typer.Argument(**FOLDER | {"metavar": "FIRST"}, help="Folder of a plan.")
    ],
    second: Annotated[
        Path, typer.Argument(**FOLDER | {"metavar": "SECOND"}, help="Folder of another plan.")
    ],
    text: TextOption = None,
    sequences: SequencesOption = 8,
    length: LengthOption = None,
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
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    offload: OffloadOption = False,
    other_weights: OtherWeightsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show two plans side by side, in numbers and in text."""
    from manifoldkv.cli import comparing

    given = GivenModel(model, dtype, device, offload)
    plans = [GivenPlan(folder, other_weights) for folder in (first, second)]
    source = GivenText(text, sequences, length)
    show(comparing.compare(given, plans, source, prompt, max_new_tokens), as_json)


@app.command()
def inspect(
    plan: Annotated[
        Path,
        typer.Argument(**FOLDER | {"metavar": "PLAN"}, help="Folder of the plan."),
    ],
    as_json: JsonOption = False,
) -> None:
    """Show what a plan stores, and where it comes from."""
    from manifoldkv.cli import planning

    show(planning.inspect(plan), as_json)


@app.command()
def bench(
    model: ModelArgument,
    plan: PlanOption,
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
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    other_weights: OtherWeightsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Time decoding with the compressed cache and without."""
    from manifoldkv.cli import measuring

    given, known = GivenModel(model, dtype, device), GivenPlan(plan, other_weights)
    show(measuring.bench(given, known, tokens, new_tokens, rounds), as_json)


@app.command()
def diagnose(
    model: ModelArgument,
    plan: PlanOption,
    text: TextOption = None,
    sequences: SequencesOption = 8,
    length: LengthOption = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    offload: OffloadOption = False,
    other_weights: OtherWeightsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the error of every layer on held-out text.

    Each layer has the inputs of the uncompressed model and attends to its compressed cache.
    """
    from manifoldkv.cli import measuring

    given, known = GivenModel(model, dtype, device, offload), GivenPlan(plan, other_weights)
    show(measuring.diagnose(given, known, GivenText(text, sequences, length)), as_json)


@app.command()
def report(
    model: ModelArgument,
    plan: PlanOption,
    out: Annotated[Path, typer.Option(**FILE, help="HTML file to write.")] = Path("report.html"),
    text: TextOption = None,
    sequences: SequencesOption = 8,
    length: LengthOption = None,
    self_contained: Annotated[
        bool,
        typer.Option(
            "--self-contained/--no-self-contained",
            help="Embed plotly in the report (one file of 2 MB), or write plotly.min.js beside it.",
        ),
    ] = True,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    offload: OffloadOption = False,
    other_weights: OtherWeightsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write an HTML report of a plan, measured on held-out text."""
    from manifoldkv.cli import measuring

    given, known = GivenModel(model, dtype, device, offload), GivenPlan(plan, other_weights)
    source = GivenText(text, sequences, length)
    show(measuring.report(given, known, source, out, self_contained=self_contained), as_json)


@app.command("list")
def list_registered(as_json: JsonOption = False) -> None:
    """List recipes, objectives, solvers and rank rules."""
    from manifoldkv.cli import listing

    show(listing.listed(), as_json)
