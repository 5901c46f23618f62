"""The command ``manifoldkv``: parses, calls, prints."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from transformers.utils.logging import disable_progress_bar

from manifoldkv.activations import Rotary, capture
from manifoldkv.cache import compressed
from manifoldkv.calibration import HELP as TEXT_HELP
from manifoldkv.calibration import open_text, sample_tokens
from manifoldkv.compress import compress as find_plan
from manifoldkv.diagnostics import diagnose as measure_layers
from manifoldkv.errors import ExecutorError, ManifoldKVError, OutputError
from manifoldkv.evaluation.perplexity import compare
from manifoldkv.evaluation.speed import decode_speed
from manifoldkv.forecast import Forecast, forecast
from manifoldkv.loading import load_model
from manifoldkv.objectives import OBJECTIVES
from manifoldkv.output import check_writable
from manifoldkv.plan import BITS, CompressionPlan, Quantization
from manifoldkv.ranks import RANK_RULES
from manifoldkv.recipes import DEFAULT_RECIPE, RECIPES
from manifoldkv.registry import Registry
from manifoldkv.report import template, write_report
from manifoldkv.runs.executors import RayExecutor
from manifoldkv.solvers import SOLVERS
from manifoldkv.study_report import write_study_report

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="""Low-rank bases for the key-value cache of language models.

A model, some text and a ratio make a plan; the plan makes the model run on the smaller cache.

Results are printed on standard output (with --json as one JSON object), progress and errors on
standard error. Exit codes: 0 done; 2 the input cannot be used or the work cannot be done, and the
message says why; 130 interrupted. What a run has found so far is kept if it was given --work.""",
)


Dtype = Literal["float32", "bfloat16", "float16"]

ModelOption = Annotated[str, typer.Option("--model", help="Folder, or id on the Hub.")]
PlanOption = Annotated[str, typer.Option("--plan", help="Folder of a plan.")]
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
LengthOption = Annotated[int, typer.Option("--length", min=2, help="Tokens in a window.")]


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
    out: Annotated[Path, typer.Option(help="Folder of the plan.")] = Path("plan"),
    ranks: Annotated[
        str | None,
        typer.Option(
            help="How ranks are chosen, if not as the recipe says: "
            f"{', '.join(RANK_RULES.names())}."
        ),
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
        int | None, typer.Option(min=1, help="The same seed gives the same plan on as many.")
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="Keep what is finished here; a killed run goes on from it.")
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
        Path | None, typer.Option(help="Also write an HTML report (with measurements) here.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only foretell time, memory and bytes.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find a plan for a model and save it."""
    if threads is not None:
        torch.set_num_threads(threads)
    quantization = None if bits is None else Quantization(bits)
    if report is not None:
        if report.suffix != ".html":
            raise OutputError(f"--report {report} does not end in .html")
        template("plan.html")  # an absent library is named before hours are spent
    if ray_address is not None and executor != "ray":
        raise ExecutorError(f"--ray-address {ray_address} goes with --executor ray")
    loaded, tokenizer = _load(model, dtype, device, offload)
    how: dict[str, Any] = {
        "ratio": ratio,
        "recipe": recipe,
        "ranks": ranks,
        "rotary": rotary,
        "sequences": sequences,
        "length": length,
    }
    source = open_text(text)
    if dry_run:
        foretold = forecast(loaded, source, **how)
        _print(asdict(foretold), _forecast_lines(foretold), as_json)
        return
    runs = RayExecutor(ray_address) if executor == "ray" else executor
    for folder in {out} if report is None else {out, report.parent}:
        check_writable(folder)
    plan = find_plan(
        loaded,
        source,
        quantization=quantization,
        seed=seed,
        folder=work,
        executor=runs,
        **how,
    )
    plan.save(out)
    if report is not None:
        held_out = _held_out(tokenizer, text, 8, plan.provenance.length)
        write_report(report, loaded, plan, held_out, folder=out)
    lines = [*_plan_lines(plan), f"plan: {out}", *([f"report: {report}"] if report else [])]
    _print(_plan_facts(plan) | {"plan": str(out)}, lines, as_json)


