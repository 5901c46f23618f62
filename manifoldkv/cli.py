"""The command ``manifoldkv``: parses, calls, prints."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from transformers.utils.logging import disable_progress_bar

from manifoldkv.basis import Rotary
from manifoldkv.cache import compressed
from manifoldkv.diagnostics import diagnose as measure_layers
from manifoldkv.errors import ExecutorError, ManifoldKVError, OutputError, TextError
from manifoldkv.evaluation.perplexity import compare
from manifoldkv.evaluation.speed import PROMPT, decode_speed
from manifoldkv.layers.capture import capture
from manifoldkv.models.loading import load_model
from manifoldkv.objectives import OBJECTIVES
from manifoldkv.pipeline.compress import compress as find_plan
from manifoldkv.pipeline.config import CompressionConfig
from manifoldkv.pipeline.estimate import Forecast, forecast
from manifoldkv.pipeline.recipes import DEFAULT_RECIPE, RECIPES, recipe_named
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.quantization import BITS, Quantization
from manifoldkv.ranks import RANK_RULES, RankRule
from manifoldkv.registry import Registry
from manifoldkv.reports.plan import template, write_report
from manifoldkv.reports.study import write_study_report
from manifoldkv.runs.executors import RayExecutor, set_threads
from manifoldkv.runs.files import check_writable
from manifoldkv.solvers import SOLVERS
from manifoldkv.solvers.base import check_seed
from manifoldkv.text.sources import HELP as TEXT_HELP
from manifoldkv.text.sources import open_text
from manifoldkv.text.tokens import LENGTH, check_length, checked_tokens, positions, sample_tokens

LOG = logging.getLogger(__name__)

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

FAILED, INTERRUPTED = 2, 130
NEW_TOKENS = 100
COLDEST = 1e-6
"""Below this temperature nothing but the likeliest token is drawn, or logits overflow."""
REPORT_SEQUENCES = 8
"""Of held-out text, on which a report is measured."""


class _Interrupted(Exception):  # noqa: N818 (not an error)
    """Ends a command that Ctrl-C has met, and says what is left of its work."""


def _path(name: str | Path) -> Path:
    """Refuse an empty name, which pathlib takes for the current folder."""
    if not str(name).strip():
        raise typer.BadParameter("the name is empty; the current folder is '.'")
    return Path(name)


FOLDER: dict[str, Any] = {"parser": _path, "metavar": "FOLDER"}
FILE: dict[str, Any] = {"parser": _path, "metavar": "FILE"}

Dtype = Literal["float32", "bfloat16", "float16"]

ModelOption = Annotated[str, typer.Option("--model", help="Folder, or id on the Hub.")]
PlanOption = Annotated[Path, typer.Option("--plan", **FOLDER, help="Folder of a plan.")]
TextOption = Annotated[str, typer.Option("--text", help=f"Text: {TEXT_HELP}.")]
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
    typer.Option("--length", min=2, help=f"Tokens in a window ({LENGTH}, or all the model takes)."),
]


@app.command()
def compress(
    model: ModelOption,
    text: TextOption = "docstrings",
    ratio: Annotated[
        float, typer.Option(help="Largest share of the uncompressed cache, in (0, 1].")
    ] = 0.5,
    recipe: Annotated[
        str, typer.Option(help=f"One of {', '.join(RECIPES)}; see `manifoldkv recipes`.")
    ] = DEFAULT_RECIPE,
    out: Annotated[Path, typer.Option(**FOLDER, help="Folder of the plan.")] = Path("plan"),
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite a plan that is in the folder.")
    ] = False,
    ranks: Annotated[
        str | None,
        typer.Option(
            help="How ranks are chosen, if not as the recipe says: "
            f"{', '.join(RANK_RULES.names())}."
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
        Rotary, typer.Option(help="Keys stored before rotation (better) or after it (faster).")
    ] = "pre",
    bits: Annotated[
        int | None, typer.Option(help=f"Also round latents to integers of so many: {BITS}.")
    ] = None,
    sequences: Annotated[int | None, typer.Option(min=1, help="Calibration windows (64).")] = None,
    length: Annotated[
        int | None, typer.Option(min=2, help="Tokens in a window (512, or all the model takes).")
    ] = None,
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
    if threads is not None:
        set_threads(threads)
    quantization = None if bits is None else Quantization(bits)
    if report is not None:
        _check_report(report)
    if ray_address is not None and executor != "ray":
        raise ExecutorError(f"--ray-address {ray_address} goes with --executor ray")
    if not dry_run:
        _check_overwrites(out, work, force)
    config = CompressionConfig(
        ratio=ratio,
        recipe=recipe,
        ranks=_rank_rule(recipe, ranks, rank_multiple),
        rotary=rotary,
        quantization=quantization,
        seed=seed,
        sequences=sequences,
        length=length,
        context=context,
    )
    source = open_text(text)
    loaded, tokenizer = _load(model, dtype, device, offload)
    if dry_run:
        foretold = forecast(loaded, source, config)
        _print(asdict(foretold), _forecast_lines(foretold), as_json)
        return
    runs = RayExecutor(ray_address) if executor == "ray" else executor
    check_writable(out)
    if report is not None:
        check_writable(report.parent)
        held_out = _held_out(loaded, tokenizer, text, REPORT_SEQUENCES, length)
    with _resumable(work):
        plan = find_plan(loaded, source, config, folder=work, executor=runs)
    plan.save(out)
    if report is not None:
        write_report(report, loaded, plan, held_out, folder=out)
    lines = [*_plan_lines(plan), f"plan: {out}", *([f"report: {report}"] if report else [])]
    _print(_plan_facts(plan) | {"plan": str(out)}, lines, as_json)


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
        typer.Option(min=1, help=f"At most so many ({NEW_TOKENS}, or all the model takes)."),
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
    check_seed(seed)
    loaded, tokenizer = _load(model, dtype, device, offload)
    known = None if plan is None else _plan_for(plan, loaded, other_weights)
    inputs = tokenizer(prompt, return_tensors="pt").to(loaded.device)
    count = _new_tokens(loaded, inputs["input_ids"], max_new_tokens)
    torch.manual_seed(seed)
    options: dict[str, Any] = {"max_new_tokens": count, "do_sample": False}
    if temperature > COLDEST:
        options |= {"do_sample": True, "temperature": temperature}
    facts: dict[str, Any] = {}
    if known is None:
        output = loaded.generate(**inputs, **options)
    else:
        with compressed(loaded, known) as new_cache:
            cache = new_cache()
            output = loaded.generate(**inputs, **options, past_key_values=cache)
        facts["cache_bytes"] = cache.nbytes()
    written = tokenizer.decode(output[0], skip_special_tokens=True)
    facts |= {"text": written, "tokens": output.shape[1]}
    _print(facts, [written], as_json)


@app.command()
def evaluate(
    model: ModelOption,
    plan: PlanOption,
    text: TextOption = "docstrings",
    sequences: SequencesOption = 32,
    length: LengthOption = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    offload: OffloadOption = False,
    other_weights: OtherWeightsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity on held-out text, with the compressed cache and without."""
    loaded, tokenizer = _load(model, dtype, device, offload)
    known = _plan_for(plan, loaded, other_weights)
    tokens = _held_out(loaded, tokenizer, text, sequences, length)
    found = compare(loaded, tokens, known)
    length = tokens.shape[1]
    facts = {
        "uncompressed_perplexity": found.uncompressed.perplexity,
        "compressed_perplexity": found.compressed.perplexity,
        "added_nll": found.added_nll,
        "standard_error": found.standard_error,
        "ratio": known.ratio_at(length),
        "cache_bytes": known.nbytes(length, dtype=loaded.dtype),
    }
    error = f" ± {found.standard_error:.4f}" if sequences > 1 else ""
    lines = [
        f"perplexity of {sequences} × {length} held-out tokens",
        f"  uncompressed  {found.uncompressed.perplexity:.3f}",
        f"  compressed    {found.compressed.perplexity:.3f}  (ratio {facts['ratio']:.3f})",
        f"  added         {found.added_nll:.4f}{error} nats per token",
    ]
    _print(facts, lines, as_json)


