"""What would a large model cost? Measured on layers of its shape, extrapolated to the whole.

    python studies/scale.py
    python studies/scale.py --shape qwen3-8b --layers 2 4 --sequences 16 48

A checkpoint of a few decoder layers of the model's exact shape with random weights is written into
--work (8 layers of Llama-3-70B are 14 GB) and removed at the end. Each measurement is a process of
its own that reads it layer by layer, captures calibration text, takes solver steps on keys and on
values of every layer, and reports its peak resident memory, the seconds of a layer, and the counted
floating-point operations of a step. Memory should not grow with the layers, and by a line with the
calibration tokens (from 8 sequences on, as so many run at a time); it is measured of a closed form
too, which stores less. Time on other hardware is
operations over a stated sustained rate. Writes results.csv, summary.md and two figures into --out;
what is measured is on disk before the next measurement begins, and is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from manifoldkv import (
    KQSVD,
    SOLVERS,
    Batch,
    HeadGrouping,
    LayerOutput,
    ManifoldKVError,
    Problem,
    RiemannianAdam,
    capture,
)
from manifoldkv.basis import Site
from manifoldkv.figures import Mark, legend_below
from manifoldkv.figures.palette import BLUE, GREEN, VERMILLION
from manifoldkv.figures.style import label_axes, title_above
from manifoldkv.layers.activations import LayerActivations
from manifoldkv.models.offloading import load_offloaded
from manifoldkv.objectives.gram import GramObjective
from manifoldkv.runs.checkpoints import Checkpoints
from manifoldkv.runs.files import check_writable

VOCABULARY = 1024
"""Of the small models; the real one's embeddings are added by arithmetic."""


@dataclass(frozen=True)
class Shape:
    """A real model: the configuration of its layers, how many it has, and its vocabulary."""

    config: PreTrainedConfig
    layers: int
    vocabulary: int


def _llama(hidden: int, mlp: int, heads: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=VOCABULARY,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )


SHAPES = {
    "llama-3-8b": Shape(_llama(4096, 14336, 32), 32, 128256),
    "llama-3-70b": Shape(_llama(8192, 28672, 64), 80, 128256),
    "qwen3-8b": Shape(
        Qwen3Config(
            hidden_size=4096,
            intermediate_size=12288,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=VOCABULARY,
        ),
        36,
        151936,
    ),
}
SHAPE_MARKS = {
    "llama-3-8b": Mark(BLUE, "o"),
    "llama-3-70b": Mark(VERMILLION, "s"),
    "qwen3-8b": Mark(GREEN, "^"),
}
PAPER_SEQUENCES, PAPER_LENGTH, PAPER_RANKS, PAPER_EPOCHS = 512, 2048, 5, 50
"""The paper's calibration: sequences, their length, ranks trained per site, and epochs at most."""


FAST = RiemannianAdam()
CLOSED, STEPS = "closed-form", "riemannian-adam"
MEASURE = "--measure"
SLOW_RATES = {CLOSED: 0.8, "predictor": 40.0, STEPS: 10.0}
"""TFLOP/s that solving may fall to: float64 on a card that has a 32nd to a 64th of its rate for it
(a 24 GB workstation card), whole sequences of one layer at a time, and sampled steps of two
milliseconds, which are bound by launches and memory."""
SITES: tuple[Site, Site] = ("key", "value")
GIB = 2**30


def main() -> int:
    if sys.argv[1:2] == [MEASURE]:  # one measurement, in a process of its own
        print(json.dumps(measure(**json.loads(sys.argv[2]))))
        return 0
    parser = common.Parser(__doc__)
    add = parser.add_argument
    known = list(SHAPES)
    add("--shape", nargs="+", choices=known, default=known[:2], help="(%(default)s)")
    add("--layers", nargs="+", type=int, default=[2, 4, 8], help="layers built (%(default)s)")
    add(
        "--sequences",
        nargs="+",
        type=int,
        default=[8, 32, 64],
        help="calibration sequences; layers are varied at the first, these at the fewest layers "
        "(%(default)s)",
    )
    add("--sequence-length", type=int, default=128, help="(%(default)s)")
    add("--steps", type=int, default=5, help="solver steps per layer and site (%(default)s)")
    add("--rate", type=float, default=100, help="TFLOP/s sustained elsewhere (%(default)s)")
    add("--work", type=common.folder_named, help="folder for the checkpoints (the temporary one)")
    parser.add_threads()
    parser.add_out("figures/scale")
    return common.run_study(parser, study)


