"""Draw every figure and table of the StiefAttention paper for one or more models.

Without arguments: for both reference models of this repository, on text that needs no download;
every cap and every substitute is printed in the captions and in the tables. Any other model is
calibrated and measured on WikiText-2 and C4 from the Hub, unless texts are named.

For every model NAME: accuracy_NAME, ppl_NAME, quantization_NAME, bases_comparison_NAME (without
the name for Llama, as in the paper), policy_uniform_NAME, ranks_NAME (PNG and the CSV each is drawn
from). Over all models: table1, with the paper's numbers marked as theirs beside ours, and two
tables that are not in the paper and separate its two parts: table2, bases at the same ranks, and
table3, rank rules with the same bases. Every step is a checkpoint in OUT/steps: an interrupted run
resumes there, and a repeated one only draws. Only the run without --model, --protocol and --quick
writes into figures/ unless --out names it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import pandas as pd
import torch
from paper import figures
from paper.accuracy import zero_shot
from paper.measurements import Measurements
from paper.plans import Labelled, PlanMaker, nearest
from paper.protocol import EIGEN, PROTOCOLS, STIEF, Protocol
from paper.published import (
    C4,
    PAPER_CORPORA,
    PAPER_LENGTH,
    PAPER_WEIGHTS,
    PAPER_WINDOWS,
    WIKITEXT,
    mismatches,
)
from paper.search import ReleaseSearch
from paper.solvers import compare_solvers, solvers_caption
from paper.steps import Steps
from paper.tables import (
    bases_at_the_same_ranks,
    of_methods,
    rules_with_the_same_bases,
    table_of_results,
    write_tables,
)
from paper.tasks import continuation_task, tasks_from
from torch import Tensor
from tqdm import tqdm

from manifoldkv import ManifoldKVError, Quantization, diagnose, quantize
from manifoldkv.activations.capture import capture
from manifoldkv.diagnostics import LayerErrors
from manifoldkv.evaluation import Perplexity, perplexity
from manifoldkv.ranks import GivenRanks
from manifoldkv.recipes.rounding import Rotation
from manifoldkv.runs.checkpoints import digest_of_model, digest_of_tokens
from manifoldkv.solvers import SOLVERS, Predictor
from manifoldkv.text.docstrings import Split

REFERENCE = {"llama": "reference-llama", "qwen": "reference-qwen3"}
HELD_OUT: Split = "held-out"
BITS = (8, 4, 3, 2)
ROTATIONS: tuple[Rotation, ...] = ("none", "hadamard")
"""Of latents before they are rounded: the paper has none."""
QUANTIZED_RATIO = 0.6


def main() -> int:
    parser = common.Parser(__doc__)
    add = parser.add_argument
    add(
        "--model",
        nargs="+",
        help="folders, GGUF files, Hub ids or smollm2 (both reference models)",
    )
    add("--text", help="calibration and first corpus, a fifth held out (docstrings or WikiText-2)")
    add("--second-text", help="second corpus (pydoc-topics or C4)")
    add(
        "--tasks-data",
        type=common.folder_named,
        help="folder of hellaswag, piqa and mmlu as JSON files",
    )
    add(
        "--protocol",
        choices=("default", "paper", "real"),
        default="default",
        help="paper: all of the paper's data, epochs, ranks and windows, and of C4 256 windows; "
        "real: a model of a hundred million parameters in an hour of one core, the paper's bases "
        "by Riemannian Adam and its predictor in three layers (%(default)s)",
    )
    add(
        "--solver",
        choices=[name for name in SOLVERS.names() if name != "closed-form"],
        help="solver of the paper's bases (that of the protocol)",
    )
    add("--seeds", type=int, default=1, help="runs of the solver (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="(%(default)s)")
    add("--quick", action="store_true", help="the smallest run of every step, in minutes")
    parser.add_device()
    parser.add_threads(1)  # two wait for each other in the small products of the reference models
    parser.add_out("figures; of --quick, other models and protocols a folder of figures/runs")
    return common.run_study(parser, reproduce)


def reproduce(given: argparse.Namespace) -> None:
    if given.seeds < 1:
        raise ManifoldKVError(f"--seeds must be >= 1, got {given.seeds}")
    out = common.output_folder(given, *default_folder(given))
    protocol = PROTOCOLS["quick" if given.quick else given.protocol]
    if given.solver is not None:
        descent = None if given.solver == "predictor" else SOLVERS.get(given.solver)()
        protocol = replace(protocol, descent=descent)
    short = {model: name for name, model in REFERENCE.items()}
    names = {short.get(m, Path(m).name): m for m in given.model or REFERENCE.values()}
    if given.redraw:
        figures.redraw(names, out, quick=given.quick)
        return
    stages = common.Stages(len(names) * stages_of(protocol))
    studies = [Study(name, model, given, protocol, out, stages) for name, model in names.items()]
    for study in studies:  # errors appear before any long work
        study.check()
    tables = [study.run() for study in studies]
    write_tables(tables, out, [study.caption for study in studies])
    write_captions(studies, out)
    print(f"written to {out}")


def default_folder(given: argparse.Namespace) -> tuple[str, ...]:
    """Return the folder below figures/, which itself is for the committed run alone."""
    if given.quick:
        return "runs", "paper-quick"
    committed = given.model is None and given.protocol == "default"
    return () if committed else ("runs", "paper")


def stages_of(protocol: Protocol) -> int:
    """Return how many stages `Study` announces."""
    return 6 + len(protocol.ratios) + bool(protocol.predicted_layers)


class Study:
    """The plans and measurements of one model; unreadable texts and weights fail first."""

    def __init__(
        self,
        name: str,
        model: str,
        given: argparse.Namespace,
        protocol: Protocol,
        out: Path,
        stages: common.Stages,
    ) -> None:
        embedded = model in REFERENCE.values()
        self.name, self.protocol, self.out = name, protocol, out
        self.stages, self.quick = stages, given.quick
        self.seeds = range(given.seeds)
        self.model, self.tokenizer = common.load(
            model, dtype=getattr(torch, given.dtype), device=given.device
        )
        measured = self.model
        if protocol.dtype is not None:
            dtype = getattr(torch, protocol.dtype)
            measured, _ = common.load(model, dtype=dtype, device=given.device)
        config = self.model.config.get_text_config()
        self.layers, self.heads = config.num_hidden_layers, config.num_key_value_heads
        self.length = min(protocol.length, config.max_position_embeddings)
        first, second = _texts(given, embedded)
        self.calibration = self._tokens(first, protocol.sequences, "calibration")
        has_test_set = first == WIKITEXT
        text, split = (PAPER_CORPORA["WikiText"], None) if has_test_set else (first, HELD_OUT)
        window = min(protocol.window or self.length, config.max_position_embeddings)
        self.corpora = {
            _title(first): self._tokens(text, protocol.windows, split, window),
            _title(second): self._tokens(second, protocol.second_windows, None, window),
        }
        self.paper_corpora = {
            title: self._tokens(text, PAPER_WINDOWS, None, PAPER_LENGTH)
            for title, text in PAPER_CORPORA.items()
            if name in PAPER_WEIGHTS
        }
        steps = out / "steps"
        if given.tasks_data is None and embedded:
            tasks = continuation_task(self.tokenizer, protocol, steps / name)
        else:
            tasks = tasks_from(given.tasks_data, protocol, steps / name)
        tasks.documents()  # raises now if a file is missing
        windows = [len(tokens) for tokens in self.corpora.values()]
        amounts = protocol.caption(self.length, windows, spread=tasks.spread)
        self.caption = f"{figures.shown(name, given.quick)} ({Path(model).name}): {amounts}"
        self.checkpoints = (
            common.stored_in(out, given)
            .keyed(model=digest_of_model(self.model))
            .made_by(ReleaseSearch, Perplexity, zero_shot, LayerErrors)
        )
        self.steps = Steps()
        counted = self.checkpoints, self.steps
        self.maker = PlanMaker(
            *(self.model, self.calibration, protocol, self.seeds, *counted), steps / "plans"
        )
        self.measure = Measurements(name, measured, self.tokenizer, self.corpora, tasks, *counted)

    def _tokens(
        self, text: str, sequences: int | None, split: Split | None, length: int | None = None
    ) -> Tensor:
        return common.tokens_of(text, self.tokenizer, split, sequences, length or self.length)

    def check(self) -> None:
        """Measure the uncompressed model, and warn if it is not the one of the paper."""
        self._begin("the uncompressed model")
        self.measure.accuracies(None)
        if self.name in PAPER_WEIGHTS:
            measured = {
                title: perplexity(self.model, tokens).perplexity
                for title, tokens in self.paper_corpora.items()
            }
            for line in mismatches(PAPER_WEIGHTS[self.name], measured):
                tqdm.write(f"warning: {line}", file=sys.stderr)

    def run(self) -> dict[str, pd.DataFrame]:
        """Measure, draw, and return the rows of the tables by their names."""
        self._begin("EigenAttention's search")
        plans = self.maker.searched()
        for ratio in self.protocol.ratios:
            self._begin(f"bases, error surfaces and ranks at ratio {ratio:g}")
            plans += self.maker.at_ratio(ratio)
        frames = {
            "quantization": self.quantized(plans),
            "bases_comparison": self.diagnostics(plans),
            "ranks": self.profile(plans),
        }
        if self.protocol.predicted_layers:
            self.write_solvers(self.solvers())
        measure = self.measure
        self._begin("perplexities")
        followed = tqdm([None, *plans], desc=f"{self.name}: perplexities", disable=None)
        measured = [measure.evaluated(p, measure.perplexities) for p in followed]
        self._begin("accuracies")
        slowest = [None, *self.of_accuracies(plans)]  # last
        followed = tqdm(slowest, desc=f"{self.name}: accuracies", disable=None)
        measured += [measure.evaluated(p, measure.accuracies) for p in followed]
        evaluations = pd.concat(measured, ignore_index=True)
        main_series = of_methods(evaluations, self.protocol.series)
        of_stief = evaluations[evaluations["method"].isin([STIEF, "uncompressed"])]
        frames |= {"accuracy": main_series, "ppl": main_series, "policy_uniform": of_stief}
        for stem, frame in frames.items():
            figures.save(stem, frame, self.name, self.out, quick=self.quick)
        self.steps.table().to_csv(self.out / f"seconds_{self.name}.csv", index=False)
        return {
            "table1": table_of_results(main_series),
            "table2": bases_at_the_same_ranks(evaluations),
            "table3": rules_with_the_same_bases(evaluations),
        }

    def _begin(self, stage: str) -> None:
        self.stages.begin(f"{self.name}, {stage}")

    def of_accuracies(self, plans: list[Labelled]) -> list[Labelled]:
        """Return the plans whose accuracy is measured."""
        compared = [p for p in plans if p.policy == self.protocol.series[p.method]]
        ratios = self.protocol.accuracy_ratios
        if ratios is None:
            return compared
        runs = dict.fromkeys((p.method, p.seed) for p in compared)
        return [
            nearest([p for p in compared if (p.method, p.seed) == run], ratio)
            for run in runs
            for ratio in ratios
        ]

    def quantized(self, plans: list[Labelled]) -> pd.DataFrame:
        """Return the perplexity on the second corpus of plans near the paper's 60 %, rounded."""
        self._begin("integer latents")
        corpus = list(self.corpora)[1]
        rows = []
        for method in (EIGEN, STIEF):
            of_method = [
                p for p in plans if p.method == method and p.policy == self.protocol.series[method]
            ]
            first_seed = [p for p in of_method if p.seed == min(self.seeds)]
            labelled = nearest(first_seed, QUANTIZED_RATIO)
            plan = labelled.plan
            exact = plan.bytes_per_token()
            settings = [("none", 16), *((r, b) for r in ROTATIONS for b in BITS)]
            for rotation, bits in settings:
                rounded = plan
                if bits < 16:
                    rounding = Quantization(bits)
                    tokens = self.calibration[: self.protocol.search_sequences]
                    rounded = quantize(plan, self.model, tokens, rounding, rotation)
                frame = self.measure.perplexities(rounded, [corpus])
                share = plan.ratio * rounded.bytes_per_token() / exact
                numbers = {"bytes_ratio": share, "bits": bits, "rotation": rotation}
                rows.append(frame.assign(model=self.name, **labelled.columns(), **numbers))
        return pd.concat(rows, ignore_index=True)

    def diagnostics(self, plans: list[Labelled]) -> pd.DataFrame:
        """Return the errors of every layer at r = d/2 on held-out text."""
        self._begin("errors of each layer")
        tokens = next(iter(self.corpora.values()))[:, : self.length]
        half = plans[0].plan.layers[0].key.head_dim // 2
        rule = GivenRanks(ranks=((half, half),) * self.layers)
        frames = []
        for method, seed in [(EIGEN, 0), *((STIEF, seed) for seed in self.seeds)]:
            plan = self.maker.plan(method, rule, 1.0, seed)
            bases = plan.bases

            def compute(bases: Any = bases) -> pd.DataFrame:
                return diagnose(capture(self.model, tokens), bases)

            checkpoints = self.measure.of_plan(plan).keyed(tokens=digest_of_tokens(tokens))
            frame = self.steps.frame(checkpoints, "diagnostics", "errors of each layer", compute)
            frames.append(frame.assign(method=method, seed=seed, rank=half))
        return pd.concat(frames, ignore_index=True)

    def solvers(self) -> pd.DataFrame:
        """Return errors and seconds of the predictor and of the solver in a few layers."""
        self._begin("the predictor in a few layers")
        tokens = next(iter(self.corpora.values()))[:, : self.length]
        depths = self.protocol.predicted_layers
        layers = sorted({round(depth * (self.layers - 1)) for depth in depths})
        solver = self.protocol.solver
        solvers = {
            str(SOLVERS.describe(solver)["name"]): solver,
            "predictor": self.protocol.predictor,
        }

        def compute() -> pd.DataFrame:
            fit = capture(self.model, self.calibration, layers)
            held_out = capture(self.model, tokens, layers)
            return compare_solvers(zip(fit, held_out, strict=True), solvers)

        checkpoints = self.checkpoints.keyed(
            calibration=digest_of_tokens(self.calibration),
            tokens=digest_of_tokens(tokens),
            layers=layers,
            solvers={name: SOLVERS.describe(solver) for name, solver in solvers.items()},
        ).made_by(compare_solvers, Predictor, type(solver))
        return self.steps.frame(checkpoints, "solvers", "the predictor in a few layers", compute)

    def write_solvers(self, errors: pd.DataFrame) -> None:
        errors.to_csv(self.out / f"solvers_{self.name}.csv", index=False)
        candidates = len(self.protocol.candidates) - 1  # the full rank needs no solver
        self.caption += "; " + solvers_caption(errors, self.layers, candidates)

    def profile(self, plans: list[Labelled]) -> pd.DataFrame:
        """Return the ranks that the sequential rule chose for the paper's bases."""
        return pd.DataFrame(
            [
                labelled.columns()
                | {"layer": index, "site": site, "rank_ratio": basis.rank / basis.head_dim}
                for labelled in plans
                if (labelled.method, labelled.policy) == (STIEF, "sequential")
                for index, layer in enumerate(labelled.plan.layers)
                for site, basis in layer.sites
            ]
        )


def write_captions(studies: list[Study], out: Path) -> None:
    """Write the caption of every figure, with the amount of data behind it."""
    lines = ["# Captions", ""]
    for study in studies:
        lines += [f"{study.caption}; {common.counted(len(study.seeds), 'seed')}.", ""]
        lines += [*figures.captions(study.name, study.protocol.series), ""]
        lines += [
            f"Processor seconds of every step: seconds_{study.name}.csv.",
            "",
        ]
    (out / "captions.md").write_text("\n".join(lines), encoding="utf-8")


def _texts(given: argparse.Namespace, embedded: bool) -> tuple[str, str]:
    """Return the calibration text and the second corpus."""
    first, second = ("docstrings", "pydoc-topics") if embedded else (WIKITEXT, C4)
    return given.text or first, given.second_text or second


def _title(text: str) -> str:
    """Return the name of a corpus in figures and tables."""
    corpora = {WIKITEXT: "WikiText-2", C4: "C4"}
    substitutes = {"docstrings": "docstrings (for WikiText)", "pydoc-topics": "topics (for C4)"}
    return (corpora | substitutes).get(text, Path(text).name)


if __name__ == "__main__":
    sys.exit(main())
