"""Which objective, and which solver, gives the best low-rank basis of each layer?

    python studies/compare_objectives.py
    python studies/compare_objectives.py --model Qwen/Qwen3-0.6B --text wikitext:wikitext-2-raw-v1
    python studies/compare_objectives.py --objectives eigen-attention layer-output --layers 0 5

Every objective is solved with every solver that can solve it, per layer, site and rank, on
calibration text; the bases are then measured on held-out text. Written into --out: results.csv
(one row per measurement), summary.md (means over layers) and three figures. A run that was
interrupted goes on after its last finished layer when the same command is given again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import pandas as pd
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv.basis import Basis, HeadGrouping, Rotary, Site, parse_grouping, rank_from_ratio
from manifoldkv.diagnostics import layer_errors
from manifoldkv.errors import ManifoldKVError, RankError, UnsolvableError
from manifoldkv.figures import (
    error_against_rank,
    error_against_seconds,
    errors_per_layer,
)
from manifoldkv.layers.activations import LayerActivations
from manifoldkv.layers.capture import capture
from manifoldkv.models.support import attention_of, decoder_layers
from manifoldkv.objectives import OBJECTIVES
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_model, digest_of_tokens
from manifoldkv.solvers import SOLVERS, Predictor, RiemannianAdam, Solver
from manifoldkv.solvers.base import check_seed
from manifoldkv.text.docstrings import Split
from manifoldkv.text.sources import HELP as TEXT_HELP
from manifoldkv.text.sources import open_text
from manifoldkv.text.tokens import sample_tokens

SITES = ("key", "value", "both")
SPLITS: tuple[Split, ...] = ("calibration", "held-out")
EXACT = "exact"
"""Stands for the grouping of a site whose keys or values are left as they are."""
ERRORS = ("attention_output_error", "layer_output_error", "cosine_similarity")
SVD_TYPE = ("k-svd", "eigen-attention")


@dataclass(frozen=True)
class Settings:
    """What decides the rows of a run; equal settings, equal rows (but for the seconds)."""

    model: str
    text: str
    eval_text: str | None
    objectives: list[str]
    solvers: list[str]
    rank_ratios: list[float]
    layers: list[int] | None
    sites: list[str]
    key_grouping: str | int
    value_grouping: str | int
    rotary: Rotary
    sequences: int
    sequence_length: int
    seeds: list[int]
    quick: bool
    threads: int


@dataclass(frozen=True)
class Pair:
    """An objective with a solver that can solve it, for one site under one head grouping."""

    objective: str
    solver: str
    site: Site
    grouping: str | int


@dataclass(frozen=True)
class Row:
    """One line of results.csv."""

    model: str
    layer: int
    site: str
    objective: str
    solver: str
    key_grouping: str | int
    value_grouping: str | int
    rotary: str
    rank: int
    rank_ratio: float
    split: str
    attention_output_error: float
    layer_output_error: float
    cosine_similarity: float
    seconds: float
    seed: int


@dataclass(frozen=True)
class Solved:
    """A basis and what it took."""

    pair: Pair
    rank: int
    seed: int
    basis: Basis
    seconds: float


def main() -> int:
    parser = common.Parser(__doc__)
    parser.add_model()
    add = parser.add_argument
    add("--text", default="docstrings", help=f"calibration text: {TEXT_HELP} (%(default)s)")
    add("--eval-text", help="held-out text; without it a fifth of --text is held out")
    add("--objectives", nargs="+", metavar="NAME", help=f"of {', '.join(OBJECTIVES.names())} (all)")
    add("--solvers", nargs="+", metavar="NAME", help=f"of {', '.join(SOLVERS.names())} (all)")
    add("--rank-ratios", nargs="+", type=float, metavar="R", help="rank / head_dim (0.5 0.75)")
    add("--layers", nargs="+", type=int, metavar="L", help="layer indices from 0 (all)")
    add("--sites", nargs="+", choices=SITES, default=list(SITES), help="what is projected (all)")
    add("--key-grouping", default="shared", help="shared, all or heads per basis (%(default)s)")
    add("--value-grouping", default="1", help="shared, all or heads per basis (%(default)s)")
    add(
        "--rotary",
        choices=("pre", "post"),
        default="pre",
        help="project keys before or after rotation (%(default)s)",
    )
    add("--sequences", type=int, help="sequences of each split (16)")
    add("--sequence-length", type=int, help="tokens per sequence (256)")
    add("--seeds", nargs="+", type=int, default=[0], help="one run of the solvers each (0)")
    add("--quick", action="store_true", help="a small run with capped solvers, under 90 seconds")
    parser.add_threads()
    parser.add_out("figures/compare_objectives/<model>")
    return common.run_study(parser, study)


def study(given: argparse.Namespace) -> None:
    for seed in given.seeds:
        check_seed(seed)
    settings = read_settings(given)
    pairs, skipped = solvable_pairs(settings)
    folder = "compare_objectives_quick" if given.quick else "compare_objectives"
    out = common.output_folder(given, folder, Path(given.model).name)
    if given.redraw:
        common.draw(out, figures)
        return
    model, tokenizer = common.load(settings.model)
    layers = check_against_model(settings, model)
    tokens = {split: read_tokens(settings, tokenizer, split) for split in SPLITS}
    stored = common.stored_in(out, given).keyed(
        settings=asdict(settings) | {"layers": None},
        weights=digest_of_model(model),
        tokens={split: digest_of_tokens(ids) for split, ids in tokens.items()},
    )
    stored = stored.made_by(
        *(OBJECTIVES.get(name) for name in settings.objectives),
        *(SOLVERS.get(name) for name in settings.solvers),
    )
    results = measure_layers(settings, pairs, model, tokens, layers, stored)
    report(results, settings, skipped, out)


def read_settings(given: argparse.Namespace) -> Settings:
    """Return the settings of a run.

    Raises
    ------
    RankError, ManifoldKVError
        If a grouping or a number is none.
    """
    sequences = (8 if given.quick else 16) if given.sequences is None else given.sequences
    length = (
        (128 if given.quick else 256) if given.sequence_length is None else given.sequence_length
    )
    if sequences < 1:
        raise ManifoldKVError(f"--sequences must be at least 1, not {sequences}")
    if length < 2:
        raise ManifoldKVError(f"--sequence-length must be at least 2, not {length}")
    return Settings(
        model=given.model,
        text=given.text,
        eval_text=given.eval_text,
        objectives=given.objectives or OBJECTIVES.names(),
        solvers=given.solvers or SOLVERS.names(),
        rank_ratios=given.rank_ratios or ([0.5] if given.quick else [0.5, 0.75]),
        layers=given.layers,
        sites=given.sites,
        key_grouping=parse_grouping(given.key_grouping),
        value_grouping=parse_grouping(given.value_grouping),
        rotary=given.rotary,
        sequences=sequences,
        sequence_length=length,
        seeds=given.seeds,
        quick=given.quick,
        threads=given.threads,
    )


# Checks, before any long work


def solvable_pairs(settings: Settings) -> tuple[list[Pair], list[str]]:
    """All pairs that can be solved, and a line for each that cannot.

    Raises
    ------
    UnsolvableError
        If none can.
    """
    pairs: list[Pair] = []
    skipped: list[str] = []
    solvers = {name: build_solver(name, settings.quick) for name in settings.solvers}
    for objective_name in settings.objectives:
        objective = OBJECTIVES.get(objective_name)()
        for solver_name, solver in solvers.items():
            for site, grouping in wanted_sites(settings):
                accepted, reason = solver.accepts(objective, site, grouping)
                if accepted:
                    pairs.append(Pair(objective_name, solver_name, site, grouping))
                    continue
                line = f"{objective_name} by {solver_name}, {site}s: {reason}"
                if grouping == "shared" and solver.accepts(objective, site, 1)[0]:
                    pairs.append(Pair(objective_name, solver_name, site, 1))
                    line += " (rows with grouping 1 are given instead)"
                skipped.append(line)
    if not pairs:
        raise UnsolvableError("nothing to solve: " + "; ".join(skipped))
    return pairs, skipped


def wanted_sites(settings: Settings) -> Iterator[tuple[Site, str | int]]:
    if "key" in settings.sites or "both" in settings.sites:
        yield "key", settings.key_grouping
    if "value" in settings.sites or "both" in settings.sites:
        yield "value", settings.value_grouping


def build_solver(name: str, quick: bool) -> Solver:
    """The solver with its defaults, or with a tenth of its steps."""
    if quick and name == "predictor":
        return Predictor(epochs=5)
    if quick and name == "riemannian-adam":
        return RiemannianAdam(steps=60)
    return SOLVERS.get(name)()


def check_against_model(settings: Settings, model: PreTrainedModel) -> list[int]:
    """The layers to measure, after ranks, groupings and layers were held against the model."""
    modules = decoder_layers(model)
    layers = settings.layers if settings.layers is not None else list(range(len(modules)))
    for layer in layers:
        if not 0 <= layer < len(modules):
            raise ManifoldKVError(f"--layers {layer}: the model has layers 0 to {len(modules) - 1}")
    head_dim = attention_of(modules[0]).head_dim
    for ratio in settings.rank_ratios:
        rank_from_ratio(ratio, head_dim)
    heads = model.config.get_text_config().num_key_value_heads
    for grouping in (settings.key_grouping, settings.value_grouping):
        HeadGrouping(grouping, heads)
    longest = model.config.get_text_config().max_position_embeddings
    if settings.sequence_length > longest:
        raise RankError(
            f"--sequence-length {settings.sequence_length} is longer than the {longest} positions "
            "of the model"
        )
    return sorted(set(layers))


def read_tokens(settings: Settings, tokenizer: PreTrainedTokenizerBase, split: Split) -> Tensor:
    """Token ids (sequences, length) of the calibration or held-out text."""
    name = settings.text
    part: Split | None = split
    if settings.eval_text is not None:
        name, part = (settings.text if split == "calibration" else settings.eval_text), None
    return sample_tokens(
        open_text(name),
        tokenizer,
        sequences=settings.sequences,
        length=settings.sequence_length,
        split=part,
    )


# Measuring


def measure_layers(
    settings: Settings,
    pairs: list[Pair],
    model: PreTrainedModel,
    tokens: dict[Split, Tensor],
    layers: list[int],
    stored: Checkpoints,
) -> pd.DataFrame:
    """Return the rows of all layers: stored ones, and new ones, stored as they come."""
    jobs = [
        (pair, ratio, seed)
        for pair in pairs
        for ratio in settings.rank_ratios
        for seed in (settings.seeds[:1] if pair.solver == "closed-form" else settings.seeds)
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
                compute = partial(measure_layer, settings, jobs, activations, bar)
                stored.frame(f"layer-{calibration.layer}", compute)
    frames = [stored.frame(f"layer-{layer}", pd.DataFrame) for layer in layers]
    return pd.concat(frames, ignore_index=True)


def measure_layer(
    settings: Settings,
    jobs: list[tuple[Pair, float, int]],
    activations: dict[Split, LayerActivations],
    bar: tqdm[Any],
) -> pd.DataFrame:
    """Return the rows of one layer."""
    calibration = activations["calibration"]
    solved: list[Solved] = []
    rows: list[Row] = []
    for pair, ratio, seed in jobs:
        bar.set_description(
            f"layer {calibration.layer} {pair.site}s {pair.objective} {pair.solver}"
        )
        solved.append(solve(settings, pair, ratio, seed, calibration))
        if pair.site in settings.sites:
            rows += measure(settings, [solved[-1]], activations)
        bar.update()
    if "both" in settings.sites:
        for couple in couples(solved):
            rows += measure(settings, couple, activations)
    return pd.DataFrame([asdict(row) for row in rows])


def solve(
    settings: Settings, pair: Pair, ratio: float, seed: int, activations: LayerActivations
) -> Solved:
    grouping = HeadGrouping(pair.grouping, activations.kv_heads)
    rank = rank_from_ratio(ratio, activations.head_dim)
    solver = build_solver(pair.solver, settings.quick)
    began = time.perf_counter()
    problem = OBJECTIVES.get(pair.objective)().problem(
        activations, pair.site, grouping, settings.rotary
    )
    solution = solver.solve(problem, rank, seed)
    return Solved(pair, rank, seed, solution.basis, time.perf_counter() - began)


def couples(solved: list[Solved]) -> Iterator[list[Solved]]:
    """Key and value bases of the same objective, solver, rank and seed."""
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
    settings: Settings,
    solved: list[Solved],
    activations: dict[Split, LayerActivations],
) -> list[Row]:
    """Return a row for each split."""
    by_site = {s.pair.site: s for s in solved}
    key, value = by_site.get("key"), by_site.get("value")
    rows = []
    for split, measured in activations.items():
        errors = layer_errors(
            measured,
            key.basis if key else None,
            value.basis if value else None,
            rotary=settings.rotary,
        )
        rows.append(
            Row(
                model=Path(settings.model).name,
                layer=measured.layer,
                site="both" if len(solved) == 2 else solved[0].pair.site,
                objective=solved[0].pair.objective,
                solver=solved[0].pair.solver,
                key_grouping=key.pair.grouping if key else EXACT,
                value_grouping=value.pair.grouping if value else EXACT,
                rotary=settings.rotary,
                rank=solved[0].rank,
                rank_ratio=solved[0].rank / measured.head_dim,
                split=split,
                seconds=sum(s.seconds for s in solved),
                seed=solved[0].seed,
                **asdict(errors),
            )
        )
    return rows


# Reporting


def report(results: pd.DataFrame, settings: Settings, skipped: list[str], out: Path) -> None:
    results.to_csv(out / "results.csv", index=False)
    common.draw(out, figures)
    common.write_summary(out, summary(results, settings, skipped))


def figures(results: pd.DataFrame) -> dict[str, Figure]:
    drawn = {
        "errors_per_layer": errors_per_layer(results),
        "error_against_rank": error_against_rank(results),
    }
    if set(results["site"]) != {"both"}:
        drawn["error_against_seconds"] = error_against_seconds(results)
    return drawn


def summary(results: pd.DataFrame, settings: Settings, skipped: list[str]) -> list[str]:
    held_out = results[results["split"] == "held-out"]
    layers = sorted(set(held_out["layer"]))
    seeds = len(set(settings.seeds))
    lines = [
        f"# Objectives and solvers on {Path(settings.model).name}",
        "",
        f"Errors on held-out text, means over {len(layers)} layers "
        f"({', '.join(map(str, layers))}) and seeds {settings.seeds}; best of each column in bold. "
        f"Text: {settings.text}"
        + (f", evaluated on {settings.eval_text}" if settings.eval_text else ", a fifth held out")
        + f"; {settings.sequences} sequences of {settings.sequence_length} tokens in each split, "
        f"sampler `consecutive`. Keys are projected {settings.rotary}-rotation, the other site is "
        f"exact unless the table says both. Seconds are per layer, on "
        f"{common.counted(settings.threads, 'thread')}."
        + (" ± is the standard deviation over seeds, bands are their range." if seeds > 1 else ""),
    ]
    if settings.quick:
        lines += ["", "**Quick run:** predictor capped at 5 epochs, riemannian-adam at 60 steps."]
    if settings.rotary == "pre" and "kq-svd" in settings.objectives:
        lines += ["", "kq-svd uses unrotated queries and keys here, as keys are stored unrotated."]
    for site in SITES:
        for rank, part in held_out[held_out["site"] == site].groupby("rank"):
            ratio = part["rank_ratio"].iloc[0]
            title = {"key": "Keys", "value": "Values", "both": "Keys and values"}[site]
            lines += ["", f"## {title}, rank {rank} (ratio {ratio:.3g})", "", *table(part)]
            lines += ["", story(part)]
    if skipped:
        lines += ["", "## Not solved", "", *[f"- {line}" for line in skipped]]
    return lines


def table(part: pd.DataFrame) -> list[str]:
    keys = ["objective", "solver", "key_grouping", "value_grouping"]
    by_seed = part.groupby([*keys, "seed"], sort=False)[[*ERRORS, "seconds"]].mean()
    means = by_seed.groupby(level=keys, sort=False).mean()
    spread = by_seed.groupby(level=keys, sort=False).std()
    cells = pd.DataFrame(index=means.index)
    for column in ERRORS:
        best = means[column].max() if column == "cosine_similarity" else means[column].min()
        cells[column.replace("_", " ")] = [
            bold(f"{mean:.4f}" + (f" ± {std:.4f}" if std == std else ""), mean == best)
            for mean, std in zip(means[column], spread[column], strict=True)
        ]
    cells["seconds"] = [f"{seconds:.2f}" for seconds in means["seconds"]]
    cells = cells.reset_index().rename(columns=lambda name: name.replace("_", " "))
    return common.table(list(cells.columns), cells.to_numpy().tolist())


def story(part: pd.DataFrame) -> str:
    """Who is best where, and whether that is the order the paper reports."""
    means = part.groupby(["objective", "solver"])[list(ERRORS)].mean()
    text = []
    for column in ("attention_output_error", "layer_output_error"):
        best = means.index[int(means[column].argmin())]
        text.append(f"lowest {column.replace('_', ' ')}: {best[0]} by {best[1]}")
    line = "; ".join(text).capitalize() + "."
    svd = [name for name in SVD_TYPE if name in means.index.get_level_values("objective")]
    if svd and "layer-output" in means.index.get_level_values("objective"):
        attention = means["attention_output_error"]
        ahead = attention[svd].min() < attention["layer-output"].min()
        line += (
            " The paper sees SVD-type bases ahead at the attention output: "
            f"here they are {'ahead' if ahead else 'behind'} "
            f"({attention[svd].min():.4f} against {attention['layer-output'].min():.4f})."
        )
    return line


def bold(text: str, yes: bool) -> str:
    return f"**{text}**" if yes else text


if __name__ == "__main__":
    sys.exit(main())