def study(given: argparse.Namespace) -> None:
    numbers = (*given.layers, *given.sequences, given.sequence_length, given.steps)
    if min(numbers) < 1 or not given.rate > 0:
        raise ManifoldKVError("layers, sequences, lengths, steps and rate must be positive")
    out = common.output_folder(given, "scale")
    if given.redraw:
        common.draw(out, draw)
        return
    check_writable(given.work or Path(tempfile.gettempdir()))
    results = measure_all(given, common.stored_in(out, given))
    results.to_csv(out / "results.csv", index=False)
    common.draw(out, draw)
    common.write_summary(out, summary(results, given.rate))


def measure_all(given: argparse.Namespace, checkpoints: Checkpoints) -> pd.DataFrame:
    """Return a row per shape, number of layers and calibration size, each from a fresh process."""
    layers, sequences = sorted(set(given.layers)), sorted(set(given.sequences))
    sizes = [(STEPS, count, sequences[0]) for count in layers]
    sizes += [(STEPS, layers[0], count) for count in sequences[1:]]
    sizes += [(CLOSED, layers[0], count) for count in sequences]
    settings = [
        {"shape": shape, "solver": solver, "layers": count, "sequences": many}
        | {"length": given.sequence_length, "steps": given.steps, "threads": given.threads}
        for shape in given.shape
        for solver, count, many in sizes
    ]
    checkpoints = checkpoints.made_by(LayerOutput, KQSVD, RiemannianAdam)
    frames = []
    folder = Path(tempfile.mkdtemp(prefix="scale-", dir=given.work))
    written = ""
    try:
        for setting in tqdm(settings, desc="measurements", disable=None):
            stored = checkpoints.keyed(**setting)
            if not stored.has_frame("measurement") and setting["shape"] != written:
                written = str(setting["shape"])
                write_checkpoints(written, layers, folder)
            run = partial(measured_apart, setting, folder / str(setting["layers"]))
            frames.append(stored.frame("measurement", run).assign(**setting))
    finally:
        shutil.rmtree(folder)
    return (
        pd.concat(frames, ignore_index=True)
        .sort_values(["solver", "layers", "sequences"], ignore_index=True, kind="stable")
        .sort_values("shape", key=lambda names: names.map(list(SHAPES).index), kind="stable")
    )


def measured_apart(setting: dict[str, Any], checkpoint: Path) -> pd.DataFrame:
    """Return one measurement, made in a process of its own, whose memory is all its own."""
    job = json.dumps(setting | {"checkpoint": str(checkpoint)})
    command = [sys.executable, __file__, MEASURE, job]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        reason = (run.stderr.strip().splitlines() or ["killed, probably out of memory"])[-1]
        raise ManifoldKVError(f"{setting} failed: {reason}")
    return pd.DataFrame([json.loads(run.stdout.splitlines()[-1])])


