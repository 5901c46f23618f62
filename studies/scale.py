"""What would a large model cost? Measured on layers of its shape, extrapolated to the whole.

Each measurement is a process of its own that builds a few decoder layers of the model's exact shape
with random weights, captures calibration text, takes solver steps on the last layer and reports its
peak memory (resident set), the counted floating-point operations of a step, and seconds. Time on
other hardware is operations over a stated sustained rate; memory beyond the weights grows with the
calibration tokens, for which a line is fitted (from 8 sequences on, as so many run at a time).
Writes results.csv, summary.md and a figure into --out.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.initialization import no_init_weights

from manifoldkv import OBJECTIVES, Batch, HeadGrouping, ManifoldKVError, capture
from manifoldkv.activations import LayerActivations, Site
from manifoldkv.figures import save_figure
from manifoldkv.output import check_writable
from manifoldkv.solvers.predictor import Predictor

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
PAPER_SEQUENCES, PAPER_LENGTH, PAPER_RANKS, PAPER_EPOCHS = 512, 2048, 5, 50
"""The paper's calibration: sequences, their length, ranks trained per site, and epochs at most."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", nargs="+", choices=SHAPES, default=["llama-3-8b"], help="(%(default)s)")
    add("--layers", nargs="+", type=int, default=[2], help="layers built (%(default)s)")
    add(
        "--sequences",
        nargs="+",
        type=int,
        default=[8, 16, 24],
        help="calibration sequences (%(default)s)",
    )
    add("--sequence-length", type=int, default=128, help="(%(default)s)")
    add("--steps", type=int, default=1, help="steps per site (%(default)s)")
    add("--rate", type=float, default=100, help="TFLOP/s sustained elsewhere (%(default)s)")
    add("--out", type=Path, help="output folder (figures/scale)")
    add("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(**json.loads(given.measure))))
        return 0
    out = given.out or Path(__file__).parent.parent / "figures" / "scale"
    try:
        numbers = (*given.layers, *given.sequences, given.sequence_length, given.steps)
        if min(numbers) < 1 or not given.rate > 0:
            raise ManifoldKVError("layers, sequences, lengths, steps and rate must be positive")
        check_writable(out)
        results = measure_all(given, out / "results.csv")
    except ManifoldKVError as error:
        print(f"scale: {error}", file=sys.stderr)
        return 2
    save_figure(draw(results), out / "memory_against_tokens")
    (out / "summary.md").write_text(summary(results, given.rate), encoding="utf-8")
    print((out / "summary.md").read_text(encoding="utf-8"))
    print(f"written to {out}")
    return 0


def measure_all(given: argparse.Namespace, path: Path) -> pd.DataFrame:
    """A row per shape, number of layers and calibration size, each from a fresh process.

    What is measured is on disk before the next begins.
    """
    settings = [
        {"shape": s, "layers": n, "sequences": c, "length": given.sequence_length}
        for s in given.shape
        for n in given.layers
        for c in given.sequences
    ]
    rows = []
    for setting in tqdm(settings, desc="measurements", disable=None):
        job = json.dumps(setting | {"steps": given.steps})
        command = [sys.executable, __file__, "--measure", job]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            reason = (run.stderr.strip().splitlines() or ["killed, probably out of memory"])[-1]
            raise ManifoldKVError(f"{setting} failed: {reason}")
        rows.append(setting | json.loads(run.stdout.splitlines()[-1]))
        pd.DataFrame(rows).to_csv(path, index=False)
    return pd.DataFrame(rows)


# One measurement


def measure(shape: str, layers: int, sequences: int, length: int, steps: int) -> dict[str, Any]:
    """Build the layers, capture, and take steps on the last one."""
    model = random_model(SHAPES[shape].config, layers)
    weights = sum(p.nbytes for p in model.parameters())
    before = peak_bytes()
    tokens = torch.randint(VOCABULARY, (sequences, length), generator=torch.Generator())
    start = time.perf_counter()
    for last in capture(model, tokens):
        activations = last
    row: dict[str, Any] = {"capture_seconds": (time.perf_counter() - start) / layers}
    for site in ("key", "value"):
        row |= {f"{site}_{k}": v for k, v in one_site(activations, site, steps).items()}
    return row | {
        "weight_bytes": weights,
        "peak_bytes": peak_bytes(),
        "beyond_weights_bytes": peak_bytes() - before,
        "layer_weights": sum(p.numel() for p in activations.module.parameters()),
        "threads": torch.get_num_threads(),
    }


def random_model(config: PreTrainedConfig, layers: int) -> PreTrainedModel:
    """With weights of about the size of trained ones; drawing them normally would take longer."""
    settings = config.to_dict() | {"num_hidden_layers": layers}
    settings.pop("layer_types", None)  # one for each of the default number of layers
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(type(config)(**settings), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.uniform_(-0.03, 0.03, generator=generator)
            parameter.requires_grad_(False)
    return model.eval()


def one_site(activations: LayerActivations, site: Site, steps: int) -> dict[str, float]:
    """Operations and seconds of a step of the predictor at half of head_dim."""
    grouping = HeadGrouping("shared" if site == "key" else 1, activations.kv_heads)
    problem = OBJECTIVES.get("layer-output")().problem(activations, site, grouping)
    basis = problem.initial(activations.head_dim // 2)
    columns = basis.down.clone().requires_grad_()
    solver = Predictor()
    count = min(solver.key_batch if site == "key" else solver.value_batch, activations.sequences)
    batch = Batch(torch.arange(count))

    def step() -> None:
        trial = type(basis)(columns, columns, grouping)
        problem.loss(trial, batch).backward(inputs=[columns])

    step()  # what is computed once for all steps
    with FlopCounterMode(display=False) as counter:
        step()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    seconds = (time.perf_counter() - start) / steps
    return {"flops_per_sequence": counter.get_total_flops() / count, "seconds": seconds / count}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# Report


def estimates(results: pd.DataFrame, rate: float) -> pd.DataFrame:
    """The whole model under the paper's protocol, a row per shape."""
    rows = []
    for name, part in results.groupby("shape", sort=False):
        shape = SHAPES[str(name)]
        length = int(part["length"].iloc[0])
        weights = shape.layers * int(part["layer_weights"].iloc[0])
        weights += 2 * shape.vocabulary * shape.config.hidden_size
        step = part[["key_flops_per_sequence", "value_flops_per_sequence"]].mean().sum()
        step *= PAPER_LENGTH / length  # but for attention's quadratic part, a few hundredths
        flops = shape.layers * PAPER_RANKS * PAPER_EPOCHS * PAPER_SEQUENCES * float(step)
        rows.append(
            {
                "shape": name,
                "weights": weights,
                "bytes_per_token": slope(part),
                "training_flops": flops,
                "hours": flops / (rate * 1e12) / 3600,
            }
        )
    return pd.DataFrame(rows)


def slope(part: pd.DataFrame) -> float:
    """Bytes beyond the weights per calibration token, with the most layers measured."""
    part = part[part["layers"] == part["layers"].max()]
    tokens = part["sequences"] * part["length"]
    if len(part) < 2:
        return float((part["beyond_weights_bytes"] / tokens).iloc[0])
    return float(np.polyfit(tokens, part["beyond_weights_bytes"], 1)[0])


def draw(results: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(5.0, 3.4), layout="constrained")
    axes = figure.subplots()
    for (shape, layers), line in results.groupby(["shape", "layers"], sort=False):
        tokens = line["sequences"] * line["length"]
        label = f"{shape}, {layers} layers"
        axes.plot(tokens, line["beyond_weights_bytes"] / 2**30, "o-", ms=4, label=label)
    axes.set_xlabel("calibration tokens", fontsize=8)
    axes.set_ylabel("peak memory beyond the weights, GiB", fontsize=8)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.2)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7)
    return figure


def summary(results: pd.DataFrame, rate: float) -> str:
    first = results.iloc[0]
    lines = [
        "# What a large model would cost",
        "",
        f"Measured on random layers of the exact shapes, float32, {first['threads']} threads, "
        f"sequences of {first['length']} tokens; rank ratio 0.5. A step is one sequence through "
        "the layer and back, as the predictor takes it.",
        "",
        "| shape | layers built | sequences | peak GiB | of it weights | key step | value step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results.to_dict("records"):
        sites = " | ".join(
            f"{row[f'{site}_flops_per_sequence'] / 1e12:.2f} TFLOP, {row[f'{site}_seconds']:.1f} s"
            for site in ("key", "value")
        )
        lines.append(
            f"| {row['shape']} | {row['layers']} | {row['sequences']} | "
            f"{row['peak_bytes'] / 2**30:.2f} | {row['weight_bytes'] / 2**30:.2f} | {sites} |"
        )
    lines += [
        "",
        "## Estimates for the whole model, not measurements",
        "",
        f"Training under the paper's protocol ({PAPER_SEQUENCES} × {PAPER_LENGTH} tokens, keys and "
        f"values at {PAPER_RANKS} ranks, {PAPER_EPOCHS} epochs unless patience ends them), at a "
        f"sustained {rate:g} TFLOP/s.",
        "",
        "| shape | weights in bfloat16 | memory per calibration token | at the paper's "
        "calibration | training | hours |",
        "|---|---|---|---|---|---|",
    ]
    for row in estimates(results, rate).to_dict("records"):
        whole = row["bytes_per_token"] * PAPER_SEQUENCES * PAPER_LENGTH
        lines.append(
            f"| {row['shape']} | {2 * row['weights'] / 2**30:.1f} GiB | "
            f"{row['bytes_per_token'] / 2**10:.0f} KiB | {whole / 2**30:.0f} GiB | "
            f"{row['training_flops']:.1e} FLOP | {row['hours']:.0f} |"
        )
    command = " ".join(["python studies/scale.py", *sys.argv[1:]])
    return "\n".join([*lines, "", f"Command: `{command}`", ""])


if __name__ == "__main__":
    sys.exit(main())
