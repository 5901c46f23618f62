"""Which objective, and which solver, gives the best low-rank basis of each layer?

    python studies/compare_objectives.py          90 seconds on two idle cores
    python studies/compare_objectives.py --full   an hour and a half
    python studies/compare_objectives.py --model Qwen/Qwen3-0.6B --text wikitext:wikitext-2-raw-v1
    python studies/compare_objectives.py --import mine.py --objectives mine kq-svd layer-output

Every objective is solved with every solver that can solve it, per layer, site and rank, on
calibration text: by a closed form where one exists, by the paper's predictor (an MLP with a QR
head) and by descent on manifolds. The bases are then measured on held-out text. Beside these errors
at equal rank stands the loss at equal bytes: every objective with a metric also makes coded caches
of an eighth of the bytes, whose added loss is measured on the same text.

The default run takes three ranks, one seed, shorter sequences and fewer epochs and steps, solvers
of orthonormal bases and one basis for every head; --full takes two ranks, three seeds, all solvers
with their own epochs and steps, keys and values by themselves, and keys of all heads in a shared
basis, and measures the layer-output error of every solver against its seconds, on more text. Any
other option changes one setting of either run.

Written into --out: results.csv (one row per measurement), coded.csv (one row per objective), with
--full efficiency.csv (one row per run of a solver), summary.md (all tables; the verdict is printed
at the end) and figures. An interrupted run continues when the same command is given again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stderr
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any

import common
import efficiency
import pandas as pd
from comparison import SPLITS, Inputs, Pair, Task, run, solver_named
from reports import efficiency as solving_times
from reports.objectives import SITE_TITLES, figures, summary, verdict
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv import fit
from manifoldkv.core.basis import SITES, HeadGrouping, parse_grouping, rank_from_ratio
from manifoldkv.core.errors import ArgumentError, ManifoldKVError
from manifoldkv.core.seeds import check_seed
from manifoldkv.evaluate import perplexity
from manifoldkv.learn.objectives import OBJECTIVES
from manifoldkv.learn.solvers import SOLVERS, Predictor, RiemannianAdam
from manifoldkv.models.fingerprint import digest_of_model
from manifoldkv.models.support import attention_of, decoder_layers
from manifoldkv.recipes.bits import BitRecipe
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_tokens
from manifoldkv.runs.executors import set_threads
from manifoldkv.statistics.collect import collect
from manifoldkv.text.docstrings import Split
from manifoldkv.text.sources import HELP as TEXT_HELP

SHORT: dict[str, Any] = {
    "sites": ["both"],
    "key_grouping": "1",
    "seeds": [0],
    "rank_ratios": [0.25, 0.5, 0.75],
    "sequence_length": 128,
    "epochs": 4,
    "steps": 30,
}
FULL: dict[str, Any] = {
    "sites": list(SITE_TITLES),
    "key_grouping": "shared",
    "seeds": [0, 1, 2],
    "rank_ratios": [0.5, 0.75],
    "sequence_length": 256,
    "epochs": Predictor().epochs,
    "steps": RiemannianAdam().steps,
}
ONLY_FULL = ("oblique", "flag", "oblique-flag")
"""Solvers that the default run leaves out."""
RESULTS, CODED, EFFICIENCY = "results.csv", "coded.csv", "efficiency.csv"
NO_SETTINGS = (
    *("out", "force", "redraw", "full", "layers", "threads", "verbose", "imported"),
    *("objectives", "solvers"),
)
"""Options that no row of a pair depends on."""


def main() -> int:
    parser = common.Parser(__doc__)
    parser.add_model()
    add = parser.add_argument
    add("--full", action="store_true", help="the long run, behind the committed results")
    add("--text", default="docstrings", help=f"calibration text: {TEXT_HELP} (%(default)s)")
    add("--eval-text", help="held-out text; without it a fifth of --text is held out")
    add("--objectives", nargs="+", metavar="NAME", help=f"({' '.join(OBJECTIVES.names())})")
    fewer = f"(all but {', '.join(ONLY_FULL)}; with --full {' '.join(SOLVERS.names())})"
    add("--solvers", nargs="+", metavar="NAME", help=fewer)
    own = "Python file whose @register_objective and @register_solver apply"
    add("--import", dest="imported", type=Path, metavar="FILE", help=own)
    add("--rank-ratios", nargs="+", type=float, metavar="R", help=of_both("rank_ratios"))
    add("--layers", nargs="+", type=int, metavar="L", help="layer indices from 0 (all)")
    projected = f"what is projected {of_both('sites')}"
    add("--sites", nargs="+", choices=SITE_TITLES, help=projected)
    add("--key-grouping", help=f"shared, all or heads per basis {of_both('key_grouping')}")
    add("--value-grouping", default="1", help="shared, all or heads per basis (%(default)s)")
    rotary = "project keys before or after rotation (%(default)s)"
    add("--rotary", choices=("pre", "post"), default="pre", help=rotary)
    add("--sequences", type=int, default=16, help="sequences of each split (%(default)s)")
    add("--sequence-length", type=int, help="tokens per sequence " + of_both("sequence_length"))
    add("--seeds", nargs="+", type=int, help="of iterative solvers " + of_both("seeds"))
    add("--epochs", type=int, help="of the predictor, at most " + of_both("epochs"))
    add("--steps", type=int, help="of each descent, at most " + of_both("steps"))
    parser.add_threads()
    add("--verbose", action="store_true", help="print all of summary.md")
    parser.add_out("figures/compare_objectives/<model>-short, with --full <model>")
    return common.run_study(parser, study)


def of_both(option: str) -> str:
    """Return the defaults of an option in both runs."""

    def shown(run: Mapping[str, Any]) -> str:
        value = run[option]
        return " ".join(map(str, value)) if isinstance(value, list) else str(value)

    return f"({shown(SHORT)}; with --full {shown(FULL)})"


def study(given: argparse.Namespace) -> None:
    began = time.perf_counter()
    common.import_methods(given.imported)
    complete(given)
    pairs, skipped = solvable_pairs(given)
    name = Path(given.model).name
    out = common.output_folder(given, "compare_objectives", name if given.full else f"{name}-short")
    if given.redraw:
        draw(out)
        return
    model, tokenizer = common.load(given.model)
    layers = check_against_model(given, model)
    set_threads(1)  # of each process: results do not depend on their number
    tokens = {
        split: read_tokens(given, tokenizer, split, given.sequences, given.sequence_length)
        for split in SPLITS
    }
    checkpoints = common.stored_in(out, given).keyed(weights=digest_of_model(model))
    inputs = Inputs(given, model, tokens, layers, out / "steps" / "statistics.safetensors")
    results, coded = measure(inputs, pairs, checkpoints)
    results.to_csv(out / RESULTS, index=False)
    coded.to_csv(out / CODED, index=False)
    lines = summary(results, coded, given, skipped)
    if given.full and {"layer-output", "predictor"} <= {*given.objectives, *given.solvers}:
        read = partial(read_tokens, given, tokenizer)
        times = efficiency.measure(model, layers, read, given.solvers, checkpoints, 1)
        times.assign(model=name).to_csv(out / EFFICIENCY, index=False)
        lines += solving_times.summary(times.assign(model=name))
    draw(out)
    shown = [*verdict(results, coded), "", f"{time.perf_counter() - began:.0f} seconds."]
    lines[2:2] = [*shown, ""]
    shown += ["", f"Picture: {out / 'overview.png'}. Explained in docs/concepts/bases.md."]
    common.write_summary(out, lines, None if given.verbose else shown)


def draw(out: Path) -> None:
    coded = pd.read_csv(out / CODED) if (out / CODED).is_file() else None
    common.draw(out, partial(figures, coded=coded))
    if (out / EFFICIENCY).is_file():
        common.draw(out, solving_times.figures, EFFICIENCY)


def complete(given: argparse.Namespace) -> None:
    """Set options without a value to the defaults of the run; raise for impossible numbers."""
    for option, value in (FULL if given.full else SHORT).items():
        if getattr(given, option) is None:
            setattr(given, option, value)
    left_out = () if given.full else ONLY_FULL
    given.objectives = given.objectives or OBJECTIVES.names()
    given.solvers = given.solvers or [x for x in SOLVERS.names() if x not in left_out]
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
    wanted = {site for site in SITES if {site, "both"} & set(given.sites)}
    asked = {"key": given.key_grouping, "value": given.value_grouping}
    for name in dict.fromkeys(given.objectives):
        objective = OBJECTIVES.get(name)()
        sites = [site for site in SITES if site in wanted]
        if objective.needs_statistics and given.rotary == "post" and "key" in sites:
            sites.remove("key")
            skipped.append(
                f"{name}, keys: its metric is of keys before rotation, not --rotary post"
            )
        for solver_name in given.solvers:
            solver, pair = solver_named(solver_name, given), Pair(name, solver_name, {})
            for site in sites:
                grouping = asked[site]
                accepted, reason = solver.accepts(objective, site, grouping)
                if not accepted:
                    skipped.append(f"{name} by {solver_name}, {site}s: {reason}")
                    if grouping != "shared" or not solver.accepts(objective, site, 1)[0]:
                        continue
                    grouping, skipped[-1] = 1, f"{skipped[-1]} (solved with grouping 1 instead)"
                pair.groupings[site] = grouping
            if set(given.sites) & {*pair.groupings, "both" if len(pair.groupings) == 2 else None}:
                pairs.append(pair)
    if not pairs:
        raise ArgumentError("nothing to solve: " + "; ".join(skipped))
    return pairs, skipped


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


def measure(
    inputs: Inputs, pairs: list[Pair], checkpoints: Checkpoints
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows of all tasks; those of finished ones are read from their checkpoints."""
    given = inputs.given
    coded = [Task(name) for name in dict.fromkeys(given.objectives)]
    solved = [Task(pair.objective, pair, layer) for layer in inputs.layers for pair in pairs]
    texts = {split: digest_of_tokens(ids) for split, ids in inputs.tokens.items()}
    settings = {name: value for name, value in vars(given).items() if name not in NO_SETTINGS}
    of_coded = checkpoints.keyed(tokens=texts)
    of_pairs = of_coded.keyed(settings=settings)

    @cache
    def stored_of(objective: str, solver: str | None) -> Checkpoints:
        code = OBJECTIVES.get(objective), collect
        if solver is None:
            return of_coded.made_by(*code, fit, perplexity)
        return of_pairs.made_by(*code, SOLVERS.get(solver))

    def stored(task: Task) -> Checkpoints:
        return stored_of(task.objective, task.pair.solver if task.pair else None)

    tasks = [*coded, *solved]
    missing = [task for task in tasks if not stored(task).has_frame(task.name)]
    if len(missing) < len(tasks):
        print(f"stored already: {len(tasks) - len(missing)} of {len(tasks)} steps")
    with tqdm(total=len(missing), unit="step", disable=None) as bar:
        if any(task.needs_statistics for task in missing):
            bar.set_description("statistics")
            collect_statistics(inputs)
        inputs.layers = sorted({task.layer for task in missing if task.layer is not None})
        for task, frame in run(inputs, missing, given.threads):
            stored(task).frame(task.name, frame.copy)
            bar.set_description(task.name)
            bar.update()
    read = [stored(task).frame(task.name, pd.DataFrame) for task in tasks]
    coded_rows, rows = read[: len(coded)], read[len(coded) :]
    return pd.concat(rows, ignore_index=True), pd.concat(coded_rows, ignore_index=True)


def collect_statistics(inputs: Inputs) -> None:
    """Write the statistics of the calibration text, without the tokens that coded caches keep."""
    tokens, folder = inputs.tokens["calibration"], inputs.statistics_file.parent
    first = min(BitRecipe().sinks, tokens.shape[1] - 1)
    with redirect_stderr(StringIO()):  # its bars: the run has one
        statistics = collect(
            inputs.model, tokens, text=inputs.given.text, first=first, jacobian=True, folder=folder
        )
    statistics.save(inputs.statistics_file)


if __name__ == "__main__":
    sys.exit(main())