def write_checkpoints(shape: str, counts: list[int], folder: Path) -> None:
    """Checkpoints in bfloat16 with so many layers each, a shard per layer, in folders by count.

    Weights are about as large as trained ones. No two layers are in memory, or on disk twice.
    """
    shutil.rmtree(folder)
    folder.mkdir()
    weight_map: dict[str, str] = {}
    model = _without_weights(shape, max(counts))
    for name, _ in model.named_parameters():
        part = name.split(".layers.")[-1].split(".")[0] if ".layers." in name else "rest"
        weight_map[name] = f"{part}.safetensors"
    for index, shard in enumerate(dict.fromkeys(weight_map.values())):
        generator = torch.Generator().manual_seed(index)
        tensors = {
            name: _random(name, parameter.shape, generator)
            for name, parameter in model.named_parameters()
            if weight_map[name] == shard
        }
        save_file(tensors, folder / shard, metadata={"format": "pt"})
    for count in counts:
        (folder / str(count)).mkdir()
        model = _without_weights(shape, count)
        model.config.save_pretrained(folder / str(count))
        names = [name for name, _ in model.named_parameters()]
        shards = {"metadata": {}, "weight_map": {name: weight_map[name] for name in names}}
        text = json.dumps(shards)
        (folder / str(count) / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        for shard in {weight_map[name] for name in names}:
            os.link(folder / shard, folder / str(count) / shard)


def _without_weights(shape: str, layers: int) -> Any:
    config = SHAPES[shape].config
    settings = config.to_dict() | {"num_hidden_layers": layers, "dtype": "bfloat16"}
    settings.pop("layer_types", None)  # one for each of the default number of layers
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(type(config)(**settings))


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.03, 0.03, generator=generator)


# One measurement


