"""How long does a solver take to be as good as the paper's predictor?

    python studies/solver_efficiency.py
    python studies/solver_efficiency.py --model reference-qwen3 --layers 0 5

Solves the layer-output problem of every layer and site with the predictor, in the paper's protocol,
and with Riemannian Adam at several numbers of steps, each a run of its own with its own schedule,
and measures the bases on held-out text. Counted for each run: seconds, and layer-token evaluations
(query rows whose layer output was computed and differentiated). Written into --out: results.csv
(a row per run, as they come; an interrupted run goes on), summary.md and a figure. The summary ends
with an estimate for a layer of Llama-3-8B's shape: one step of each solver, timed on random weights
at 2048 tokens, times the steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from common import ends_in_one_line, folder_named
from embedded import EMBEDDED
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig

from manifoldkv import (
    OBJECTIVES,
    Basis,
    Batch,
    HeadGrouping,
    LayerActivations,
    ManifoldKVError,
    Problem,
    Solver,
    capture,
    layer_errors,
    load_model,
    open_text,
    rank_from_ratio,
    sample_tokens,
)
from manifoldkv.activations import Site
from manifoldkv.calibration import HELP as TEXT_HELP
from manifoldkv.executors import set_threads
from manifoldkv.figures import save_figure
from manifoldkv.models import attention_of, decoder_layers
from manifoldkv.output import check_writable
from manifoldkv.solvers.predictor import Predictor
from manifoldkv.solvers.riemannian_adam import RiemannianAdam
from manifoldkv.steps import Steps, digest_of_model, digest_of_tokens

HERE = Path(__file__).resolve().parent
SITES: tuple[Site, ...] = ("key", "value")
GROUPINGS: dict[Site, str | int] = {"key": "shared", "value": 1}  # the paper's
BUDGETS = (75, 150, 300, 450, 600)
TIMES = (1, 2, 5, 10, 20, 50, 100, 200)
TOLERANCES = (0.0, 0.002, 0.005, 0.01)
LONG_LENGTH, PAPER_SEQUENCES = 2048, 512
LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=64,
    num_hidden_layers=1,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="reference-llama", help="name or folder (%(default)s)")
    add("--text", default="docstrings", help=f"{TEXT_HELP}; a fifth is held out (%(default)s)")
    add("--layers", type=int, nargs="+", help="(all)")
    add("--rank-ratio", type=float, default=0.5, help="(%(default)s)")
    add("--sequences", type=int, default=64, help="for calibration (%(default)s)")
    add("--sequence-length", type=int, help="(the model's longest context)")
    add("--held-out", type=int, default=16, help="sequences to measure on (%(default)s)")
    add(
        "--epochs", type=int, default=50, help="of the predictor at most (%(default)s, the paper's)"
    )
    add("--budgets", type=int, nargs="+", default=BUDGETS, help="steps (%(default)s)")
    add("--threads", type=int, default=2, help="(%(default)s)")
    add("--no-estimate", action="store_true", help="leave out the layer of Llama-3-8B's shape")
    add("--out", type=folder_named, help="output folder (figures/solver_efficiency/<model>)")
    given = parser.parse_args()
    name = Path(given.model).name
    out = given.out or HERE.parent / "figures" / "solver_efficiency" / name
    with ends_in_one_line("solver_efficiency"):
        set_threads(given.threads)
        if min(*given.budgets, given.epochs) < 1:
            raise ManifoldKVError("budgets and epochs must be at least 1")
        check_writable(out)
        results = measure(given, out / "steps")
        estimate = None if given.no_estimate else measure_estimate(out / "steps", given.threads)
    results.to_csv(out / "results.csv", index=False)
    save_figure(draw(results, name), out / "error_against_seconds")
    (out / "summary.md").write_text(summary(results, estimate, name, given), encoding="utf-8")
    print((out / "summary.md").read_text(encoding="utf-8"))
    print(f"written to {out}")
    return 0


# Measurements


def measure(given: argparse.Namespace, folder: Path) -> pd.DataFrame:
    """A row per layer, site and run of a solver."""
    model, tokenizer = load_model(EMBEDDED.get(given.model, given.model))
    longest = model.config.get_text_config().max_position_embeddings
    length = min(given.sequence_length or longest, longest)
    text = open_text(given.text)
    fit = sample_tokens(
        text, tokenizer, sequences=given.sequences, length=length, split="calibration"
    )
    test = sample_tokens(text, tokenizer, sequences=given.held_out, length=length, split="held-out")
    known = range(len(decoder_layers(model)))
    layers = given.layers or list(known)
    unknown = [layer for layer in layers if layer not in known]
    if unknown:
        raise ManifoldKVError(f"--layers {unknown[0]}: the model has layers 0 to {known[-1]}")
    rank = rank_from_ratio(given.rank_ratio, attention_of(decoder_layers(model)[0]).head_dim)
    common = {
        "model": given.model,
        "text": given.text,
        "weights": digest_of_model(model),
        "tokens": digest_of_tokens(fit),
        "held_out": digest_of_tokens(test),
        "sequences": given.sequences,
        "length": length,
        "rank": rank,
        "epochs": given.epochs,
        "threads": given.threads,
    }
    steps = Steps(folder)
    frames = []
    pairs = zip(capture(model, fit, layers), capture(model, test, layers), strict=True)
    for calibration, held_out in tqdm(pairs, total=len(layers), desc="layers", disable=None):
        for site in SITES:
            problem = _Counting(calibration, site)
            for solver, label in _solvers(given):
                settings = common | {"layer": calibration.layer, "site": site, "solver": label}

                run = partial(_solved, problem, solver, rank, held_out, site)
                row = steps.frame("solve", settings, run)
                frames.append(row.assign(**(settings | {"solver": label[0], "steps": label[1]})))
    return pd.concat(frames, ignore_index=True).drop(columns=["weights", "tokens", "held_out"])


def _solvers(given: argparse.Namespace) -> Iterator[tuple[Solver, tuple[str, int]]]:
    for budget in given.budgets:
        yield RiemannianAdam(steps=budget), ("riemannian-adam", budget)
    yield Predictor(epochs=given.epochs), ("predictor", given.epochs)


class _Counting(Problem):
    """The layer-output problem, counting the rows it is asked for."""

    def __init__(self, activations: LayerActivations, site: Site) -> None:
        grouping = HeadGrouping(GROUPINGS[site], activations.kv_heads)
        super().__init__(activations, site, grouping)
        self._problem = OBJECTIVES.get("layer-output")().problem(activations, site, grouping)
        self._problem.loss(self.initial(1), Batch(torch.arange(1)))  # what is computed once
        self.rows = 0

    def loss(self, basis: Basis, batch: Batch | None = None) -> Tensor:
        length, sequences = self.activations.length, self.activations.sequences
        if batch is None:
            self.rows += length * sequences
        else:
            self.rows += len(batch.sequences) * (length if batch.rows is None else len(batch.rows))
        return self._problem.loss(basis, batch)

    def initial(self, rank: int) -> Basis:
        return self._problem.initial(rank)


def _solved(
    problem: _Counting, solver: Solver, rank: int, held_out: LayerActivations, site: Site
) -> pd.DataFrame:
    problem.rows = 0
    start = time.perf_counter()
    solution = solver.solve(problem, rank)
    seconds = time.perf_counter() - start
    basis = solution.basis
    errors = layer_errors(
        held_out, basis if site == "key" else None, basis if site == "value" else None
    )
    return pd.DataFrame(
        {
            "seconds": [seconds],
            "layer_tokens": problem.rows,
            "entries": len(solution.history),
            "held_out_error": errors.layer_output_error,
        }
    )


def measure_estimate(folder: Path, threads: int) -> pd.DataFrame:
    """Seconds of one step of each solver on a layer of Llama-3-8B's shape."""

    def compute() -> pd.DataFrame:
        model = AutoModelForCausalLM.from_config(LLAMA_8B).requires_grad_(False)
        count = RiemannianAdam().sequences_per_step
        tokens = torch.randint(64, (count, LONG_LENGTH), generator=torch.Generator().manual_seed(0))
        (activations,) = capture(model, tokens)
        rows = []
        sampled = torch.linspace(0, LONG_LENGTH - 1, RiemannianAdam().rows).long()
        for site in SITES:
            predictor = Predictor()
            whole = predictor.key_batch if site == "key" else predictor.value_batch
            for solver, batch in (
                ("predictor", Batch(torch.arange(whole))),
                ("riemannian-adam", Batch(torch.arange(count), sampled)),
            ):
                seconds = _seconds_of_a_step(activations, site, batch)
                rows.append({"site": site, "solver": solver, "seconds": seconds})
        return pd.DataFrame(rows)

    settings = {"config": LLAMA_8B.to_dict(), "length": LONG_LENGTH, "threads": threads}
    return Steps(folder).frame("estimate", json.loads(json.dumps(settings, default=str)), compute)


