"""The commands and their arguments; what they do is imported when one is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from manifoldkv.cli.answers import show
from manifoldkv.cli.options import (
    FILE,
    FOLDER,
    DeviceOption,
    DtypeOption,
    GivenModel,
    GivenPlan,
    GivenTasks,
    GivenText,
    JsonOption,
    LengthOption,
    ModelOption,
    OffloadOption,
    OtherWeightsOption,
    PlanOption,
    SequencesOption,
    TextOption,
)

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="""Low-rank bases for the key-value cache of language models.

A model, some text and a ratio make a plan; the plan makes the model run on the smaller cache.

Results are printed on standard output when all is done (with --json as one JSON object), a line
for each phase of the work and errors on standard error. Exit codes: 0 done; 2 the input cannot be
used or the work cannot be done, and the message says why; 130 interrupted. A run that was given
--work goes on where it was.""",
)


@app.command()
def compress(
    model: ModelOption,
    text: TextOption = "docstrings",
    ratio: Annotated[
        float, typer.Option(help="Largest share of the uncompressed cache, in (0, 1].")
    ] = 0.5,
    recipe: Annotated[
        str, typer.Option(help="What is done; `manifoldkv recipes` lists them.")
    ] = "best",
    out: Annotated[Path, typer.Option(**FOLDER, help="Folder of the plan.")] = Path("plan"),
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite a plan that is in the folder.")
    ] = False,
    ranks: Annotated[
        str | None,
        typer.Option(
            help="How ranks are chosen, if not as the recipe says: uniform, sequential, threshold, "
            "optimal, or a rule of your own."
        ),
    ] = None,
    rank_multiple: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks are multiples of it, or full: 8 or 16 suit GPU kernels."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that the ratio is kept for (those of a window)."),
    ] = None,
    rotary: Annotated[
        Literal["pre", "post"],
        typer.Option(help="Keys stored before rotation (better) or after it (faster)."),
    ] = "pre",
    bits: Annotated[
        int | None, typer.Option(help="Also round latents to integers of so many: 8, 4, 3 or 2.")
    ] = None,
    sequences: Annotated[int | None, typer.Option(min=1, help="Calibration windows (64).")] = None,
    length: LengthOption = None,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    threads: Annotated[
        int | None, typer.Option(help="The same seed gives the same plan on as many.")
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(**FOLDER, help="Folder of checkpoints, from which a killed run goes on."),
    ] = None,
    executor: Annotated[
        Literal["local", "ray"], typer.Option(help="Where bases are found.")
    ] = "local",
    ray_address: Annotated[
        str | None, typer.Option(help="Of a running Ray cluster; one is started if omitted.")
    ] = None,
    offload: OffloadOption = False,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    report: Annotated[
        Path | None,
        typer.Option(**FILE, help="Also write an HTML report (with measurements) here."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only estimate time, memory and bytes.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find a plan for a model and save it."""
    from manifoldkv.cli import planning

    request = planning.Request(
        model=GivenModel(model, dtype, device, offload),
        text=text,
        ratio=ratio,
        recipe=recipe,
        ranks=ranks,
        rank_multiple=rank_multiple,
        context=context,
        rotary=rotary,
        bits=bits,
        sequences=sequences,
        length=length,
        seed=seed,
        threads=threads,
        executor=executor,
        ray_address=ray_address,
    )
    if dry_run:
        show(planning.estimate(request), as_json)
    else:
        show(planning.compress(request, out, work, report, force=force), as_json)