def measure(
    shape: str,
    solver: str,
    layers: int,
    sequences: int,
    length: int,
    steps: int,
    threads: int,
    checkpoint: str,
) -> dict[str, Any]:
    """Capture every layer and solve it; then count the operations of a step on the last one."""
    torch.set_num_threads(threads)
    imported = peak_bytes()
    model, _ = load_offloaded(checkpoint, torch.bfloat16, "cpu")
    tokens = torch.randint(VOCABULARY, (sequences, length), generator=torch.Generator())
    few = {"steps": steps, "sequences_per_step": 1} if solver == STEPS else {}
    built = SOLVERS.get(solver)(**few)
    start = time.perf_counter()
    solving = 0.0
    for activations in capture(model, tokens):
        began = time.perf_counter()
        for site in SITES:
            built.solve(problem_of(activations, site, solver), activations.head_dim // 2)
        solving += time.perf_counter() - began
        row: dict[str, Any] = {}
        if activations.layer == layers - 1:
            row = {"seconds": (time.perf_counter() - start) / layers, "peak_bytes": peak_bytes()}
            for site in SITES:
                found = operations(activations, site, solver)
                row |= {f"{site}_{name}": flops for name, flops in found.items()}
            weights = list(activations.module.parameters())
            row["layer_weights"] = sum(p.numel() for p in weights)
            row["layer_bytes"] = sum(p.nbytes for p in weights)
        del activations
    return row | {
        "solving_seconds": solving / layers,
        "imported_bytes": imported,
    }


def problem_of(activations: LayerActivations, site: Site, solver: str) -> Problem:
    """Layer-output in the paper's head sharing; of a closed form, KQ-SVD over all heads."""
    of_paper: str | int = "shared" if site == "key" else 1
    grouping = HeadGrouping("all" if solver == CLOSED else of_paper, activations.kv_heads)
    objective = KQSVD() if solver == CLOSED else LayerOutput()
    return objective.problem(activations, site, grouping)


def operations(activations: LayerActivations, site: Site, solver: str) -> dict[str, float]:
    """Return the floating-point operations of a closed form's Gram matrices, or of a step.

    Of the predictor, for one whole sequence; of riemannian-adam, for its usual batch; of both,
    what is computed once for all steps, by calibration token.
    """
    problem = problem_of(activations, site, solver)
    if isinstance(problem.objective, GramObjective):
        with FlopCounterMode(display=False) as counter:
            problem.objective.matrices(problem, None)
        tokens = activations.sequences * activations.length
        return {"closed_flops_per_token": float(counter.get_total_flops()) / tokens}
    with FlopCounterMode(display=False) as counter:
        basis = problem.initial(activations.head_dim // 2)
        problem.loss(basis, Batch(torch.arange(1)))
    with_what_is_done_once = float(counter.get_total_flops())
    columns = basis.down.clone().requires_grad_()
    rows = torch.arange(min(FAST.rows, activations.length))
    sampled = torch.arange(min(FAST.sequences_per_step, activations.sequences))

    def count(batch: Batch) -> float:
        with FlopCounterMode(display=False) as counter:
            trial = type(basis)(columns, columns, problem.grouping)
            problem.loss(trial, batch).backward(inputs=[columns])
        return float(counter.get_total_flops()) / len(batch.sequences)

    of_sampled = count(Batch(sampled, rows))
    with FlopCounterMode(display=False) as counter:
        problem.loss(basis, Batch(torch.arange(1)))
    once = with_what_is_done_once - float(counter.get_total_flops())
    return {
        "flops_per_sequence": count(Batch(torch.arange(1))),
        "fast_flops_per_step": FAST.sequences_per_step * of_sampled,
        "once_flops_per_token": once / (activations.sequences * activations.length),
    }


def peak_bytes() -> int:
    """Peak resident memory of this process; `getrusage` would count its parent's too."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


# Report


def by_layers(results: pd.DataFrame) -> pd.DataFrame:
    """The measurements of steps at the smallest calibration size."""
    fewest = results["sequences"] == results["sequences"].min()
    return results[fewest & (results["solver"] == STEPS)].sort_values("layers")


def by_tokens(results: pd.DataFrame, solver: str) -> pd.DataFrame:
    """The measurements of a solver with the fewest layers."""
    fewest = results["layers"] == results["layers"].min()
    part = results[fewest & (results["solver"] == solver)]
    return part.assign(tokens=part["sequences"] * part["length"]).sort_values("tokens")


def stored_bytes_per_token(shape: Shape, solver: str) -> int:
    """Of activations, by arithmetic: inputs and outputs of a layer in bfloat16.

    Steps on keys keep keys and values in float32 too, those on values also what attention makes of
    them.
    """
    config = shape.config
    nbytes = 2 * 2 * config.hidden_size
    if solver != CLOSED:
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        nbytes += 4 * heads * config.head_dim
    return nbytes


def slope(part: pd.DataFrame, solver: str) -> tuple[float, float]:
    """Bytes of peak memory per calibration token, and the largest deviation from the line."""
    line = by_tokens(part, solver)
    if len(line) < 2:
        return float("nan"), float("nan")
    fit = np.polyfit(line["tokens"], line["peak_bytes"], 1)
    error = (np.polyval(fit, line["tokens"]) / line["peak_bytes"] - 1).abs().max()
    return float(fit[0]), float(error)


def estimates(results: pd.DataFrame, rate: float) -> pd.DataFrame:
    """Return the whole model with the paper's calibration data, a row per shape and solver.

    Sampled steps are counted at the measured length; their share that grows with it (keys and
    values of all positions) is small beside the layer's matrices. Capture is a forward pass of
    every token with attention over the paper's length, and what steps need once comes on top.
    """
    rows = []
    for name, part in results.groupby("shape", sort=False):
        shape = SHAPES[str(name)]
        config = shape.config
        length = int(part["length"].iloc[0])
        layer = int(part["layer_weights"].iloc[0])
        weights = shape.layers * layer + 2 * shape.vocabulary * config.hidden_size
        step = part[[f"{site}_flops_per_sequence" for site in SITES]].mean().sum()
        step *= PAPER_LENGTH / length  # but for attention's quadratic part, a few hundredths
        sampled = part[[f"{site}_fast_flops_per_step" for site in SITES]].mean().sum()
        once = part[[f"{site}_once_flops_per_token" for site in SITES]].mean().sum()
        # The Gram matrix of W_O, made once, counts least among the most tokens.
        closed = part[[f"{site}_closed_flops_per_token" for site in SITES]].min().sum()
        tokens = PAPER_SEQUENCES * PAPER_LENGTH
        attention = 4 * PAPER_LENGTH * config.num_attention_heads * config.head_dim
        capturing = shape.layers * (2 * layer + attention) * tokens
        of_steps = tokens * (float(once) + attention)
        for solver, solving in (
            (CLOSED, tokens * float(closed)),
            ("predictor", of_steps + PAPER_RANKS * PAPER_EPOCHS * PAPER_SEQUENCES * float(step)),
            (STEPS, of_steps + PAPER_RANKS * FAST.steps * float(sampled)),
        ):
            flops = {"capture_flops": capturing, "solving_flops": shape.layers * solving}
            hours = [
                (capturing / rate + shape.layers * solving / of_solving) / 1e12 / 3600
                for of_solving in (rate, min(rate, SLOW_RATES[solver]))
            ]
            rows.append(
                {"shape": name, "solver": solver, "weights": weights, "layer_weights": layer}
                | {"stored_bytes": stored_bytes_per_token(shape, solver) * tokens}
                | flops
                | {"fewest_hours": hours[0], "most_hours": hours[1]}
            )
    return pd.DataFrame(rows)


def draw(results: pd.DataFrame) -> dict[str, Figure]:
    return {
        "memory_against_tokens": draw_tokens(results),
        "cost_against_layers": draw_layers(results),
    }


def draw_tokens(results: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(5.4, 4.0), layout="constrained")
    axes = figure.subplots()
    growth, tokens = [], []
    for name, part in results.groupby("shape", sort=False):
        for solver, line in ((STEPS, "-"), (CLOSED, "--")):
            measured = by_tokens(part, solver)
            memory, label = measured["peak_bytes"] / GIB, f"{name}, {solver}"
            style = SHAPE_MARKS[str(name)].style | {"linestyle": line, "markersize": 5}
            if solver == CLOSED:
                style["fillstyle"] = "none"
            axes.plot(measured["tokens"], memory, label=label, **style)
            growth.append(f"{label} {memory.iloc[-1] / memory.iloc[0] - 1:+.0%}")
            tokens += list(measured["tokens"])
    _finish(axes, "calibration tokens", "peak resident memory, GiB")
    legend_below(figure)
    title_above(
        figure,
        f"Peak memory from {min(tokens):,} calibration tokens to {max(tokens):,}: "
        f"{', '.join(growth)}",
    )
    return figure


def draw_layers(results: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(7.6, 4.0), layout="constrained")
    memory, seconds = figure.subplots(1, 2)
    growth = []
    for name, part in results.groupby("shape", sort=False):
        line, mark = by_layers(part), SHAPE_MARKS[str(name)]
        peaks = line["peak_bytes"] / GIB
        memory.plot(line["layers"], peaks, ms=5, label=name, **mark.style)
        weights = line["layers"] * line["layer_bytes"] / GIB
        label = f"{name}, weights of all layers"
        style = mark.style | {"linestyle": ":", "fillstyle": "none", "lw": 1.4}
        memory.plot(line["layers"], weights, ms=5, label=label, **style)
        seconds.plot(line["layers"], line["seconds"], ms=5, label=name, **mark.style)
        growth.append(f"{name} {peaks.iloc[-1] / peaks.iloc[0] - 1:+.0%}")
    _finish(memory, "layers", "peak resident memory, GiB")
    _finish(seconds, "layers", "seconds per layer")
    legend_below(figure)
    counts = by_layers(results)["layers"]
    title_above(
        figure,
        f"Peak memory from {counts.min()} layers to {counts.max()}: {', '.join(growth)}; weights "
        f"are {counts.max() / counts.min():g} times as large",
    )
    return figure


def _finish(axes: Any, x: str, y: str) -> None:
    label_axes(axes, x, y)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def summary(results: pd.DataFrame, rate: float) -> list[str]:
    first = results.iloc[0]
    lines = [
        "# Time, memory and operations of large models",
        "",
        "Measured on random layers of the exact shapes, weights in bfloat16 read from their shards "
        f"layer by layer, {common.counted(first['threads'], 'thread')}, sequences of "
        f"{first['length']} tokens, "
        f"{first['steps']} steps of riemannian-adam on keys and as many on values of every layer "
        "(layer-output, the paper's head sharing, one sequence a step), or closed forms (kq-svd, "
        "all heads together), rank ratio 0.5. Peak memory is that of the process, "
        f"{first['imported_bytes'] / GIB:.2f} GiB of it after importing the libraries.",
        "",
        "| shape | solver | layers | tokens | weights of a layer, GiB | of all, GiB | peak, GiB | "
        "seconds per layer | of them solving |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results.to_dict("records"):
        lines.append(
            f"| {row['shape']} | {row['solver']} | {row['layers']} | "
            f"{row['sequences'] * row['length']} | "
            f"{row['layer_bytes'] / GIB:.2f} | {row['layers'] * row['layer_bytes'] / GIB:.2f} | "
            f"{row['peak_bytes'] / GIB:.2f} | {row['seconds']:.1f} | {row['solving_seconds']:.1f} |"
        )
    return [*lines, "", *_growth(results), *_estimated(results, rate)]


def _growth(results: pd.DataFrame) -> list[str]:
    lines = []
    for name, part in results.groupby("shape", sort=False):
        line = by_layers(part)
        few, many = line.iloc[0], line.iloc[-1]
        shape = SHAPES[str(name)]
        lines.append(
            f"- {name}, from {few['layers']} layers to {many['layers']}: peak memory "
            f"{many['peak_bytes'] / few['peak_bytes'] - 1:+.1%}, seconds per layer "
            f"{many['seconds'] / few['seconds'] - 1:+.1%}. At the latter rate all {shape.layers} "
            f"layers take {shape.layers * many['seconds'] / 3600:.2f} hours here (the fewest "
            f"layers predict {shape.layers * few['seconds'] / 3600:.2f})."
        )
        for solver in (STEPS, CLOSED):
            per_token, error = slope(part, solver)
            lines.append(
                f"- {name}, {solver}: {per_token / 1024:.0f} KiB of peak memory per calibration "
                f"token, at most {error:.1%} off the line; what is stored of a layer is "
                f"{stored_bytes_per_token(shape, solver) / 1024:.0f} KiB by arithmetic."
            )
    return lines


def _estimated(results: pd.DataFrame, rate: float) -> list[str]:
    slow = ", ".join(f"{value:g} for {name}" for name, value in SLOW_RATES.items())
    lines = [
        "",
        "## Estimates for the whole model, not measurements",
        "",
        f"Capturing and training with the paper's calibration data ({PAPER_SEQUENCES} × "
        f"{PAPER_LENGTH} tokens, keys and values at {PAPER_RANKS} ranks): closed forms (the "
        "leading columns of one serve all ranks), the predictor for "
        f"{PAPER_EPOCHS} epochs unless patience ends them, riemannian-adam for its {FAST.steps} "
        "steps. Operations are counted (of closed forms those that grow with the tokens), the "
        "capture's and what steps need once among them; reading weights and moving activations "
        f"are not. Hours are a range: all at a sustained {rate:g} TFLOP/s, and solving at fewer "
        f"({slow}): closed forms compute in float64, of which a 24 GB workstation card has a 32nd "
        "to a 64th of its rate, and sampled steps take about two milliseconds, too short to keep a "
        "card busy.",
        "",
    ]
    rows = []
    for row in estimates(results, rate).to_dict("records"):
        rows.append(
            [
                *(row["shape"], row["solver"], f"{2 * row['weights'] / GIB:.1f} GiB"),
                f"{2 * row['layer_weights'] / GIB:.2f} GiB",
                f"{row['stored_bytes'] / GIB:.0f} GiB",
                *(f"{row['capture_flops']:.1e}", f"{row['solving_flops']:.1e}"),
                f"{row['fewest_hours']:.2f} to {row['most_hours']:.2f}",
            ]
        )
    columns = ["shape", "solver", "weights in bfloat16", "of one layer"]
    columns += ["activations of one layer", "capture, FLOP", "solving, FLOP", "hours"]
    return lines + common.table(columns, rows)


if __name__ == "__main__":
    sys.exit(main())