def _seconds_of_a_step(activations: LayerActivations, site: Site, batch: Batch) -> float:
    """The second one: the first computes what is computed once."""
    problem = _Counting(activations, site)
    columns = problem.initial(activations.head_dim // 2).down.clone().requires_grad_()
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        problem.loss(Basis(columns, columns, problem.grouping), batch).backward(inputs=[columns])
        seconds = time.perf_counter() - start
    return seconds


# Report


def relative(results: pd.DataFrame) -> pd.DataFrame:
    """Riemannian Adam's runs beside the predictor's of the same problem."""
    keys = ["layer", "site"]
    of_predictor = results[results["solver"] == "predictor"].set_index(keys)
    others = results[results["solver"] != "predictor"].set_index(keys)
    columns = ["held_out_error", "seconds", "layer_tokens"]
    beside = of_predictor.loc[others.index, columns]
    return others.reset_index().assign(
        error=(others["held_out_error"] / beside["held_out_error"] - 1).to_numpy(),
        times_faster=(beside["seconds"] / others["seconds"]).to_numpy(),
        times_fewer=(beside["layer_tokens"] / others["layer_tokens"]).to_numpy(),
    )


def draw(results: pd.DataFrame, name: str) -> Figure:
    figure = Figure(figsize=(7.0, 3.2), layout="constrained")
    runs = relative(results)
    for axes, site in zip(figure.subplots(1, 2, sharey=True), SITES, strict=True):
        of_site = runs[runs["site"] == site]
        for layer, line in of_site.groupby("layer"):
            axes.plot(line["times_faster"], 100 * line["error"], "o-", ms=3, label=f"layer {layer}")
        axes.axhline(0, color="#D55E00", lw=1)
        axes.axvline(20, color="#999999", lw=0.8, ls=":")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(TIMES))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.invert_xaxis()
        axes.set_title(f"{site}s", fontsize=9)
        axes.set_xlabel("times faster than the predictor", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(visible=True, alpha=0.2)
    figure.axes[0].set_ylabel("held-out error against the predictor's, %", fontsize=8)
    figure.axes[0].legend(fontsize=7)
    first = results.iloc[0]
    figure.suptitle(
        f"{name}, {first['sequences']} × {first['length']} tokens, rank {first['rank']}: "
        "Riemannian Adam on sampled rows",
        fontsize=10,
    )
    return figure


def summary(
    results: pd.DataFrame, estimate: pd.DataFrame | None, name: str, given: argparse.Namespace
) -> str:
    runs, first = relative(results), results.iloc[0]
    lines = [
        f"# Solvers of the layer-output problem on {name}",
        "",
        f"{first['sequences']} calibration sequences of {first['length']} tokens, rank "
        f"{first['rank']}, keys shared and values per head; predictor for at most "
        f"{first['epochs']} epochs. Errors on {given.held_out} held-out sequences, against the "
        f"predictor's own. {first['threads']} threads; seed 0.",
        "",
        "| site | steps | error, mean (worst layer) | times faster, median (least) | "
        "layer-token evaluations, times fewer |",
        "|---|---|---|---|---|",
    ]
    for (site, count), part in runs.groupby(["site", "steps"]):
        lines.append(
            f"| {site} | {count} | {part['error'].mean():+.2%} ({part['error'].max():+.2%}) | "
            f"{part['times_faster'].median():.1f} ({part['times_faster'].min():.1f}) | "
            f"{part['times_fewer'].median():.0f} |"
        )
    lines += [
        "",
        "How many times faster the cheapest run is that comes within a tolerance of the "
        "predictor's held-out error, median over layers and sites that get there:",
        "",
        "| tolerance | times faster | times fewer evaluations | reached |",
        "|---|---|---|---|",
    ]
    problems = runs.groupby(["layer", "site"]).ngroups
    for tolerance in TOLERANCES:
        near = runs[runs["error"] <= tolerance]
        if near.empty:
            lines.append(f"| {tolerance:.1%} | - | - | 0 of {problems} |")
            continue
        best = near.sort_values("seconds").groupby(["layer", "site"]).first()
        lines.append(
            f"| {tolerance:.1%} | {best['times_faster'].median():.1f} | "
            f"{best['times_fewer'].median():.0f} | {len(best)} of {problems} |"
        )
    if estimate is not None:
        lines += ["", *_estimated(estimate, results)]
    command = " ".join(["python studies/solver_efficiency.py", *sys.argv[1:]])
    return "\n".join([*lines, "", f"Command: `{command}`", ""])


def _estimated(estimate: pd.DataFrame, results: pd.DataFrame) -> list[str]:
    seconds = estimate.set_index(["site", "solver"])["seconds"]
    of_predictor = results[results["solver"] == "predictor"]
    lines = [
        f"An estimate, not a measurement, for a layer of Llama-3-8B's shape with {PAPER_SEQUENCES} "
        f"sequences of {LONG_LENGTH} tokens: seconds of one step, timed on random weights on this "
        "processor, times the steps (epochs as taken above).",
        "",
        "| site | predictor, hours | riemannian-adam, hours | times faster |",
        "|---|---|---|---|",
    ]
    predictor, adam = Predictor(), RiemannianAdam()
    for site in SITES:
        epochs = float(of_predictor[of_predictor["site"] == site]["entries"].mean())
        batch = predictor.key_batch if site == "key" else predictor.value_batch
        whole = float(seconds[site, "predictor"]) * epochs * PAPER_SEQUENCES / batch / 3600
        sampled = float(seconds[site, "riemannian-adam"]) * adam.steps / 3600
        lines.append(f"| {site} | {whole:.1f} | {sampled:.2f} | {whole / sampled:.0f} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