@app.command()
def generate(
    model: ModelOption,
    prompt: Annotated[str, typer.Option(help="What the text begins with.")],
    plan: Annotated[
        Path | None,
        typer.Option("--plan", **FOLDER, help="Folder of a plan; the stock cache if omitted."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="At most so many (100, or all the model takes)."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the choice of tokens.")] = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    offload: OffloadOption = False,
    other_weights: OtherWeightsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write text on the compressed cache."""
    from manifoldkv.cli import measuring

    given = GivenModel(model, dtype, device, offload)
    known = None if plan is None else GivenPlan(plan, other_weights)
    show(measuring.generate(given, known, prompt, max_new_tokens, temperature, seed), as_json)


@app.command()
def evaluate(
    model: ModelOption,
    plan: PlanOption,
    text: TextOption = "docstrings",
    sequences: SequencesOption = 32,
    length: LengthOption = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="Ask questions that look back instead: passkey, copying, key-value, and of RULER "
            "(pip install manifoldkv[eval]) niah_single_1, niah_multikey_2, niah_multikey_3, "
            "ruler_vt, ruler_cwe, ruler_fwe. --length is that of a prompt (1024, or half of what "
            "the model takes).",
        ),
    ] = None,
    items: Annotated[int, typer.Option(min=1, help="Questions of each task.")] = 20,
    prefill: Annotated[
        Literal["exact", "compressed"],
        typer.Option(
            help="Whether the prompt of a question is read as it is and only its answer from the "
            "compressed cache, or the prompt too."
        ),
    ] = "exact",
    seed: Annotated[int, typer.Option(help="Of the questions.")] = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    offload: OffloadOption = False,
    other_weights: OtherWeightsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity on held-out text, or answer questions, beside the uncompressed model."""
    from manifoldkv.cli import measuring

    given, known = GivenModel(model, dtype, device, offload), GivenPlan(plan, other_weights)
    source = GivenText(text, sequences, length)
    if tasks is None:
        show(measuring.evaluate(given, known, source), as_json)
    else:
        asked = GivenTasks(tasks.split(","), items, prefill, seed)
        show(measuring.answer(given, known, source, asked), as_json)


@app.command()
def inspect(plan: PlanOption, as_json: JsonOption = False) -> None:
    """Show what a plan stores, and where it comes from."""
    from manifoldkv.cli import planning

    show(planning.inspect(plan), as_json)


@app.command()
def bench(
    model: ModelOption,
    plan: PlanOption,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Cached when decoding begins (512, or what the model takes).",
        ),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Decoded in every turn.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each cache.")] = 3,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    other_weights: OtherWeightsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Time decoding on this machine, with the compressed cache and without, in turns."""
    from manifoldkv.cli import measuring

    given, known = GivenModel(model, dtype, device), GivenPlan(plan, other_weights)
    show(measuring.bench(given, known, tokens, new_tokens, rounds), as_json)


@app.command()
def diagnose(
    model: ModelOption,
    plan: PlanOption,
    text: TextOption = "docstrings",
    sequences: SequencesOption = 8,
    length: LengthOption = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    offload: OffloadOption = False,
    other_weights: OtherWeightsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure what the bases do to every layer by itself, on held-out text.

    Newest tokens that a plan keeps exact count as projected here.
    """
    from manifoldkv.cli import measuring

    given, known = GivenModel(model, dtype, device, offload), GivenPlan(plan, other_weights)
    show(measuring.diagnose(given, known, GivenText(text, sequences, length)), as_json)


@app.command()
def report(
    study: Annotated[Path, typer.Option(**FOLDER, help="Folder that a study has written.")],
    out: Annotated[Path, typer.Option(**FILE, help="HTML file.")] = Path("report.html"),
) -> None:
    """Put what a study wrote into one HTML file."""
    from manifoldkv.reports.study import write_study_report

    write_study_report(study, out)
    print(f"report: {out}")


@app.command()
def objectives(as_json: JsonOption = False) -> None:
    """List the registered objectives."""
    from manifoldkv.cli import listing

    show(listing.objectives(), as_json)


@app.command()
def solvers(as_json: JsonOption = False) -> None:
    """List the registered solvers."""
    from manifoldkv.cli import listing

    show(listing.solvers(), as_json)


@app.command()
def recipes(as_json: JsonOption = False) -> None:
    """List the recipes and what they are made of."""
    from manifoldkv.cli import listing

    show(listing.recipes(), as_json)