@app.command()
def inspect(plan: PlanOption, as_json: JsonOption = False) -> None:
    """Show what a plan stores, and where it comes from."""
    known = CompressionPlan.load(plan)
    _print(_plan_facts(known), _plan_lines(known), as_json)


@app.command()
def bench(
    model: ModelOption,
    plan: PlanOption,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Cached when decoding begins ({PROMPT}, or what the model takes).",
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
    loaded, _ = _load(model, dtype, device, offload=False)
    known = _plan_for(plan, loaded, other_weights)
    found = decode_speed(loaded, known, tokens=tokens, new_tokens=new_tokens, rounds=rounds)
    lines = [
        f"one token after {found.tokens}, {torch.get_num_threads()} threads, {rounds} rounds",
        f"  stock       {1e3 * found.stock_seconds:8.2f} ms  {_size(found.stock_bytes)}",
        f"  compressed  {1e3 * found.compressed_seconds:8.2f} ms  {_size(found.compressed_bytes)}",
        f"  compressed / stock: {found.time_ratio:.2f} of the time, "
        f"{found.compressed_bytes / found.stock_bytes:.3f} of the bytes",
    ]
    _print(asdict(found), lines, as_json)


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
    loaded, tokenizer = _load(model, dtype, device, offload)
    known = _plan_for(plan, loaded, other_weights)
    bases = {index: (layer.key, layer.value) for index, layer in enumerate(known.layers)}
    tokens = _held_out(loaded, tokenizer, text, sequences, length)
    LOG.info("measuring %d layers on %d × %d tokens", len(known.layers), *tokens.shape)
    layers = capture(loaded, tokens)
    table = measure_layers(layers, bases, rotary=known.rotary)
    table.insert(1, "key_rank", [layer.key.rank for layer in known.layers])
    table.insert(2, "value_rank", [layer.value.rank for layer in known.layers])
    rows = table.to_dict("records")
    lines = table.to_string(index=False, float_format="{:.4f}".format).splitlines()
    _print({"layers": rows}, lines, as_json)


@app.command()
def report(
    study: Annotated[Path, typer.Option(**FOLDER, help="Folder that a study has written.")],
    out: Annotated[Path, typer.Option(**FILE, help="HTML file.")] = Path("report.html"),
) -> None:
    """Put what a study wrote into one HTML file."""
    write_study_report(study, out)
    print(f"report: {out}")


@app.command()
def objectives(as_json: JsonOption = False) -> None:
    """List the registered objectives."""
    _print_named(_described(OBJECTIVES), as_json)


@app.command()
def solvers(as_json: JsonOption = False) -> None:
    """List the registered solvers."""
    _print_named(_described(SOLVERS), as_json)


@app.command()
def recipes(as_json: JsonOption = False) -> None:
    """List the recipes and what they are made of."""
    facts = {name: recipe.describe() for name, recipe in RECIPES.items()}
    lines = []
    for name, parts in facts.items():
        lines += [name, *(f"  {part:15} {_part(value)}" for part, value in parts.items())]
    _print(facts, lines, as_json)


def _part(value: Any) -> str:
    """Return a field of a recipe as a line shows it: a method by its name and its fields."""
    if not isinstance(value, dict):
        return str(value)
    fields = ", ".join(f"{name}={field}" for name, field in value.items() if name != "name")
    return f"{value['name']}({fields})" if fields else str(value["name"])


def main() -> None:
    """Run the command, with every error of ours as one line."""
    results = io.StringIO()
    # Where standard error is closed nobody reads what is said there.
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stderr(sys.stderr or nowhere):
        if not sys.stderr.isatty():
            disable_progress_bar()
        with _phases_said(), redirect_stdout(results):
            code = _run()
        sys.exit(_delivered(results.getvalue()) or code)


def _run() -> int:
    """Run the command; the exit code."""
    try:
        if sys.__stdout__ is None:
            raise OutputError("standard output is closed: there is nowhere to print results")
        app(standalone_mode=True)
    except _Interrupted as interruption:
        return _complain(interruption, INTERRUPTED)
    except ManifoldKVError as error:
        return _complain(error, FAILED)
    except SystemExit as ended:
        code = int(ended.code or 0)
        return _complain("interrupted", code) if code == INTERRUPTED else code
    return 0


def _complain(what: object, code: int) -> int:
    with suppress(OSError):  # where standard error is full, the code has to do
        print(f"manifoldkv: {what}", file=sys.stderr, flush=True)
    return code


@contextmanager
def _phases_said() -> Iterator[None]:
    """Print what the library logs as it goes on standard error, a line with the time of day each.

    Progress bars are for terminals; these lines also tell who reads a log hours later.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger = logging.getLogger("manifoldkv")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _delivered(results: str) -> int:
    """Print all results at once; the exit code if that does not work, else 0.

    Whoever stops reading (``| head -1``) has what was wanted: that is no failure.
    """
    if not results:
        return 0
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):  # not every encoding has every character
            sys.stdout.reconfigure(errors="backslashreplace")
        sys.stdout.write(results)
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0
        return _complain(f"cannot write to standard output: {error.strerror}", FAILED)
    return 0


def _load(name: str, dtype: Dtype, device: str, offload: bool) -> Any:
    return load_model(name, dtype=getattr(torch, dtype), device=device, offload=offload)


def _rank_rule(recipe: str, name: str | None, multiple: int | None) -> RankRule:
    """Return the rank rule of the recipe or of another name, with its multiple set if there is one.

    Raises
    ------
    UnknownNameError
        If there is no recipe or rule of the name.
    """
    rule = recipe_named(recipe).ranks if name is None else RANK_RULES.resolve(name)
    return rule if multiple is None else replace(rule, multiple=multiple)


def _check_overwrites(out: Path, work: Path | None, force: bool) -> None:
    """Refuse to overwrite a plan, unless it is told to or the folder is the run's own."""
    own = work is not None and work.resolve() == out.resolve()
    if not force and not own and any((out / name).exists() for name in CompressionPlan.FILES):
        raise OutputError(
            f"{out} holds a plan already: take another folder as --out, or --force to overwrite it"
        )


def _check_report(report: Path) -> None:
    """Refuse what is found only when a report is written, after hours."""
    if report.suffix != ".html" or report.is_dir():
        raise OutputError(f"--report {report} is no file that ends in .html")
    template("plan.html")  # raises if a library is absent


@contextmanager
def _resumable(work: Path | None) -> Iterator[None]:
    """Say what is left of the work inside the block if Ctrl-C ends it."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        left = "nothing is saved; with --work FOLDER a run goes on where it was"
        if work is not None:
            left = f"what is finished is in {work}; the same command goes on from there"
        raise _Interrupted(f"interrupted: {left}") from interruption


def _new_tokens(model: Any, prompt: torch.Tensor, wanted: int | None) -> int:
    """How many tokens to add to a prompt (1, length): as many as wanted, if the model takes them.

    Raises
    ------
    TextError
        If the prompt is empty, or too long.
    """
    if not prompt.numel():
        raise TextError("the prompt has no token: write something after --prompt")
    checked_tokens(model, prompt)
    room = positions(model) - prompt.shape[1]
    if room < (wanted or 1):
        raise TextError(
            f"{wanted or 1} new tokens after a prompt of {prompt.shape[1]} are more than the "
            f"{positions(model)} positions of the model"
        )
    return min(NEW_TOKENS, room) if wanted is None else wanted


def _plan_for(folder: Path, model: Any, other_weights: bool) -> CompressionPlan:
    plan = CompressionPlan.load(folder)
    if other_weights:
        return plan.transferred_to(model)
    plan.check_model(model)
    return plan


def _held_out(
    model: Any, tokenizer: Any, text: str, sequences: int, length: int | None
) -> torch.Tensor:
    """Windows of the held-out part of a text, refused if the model cannot read them."""
    length = min(LENGTH, positions(model)) if length is None else length
    check_length(model, length)
    LOG.info("reading %d × %d held-out tokens of %s", sequences, length, text)
    tokens = sample_tokens(
        open_text(text), tokenizer, sequences=sequences, length=length, split="held-out"
    )
    return checked_tokens(model, tokens)


def _print(facts: dict[str, Any], lines: list[str], as_json: bool) -> None:
    print(json.dumps(_finite(facts), indent=2) if as_json else "\n".join(lines))


def _finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print_named(named: dict[str, str], as_json: bool) -> None:
    width = max(map(len, named))
    _print(named, [f"{name:{width}}  {said}" for name, said in named.items()], as_json)


def _described(registry: Registry[Any]) -> dict[str, str]:
    named = {}
    for name in registry.names():
        said = (registry.get(name).__doc__ or "").strip().splitlines()
        named[name] = said[0] if said else ""
    return named


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _forecast_lines(foretold: Forecast) -> list[str]:
    parts = ", ".join(f"{part} {_duration(s)}" for part, s in foretold.seconds.items() if s > 0)
    return [
        f"time    about {_duration(sum(foretold.seconds.values()))} ({parts})",
        f"memory  {_size(foretold.weight_bytes)} of weights, "
        f"{_size(foretold.activation_bytes)} of activations (in files where they do not fit)",
        f"cache   at most {_size(foretold.cache_bytes)} per token, "
        f"{_size(foretold.stock_bytes)} uncompressed",
        "Nothing was saved: leave --dry-run out to run it.",
    ]


def _plan_facts(plan: CompressionPlan) -> dict[str, Any]:
    return {
        "ratio": plan.ratio,
        "bytes_per_token": plan.bytes_per_token(),
        "basis_bytes": plan.basis_nbytes(),
        "rotary": plan.rotary,
        "recent": plan.recent,
        "quantization": None if plan.quantization is None else asdict(plan.quantization),
        "provenance": asdict(plan.provenance),
        "layers": [
            {
                "key_rank": layer.key.rank,
                "value_rank": layer.value.rank,
                "head_dim": layer.key.head_dim,
                "key_grouping": layer.key.grouping.name,
                "value_grouping": layer.value.grouping.name,
                "window": layer.window,
            }
            for layer in plan.layers
        ],
    }


def _plan_lines(plan: CompressionPlan) -> list[str]:
    said, first = plan.provenance, plan.layers[0]
    kept = f"the newest {plan.recent} tokens as they are, " if plan.recent else ""
    rounding = plan.quantization
    rounded = f", {rounding.bits} bits ({rounding.layout})" if rounding else ""
    return [
        f"model   {said.model}",
        f"bases   {said.method('objective')} by {said.method('solver')} on {said.sequences} × "
        f"{said.length} tokens of {said.text}, seed {said.seed}, {said.threads} threads, "
        f"{said.tuning_steps} steps tuned",
        f"cache   ratio {plan.ratio:.4g} at {said.context} tokens, "
        f"{plan.bytes_per_token():g} bytes per further token in bfloat16{rounded}",
        f"        {kept}keys {plan.rotary}-rotation",
        f"heads   keys {first.key.grouping.name}, values {first.value.grouping.name}; bases take "
        f"{_size(plan.basis_nbytes())} once",
        "layer   key rank  value rank  (of head_dim)",
        *(
            f"{index:5}   {layer.key.rank:8}  {layer.value.rank:10}  ({layer.key.head_dim})"
            for index, layer in enumerate(plan.layers)
        ),
    ]
