"""Which objective, and which solver, gives the best low-rank basis of each layer?

    python studies/compare_objectives.py          four minutes or less
    python studies/compare_objectives.py --full   an hour and a half
    python studies/compare_objectives.py --model Qwen/Qwen3-0.6B --text wikitext:wikitext-2-raw-v1
    python studies/compare_objectives.py --objectives eigen-attention layer-output --layers 0 5

Every objective is solved with every solver that can solve it, per layer, site and rank, on
calibration text: by a closed form where one exists, by the paper's predictor (an MLP with a QR
head) and by descent on Stiefel, Grassmann and flag manifolds. The bases are then measured on
held-out text. The default run takes one rank, one seed, shorter sequences and fewer epochs and
steps; --full takes two ranks, three seeds and the solvers' own epochs and steps, and measures the
layer-output error of every solver against its seconds, on more text. Any other option changes one
setting of either run.

Written into --out: results.csv (one row per measurement), with --full efficiency.csv (one row per
run of a solver), summary.md (means over layers, printed at the end) and figures. An interrupted run
continues when the same command is given again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import efficiency
import pandas as pd
from reports import efficiency as solving_times
from reports.objectives import CAPS, SITE_TITLES, figures, summary
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv.core.basis import Basis, HeadGrouping, Site, parse_grouping, rank_from_ratio
from manifoldkv.core.errors import ArgumentError, ManifoldKVError
from manifoldkv.core.seeds import check_seed
from manifoldkv.evaluate.diagnostics import layer_errors
from manifoldkv.learn.objectives import OBJECTIVES
from manifoldkv.learn.solvers import SOLVERS, Predictor, RiemannianAdam, RiemannianLBFGS, Solver
from manifoldkv.models.fingerprint import digest_of_model
from manifoldkv.models.support import attention_of, decoder_layers
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_tokens
from manifoldkv.statistics.capture import capture
from manifoldkv.statistics.layer import LayerActivations
from manifoldkv.text.docstrings import Split
from manifoldkv.text.sources import HELP as TEXT_HELP

SPLITS: tuple[Split, ...] = ("calibration", "held-out")
EXACT = "exact"
"""Grouping in the results of a site that is not projected."""
SHORT = {"seeds": [0], "rank_ratios": [0.5], "sequence_length": 128, "epochs": 10, "steps": 80}
FULL = {
    "seeds": [0, 1, 2],
    "rank_ratios": [0.5, 0.75],
    "sequence_length": 256,
    "epochs": Predictor().epochs,
    "steps": RiemannianAdam().steps,
}
EFFICIENCY = "efficiency.csv"
NO_SETTINGS = ("out", "force", "redraw", "full", "layers")
"""Options that no row depends on."""


@dataclass(frozen=True)
class Pair:
    """An objective with a solver that can solve it, for one site under one head grouping."""

    objective: str
    solver: str
    site: Site
    grouping: str | int


@dataclass(frozen=True)
class Solved:
    """A basis, and the seconds of solving for it."""

    pair: Pair
    rank: int
    seed: int
    basis: Basis
    seconds: float


def main() -> int:
    parser = common.Parser(__doc__)
    parser.add_model()
    add = parser.add_argument
    add("--full", action="store_true", help="the long run, behind the committed results")
    add("--text", default="docstrings", help=f"calibration text: {TEXT_HELP} (%(default)s)")
    add("--eval-text", help="held-out text; without it a fifth of --text is held out")
    parser.add_list("--objectives", OBJECTIVES.names())
    parser.add_list("--solvers", SOLVERS.names())
    add("--rank-ratios", nargs="+", type=float, metavar="R", help=of_both("rank_ratios"))
    add("--layers", nargs="+", type=int, metavar="L", help="layer indices from 0 (all)")
    add(
        "--sites",
        nargs="+",
        choices=SITE_TITLES,
        default=list(SITE_TITLES),
        help="what is projected (all)",
    )
    add("--key-grouping", default="shared", help="shared, all or heads per basis (%(default)s)")
    add("--value-grouping", default="1", help="shared, all or heads per basis (%(default)s)")
    rotary = "project keys before or after rotation (%(default)s)"
    add("--rotary", choices=("pre", "post"), default="pre", help=rotary)
    add("--sequences", type=int, default=16, help="sequences of each split (%(default)s)")
    add("--sequence-length", type=int, help="tokens per sequence " + of_both("sequence_length"))
    add("--seeds", nargs="+", type=int, help="of iterative solvers " + of_both("seeds"))
    add("--epochs", type=int, help="of the predictor, at most " + of_both("epochs"))
    add("--steps", type=int, help="of each descent, at most " + of_both("steps"))
    parser.add_threads()
    parser.set_defaults(threads=1)
    parser.add_out("figures/compare_objectives/<model>-short, with --full <model>")
    return common.run_study(parser, study)


def of_both(option: str) -> str:
    """Return the defaults of an option in both runs."""

    def shown(run: Mapping[str, Any]) -> str:
        return str(run[option]).strip("[]").replace(",", "")

    return f"({shown(SHORT)}; with --full {shown(FULL)})"


def study(given: argparse.Namespace) -> None:
    complete(given)
    pairs, skipped = solvable_pairs(given)
    name = Path(given.model).name
    out = common.output_folder(given, "compare_objectives", name if given.full else f"{name}-short")
    if given.redraw:
        draw(out)
        return
    model, tokenizer = common.load(given.model)
    layers = check_against_model(given, model)
    tokens = {
        split: read_tokens(given, tokenizer, split, given.sequences, given.sequence_length)
        for split in SPLITS
    }
    checkpoints = common.stored_in(out, given).keyed(weights=digest_of_model(model))
    stored = checkpoints.keyed(
        settings={name: value for name, value in vars(given).items() if name not in NO_SETTINGS},
        tokens={split: digest_of_tokens(ids) for split, ids in tokens.items()},
    )
    stored = stored.made_by(
        *(OBJECTIVES.get(name) for name in given.objectives),
        *(SOLVERS.get(name) for name in given.solvers),
    )
    results = measure_layers(given, pairs, model, tokens, layers, stored)
    results.to_csv(out / "results.csv", index=False)
    lines = summary(results, given, skipped)
    if given.full and {"layer-output", "predictor"} <= {*given.objectives, *given.solvers}:
        read = partial(read_tokens, given, tokenizer)
        times = efficiency.measure(
            model, layers, read, given.solvers, checkpoints, given.threads
        ).assign(model=name)
        times.to_csv(out / EFFICIENCY, index=False)
        lines += solving_times.summary(times)
    draw(out)
    common.write_summary(out, lines)


def draw(out: Path) -> None:
    common.draw(out, figures)
    if (out / EFFICIENCY).is_file():
        common.draw(out, solving_times.figures, EFFICIENCY)


def complete(given: argparse.Namespace) -> None:
    """Set options without a value to the defaults of the run; raise for impossible numbers."""
    for option, value in (FULL if given.full else SHORT).items():
        if getattr(given, option) is None:
            setattr(given, option, value)
    for option, least in {"sequences": 1, "sequence_length": 2, "epochs": 1, "steps": 1}.items():
        if getattr(given, option) < least:
            name = option.replace("_", "-")
            raise ManifoldKVError(f"--{name} must be >= {least}, got {getattr(given, option)}")
    for seed in given.seeds:
        check_seed(seed)
    given.key_grouping = parse_grouping(given.key_grouping)
    given.value_grouping = parse_grouping(given.value_grouping)


# Checks, before any long work


def solvable_pairs(given: argparse.Namespace) -> tuple[list[Pair], list[str]]:
    """Return all pairs that can be solved, and a line for each that cannot; raise without any."""
    pairs: list[Pair] = []
    skipped: list[str] = []
    solvers = {name: build_solver(name, given) for name in given.solvers}
    for objective_name in given.objectives:
        objective = OBJECTIVES.get(objective_name)()
        for solver_name, solver in solvers.items():
            for site, grouping in wanted_sites(given):
                accepted, reason = solver.accepts(objective, site, grouping)
                if accepted:
                    pairs.append(Pair(objective_name, solver_name, site, grouping))
                    continue
                line = f"{objective_name} by {solver_name}, {site}s: {reason}"
                if grouping == "shared" and solver.accepts(objective, site, 1)[0]:
                    pairs.append(Pair(objective_name, solver_name, site, 1))
                    line += " (solved with grouping 1 instead)"
                skipped.append(line)
    if not pairs:
        raise ArgumentError("nothing to solve: " + "; ".join(skipped))
    return pairs, skipped


def wanted_sites(given: argparse.Namespace) -> Iterator[tuple[Site, str | int]]:
    if "key" in given.sites or "both" in given.sites:
        yield "key", given.key_grouping
    if "value" in given.sites or "both" in given.sites:
        yield "value", given.value_grouping


def build_solver(name: str, given: argparse.Namespace) -> Solver:
    """Return a solver with the epochs or steps of this run."""
    if name == "predictor":
        return Predictor(epochs=given.epochs)
    solver = SOLVERS.get(name)()
    if isinstance(solver, RiemannianAdam | RiemannianLBFGS):
        return replace(solver, steps=min(solver.steps, given.steps))
    return solver


def check_against_model(given: argparse.Namespace, model: PreTrainedModel) -> list[int]:
    """Check ranks, groupings and layers against the model; return the layers to measure."""
    modules = decoder_layers(model)
    layers = given.layers if given.layers is not None else list(range(len(modules)))
    for layer in layers:
        if not 0 <= layer < len(modules):
            raise ManifoldKVError(f"--layers {layer}: the model has layers 0 to {len(modules) - 1}")
    head_dim = attention_of(modules[0]).head_dim
    for ratio in given.rank_ratios:
        rank_from_ratio(ratio, head_dim)
    config = model.config.get_text_config()
    for grouping in (given.key_grouping, given.value_grouping):
        HeadGrouping(grouping, config.num_key_value_heads)
    if given.sequence_length > config.max_position_embeddings:
        raise ArgumentError(
            f"--sequence-length {given.sequence_length} is longer than the "
            f"{config.max_position_embeddings} positions of the model"
        )
    return sorted(set(layers))


def read_tokens(
    given: argparse.Namespace,
    tokenizer: PreTrainedTokenizerBase,
    split: Split,
    sequences: int,
    length: int,
) -> Tensor:
    """Return token ids (sequences, length) of the calibration or held-out text."""
    two_texts = given.eval_text is not None
    text = given.eval_text if two_texts and split == "held-out" else given.text
    part = None if two_texts else split
    return common.tokens_of(text, tokenizer, part, sequences, length)


# Measuring


def measure_layers(
    given: argparse.Namespace,
    pairs: list[Pair],
    model: PreTrainedModel,
    tokens: dict[Split, Tensor],
    layers: list[int],
    stored: Checkpoints,
) -> pd.DataFrame:
    """Return the rows of all layers; those of finished layers are read from their checkpoints."""
    jobs = [
        (pair, seed)
        for pair in pairs
        for seed in (given.seeds[:1] if pair.solver == "closed-form" else given.seeds)
    ]
    missing = [layer for layer in layers if not stored.has_frame(f"layer-{layer}")]
    if len(missing) < len(layers):
        print(f"stored already: layers {', '.join(str(x) for x in layers if x not in missing)}")
    if missing:
        captured = zip(*(capture(model, tokens[split], missing) for split in SPLITS), strict=True)
        with tqdm(total=len(missing) * len(jobs), unit="solve", disable=None) as bar:
            for calibration, held_out in captured:
                activations: dict[Split, LayerActivations] = {
                    "calibration": calibration,
                    "held-out": held_out,
                }
                compute = partial(measure_layer, given, jobs, activations, bar)
                stored.frame(f"layer-{calibration.layer}", compute)
    frames = [stored.frame(f"layer-{layer}", pd.DataFrame) for layer in layers]
    return pd.concat(frames, ignore_index=True)


def measure_layer(
    given: argparse.Namespace,
    jobs: list[tuple[Pair, int]],
    activations: dict[Split, LayerActivations],
    bar: tqdm[Any],
) -> pd.DataFrame:
    """Return the rows of one layer."""
    calibration = activations["calibration"]
    solved: list[Solved] = []
    rows: list[dict[str, object]] = []
    for pair, seed in jobs:
        bar.set_description(
            f"layer {calibration.layer} {pair.site}s {pair.objective} {pair.solver}"
        )
        found = list(solve(given, pair, seed, calibration))
        for one in found if pair.site in given.sites else ():
            rows += measure(given, [one], activations)
        solved += found
        bar.update()
    if "both" in given.sites:
        for couple in couples(solved):
            rows += measure(given, couple, activations)
    return pd.DataFrame(rows)


def solve(
    given: argparse.Namespace, pair: Pair, seed: int, activations: LayerActivations
) -> Iterator[Solved]:
    """Yield the bases of all ranks; those of a solver of all ranks have the seconds of all."""
    grouping = HeadGrouping(pair.grouping, activations.kv_heads)
    ranks = [rank_from_ratio(ratio, activations.head_dim) for ratio in given.rank_ratios]
    solver = build_solver(pair.solver, given)
    for together in [ranks] if solver.joint else [[rank] for rank in ranks]:
        began = time.perf_counter()
        problem = OBJECTIVES.get(pair.objective)().problem(
            activations, pair.site, grouping, given.rotary
        )
        solutions = dict(solver.solve_ranks(problem, together, seed))
        seconds = time.perf_counter() - began
        for rank, solution in solutions.items():
            yield Solved(pair, rank, seed, solution.basis, seconds)


def couples(solved: list[Solved]) -> Iterator[list[Solved]]:
    """Yield key and value bases of the same objective, solver, rank and seed."""
    values = {
        (s.pair.objective, s.pair.solver, s.rank, s.seed): s
        for s in solved
        if s.pair.site == "value"
    }
    for s in solved:
        partner = values.get((s.pair.objective, s.pair.solver, s.rank, s.seed))
        if s.pair.site == "key" and partner is not None:
            yield [s, partner]


def measure(
    given: argparse.Namespace, solved: list[Solved], activations: dict[Split, LayerActivations]
) -> list[dict[str, object]]:
    """Return a row of results.csv for each split."""
    by_site = {s.pair.site: s for s in solved}
    key, value = by_site.get("key"), by_site.get("value")
    first = solved[0]
    rows = []
    for split, measured in activations.items():
        errors = layer_errors(
            measured,
            key.basis if key else None,
            value.basis if value else None,
            rotary=given.rotary,
        )
        row: dict[str, object] = {
            "model": Path(given.model).name,
            "layer": measured.layer,
            "site": "both" if len(solved) == 2 else first.pair.site,
            "objective": first.pair.objective,
            "solver": first.pair.solver,
            "key_grouping": key.pair.grouping if key else EXACT,
            "value_grouping": value.pair.grouping if value else EXACT,
            "rotary": given.rotary,
            "rank": first.rank,
            "rank_ratio": first.rank / measured.head_dim,
            "split": split,
            **asdict(errors),
            "seconds": sum(s.seconds for s in solved),
            "seed": first.seed,
        }
        rows.append(row | {name: getattr(given, name) for name in CAPS})
    return rows


if __name__ == "__main__":
    sys.exit(main())