@app.command()
def generate(
    model: ModelOption,
    prompt: Annotated[str, typer.Option(help="What the text begins with.")],
    plan: Annotated[
        str | None, typer.Option("--plan", help="Folder of a plan; the stock cache if omitted.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="At most so many.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the choice of tokens.")] = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    offload: OffloadOption = False,
    other_weights: OtherWeightsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write text on the compressed cache."""
    loaded, tokenizer = _load(model, dtype, device, offload)
    known = None if plan is None else _plan_for(plan, loaded, other_weights)
    inputs = tokenizer(prompt, return_tensors="pt").to(loaded.device)
    torch.manual_seed(seed)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options["temperature"] = temperature
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
    length: LengthOption = 512,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    offload: OffloadOption = False,
    other_weights: OtherWeightsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity on held-out text, with the compressed cache and without."""
    loaded, tokenizer = _load(model, dtype, device, offload)
    known = _plan_for(plan, loaded, other_weights)
    found = compare(loaded, _held_out(tokenizer, text, sequences, length), known)
    facts = {
        "uncompressed_perplexity": found.uncompressed.perplexity,
        "compressed_perplexity": found.compressed.perplexity,
        "added_nll": found.added_nll,
        "standard_error": found.standard_error if sequences > 1 else None,
        "ratio": known.ratio_at(length),
        "cache_bytes": known.nbytes(length, dtype=loaded.dtype),
    }
    lines = [
        f"perplexity of {sequences} × {length} held-out tokens",
        f"  uncompressed  {found.uncompressed.perplexity:.3f}",
        f"  compressed    {found.compressed.perplexity:.3f}  (ratio {facts['ratio']:.3f})",
        f"  added         {found.added_nll:.4f} ± {found.standard_error:.4f} nats per token",
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
    tokens: Annotated[int, typer.Option(min=1, help="Cached when decoding begins.")] = 512,
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
        f"one token after {tokens}, {torch.get_num_threads()} threads, {rounds} rounds",
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
    length: LengthOption = 512,
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
    layers = capture(loaded, _held_out(tokenizer, text, sequences, length))
    table = measure_layers(layers, bases, rotary=known.rotary)
    table.insert(1, "key_rank", [layer.key.rank for layer in known.layers])
    table.insert(2, "value_rank", [layer.value.rank for layer in known.layers])
    rows = table.to_dict("records")
    lines = table.to_string(index=False, float_format="{:.4f}".format).splitlines()
    _print({"layers": rows}, lines, as_json)


@app.command()
def report(
    study: Annotated[Path, typer.Option(help="Folder that a study has written.")],
    out: Annotated[Path, typer.Option(help="HTML file.")] = Path("report.html"),
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
    if not sys.stderr.isatty():
        disable_progress_bar()
    try:
        app(standalone_mode=True)
    except ManifoldKVError as error:
        print(f"manifoldkv: {error}", file=sys.stderr)
        sys.exit(2)


def _load(name: str, dtype: Dtype, device: str, offload: bool) -> Any:
    return load_model(name, dtype=getattr(torch, dtype), device=device, offload=offload)


def _plan_for(folder: str, model: Any, other_weights: bool) -> CompressionPlan:
    plan = CompressionPlan.load(folder)
    if other_weights:
        return plan.transferred_to(model)
    plan.check_model(model)
    return plan


def _held_out(tokenizer: Any, text: str, sequences: int, length: int) -> torch.Tensor:
    source = open_text(text)
    return sample_tokens(source, tokenizer, sequences=sequences, length=length, split="held-out")


def _print(facts: dict[str, Any], lines: list[str], as_json: bool) -> None:
    print(json.dumps(facts, indent=2) if as_json else "\n".join(lines))


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
