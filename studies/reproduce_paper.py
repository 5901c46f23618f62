"""Draw every figure and table of the StiefAttention paper, for the models given.

Without arguments: for both reference models of this repository, on text that needs no download;
every cap and every substitute is printed in the captions and in the tables. Any other model is
calibrated and measured on WikiText-2 and C4 from the Hub, unless texts are named.

For every model NAME: accuracy_NAME, ppl_NAME, quantization_NAME, bases_comparison_NAME (without
the name for Llama, as in the paper), policy_uniform_NAME, ranks_NAME (PNG, PDF and the CSV each is
drawn from), and table1 over all models (CSV, Markdown, LaTeX), where the paper's own numbers stand
beside ours, marked as theirs. Results of steps are kept in OUT/steps by their settings: an
interrupted run goes on, a repeated one draws at once.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from common import ends_in_one_line, folder_named
from torch import Tensor
from tqdm import tqdm

from manifoldkv import (
    OBJECTIVES,
    Basis,
    CompressionPlan,
    HeadGrouping,
    LayerActivations,
    LayerPlan,
    ManifoldKVError,
    Provenance,
    Quantization,
    capture,
    diagnose,
    layer_errors,
    load_model,
    open_text,
    quantize,
    sample_tokens,
)
from manifoldkv import figures as draw
from manifoldkv.activations import Site
from manifoldkv.basis import identity_basis
from manifoldkv.compress import sliding_windows
from manifoldkv.docstrings import Split
from manifoldkv.evaluation import perplexity
from manifoldkv.evaluation.zero_shot import local_task, write_continuation_task, zero_shot
from manifoldkv.figures import save_figure
from manifoldkv.objectives.eigen_attention import singular_values
from manifoldkv.output import check_writable
from manifoldkv.plan import config_hash
from manifoldkv.rank_selection import (
    PAPER_CANDIDATES,
    ErrorSurface,
    Ranks,
    Sequential,
    budget_from_ratio,
    candidate_ranks,
    optimal,
    threshold,
    uniform,
)
from manifoldkv.solvers import Solver
from manifoldkv.solvers.closed_form import ClosedForm
from manifoldkv.solvers.predictor import Predictor
from manifoldkv.steps import Steps, digest_of_model, digest_of_tokens
from manifoldkv.surfaces import LayerBases, divergences, sequential_ranks

HERE = Path(__file__).parent
REFERENCE = {"llama": "reference-llama", "qwen": "reference-qwen3"}
STIEF, EIGEN, GROUPED = "layer-output", "eigen-attention", "grouped kq-svd"
"""The paper's method, its baseline, and our best closed form: all KV heads of a layer in one
oblique basis, ranks allocated over all layers at once."""
SERIES = {EIGEN: "threshold", STIEF: "sequential", GROUPED: "optimal"}
"""How a method's ranks are chosen where methods are compared with each other."""
SITES: tuple[Site, Site] = ("key", "value")
GROUPINGS: dict[str, dict[Site, str | int]] = {
    EIGEN: {"key": "shared", "value": 1},
    STIEF: {"key": "shared", "value": 1},
    GROUPED: {"key": "all", "value": "all"},
}
PAPER_WEIGHTS = {"Meta-Llama-3-8B": "Llama3-8B", "Qwen3-8B": "Qwen3-8B"}
"""Names on the Hub of the models the paper measured."""
WIKITEXT, C4 = "wikitext:wikitext-2-raw-v1", "allenai/c4:en:validation"
PAPER_CORPORA = {"WikiText": f"{WIKITEXT}:test", "C4": C4}
PAPER_WINDOWS, PAPER_LENGTH = 140, 2048
"""The whole test set of WikiText-2 in the paper's windows, but for a rest."""
HELD_OUT: Split = "held-out"
MISMATCH = 0.05
"""Relative difference from the paper's uncompressed perplexity that is reported."""
BITS = (8, 4, 3, 2)
QUANTIZED_RATIO = 0.6
TASKS = ("hellaswag", "piqa", "mmlu")
CONTINUATION = "docstring-continuation"


@dataclass(frozen=True)
class Protocol:
    """How much of everything."""

    sequences: int = 32
    length: int = 512
    epochs: int = 8
    ratios: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6, 0.5)
    error_budgets: tuple[float, ...] = (0.02, 0.04, 0.07, 0.11, 0.16, 0.25)
    candidates: tuple[float, ...] = (0.25, 0.375, *PAPER_CANDIDATES)
    evaluated: int = 24
    items: int | None = 200

    def caption(self, length: int) -> str:
        items = "all" if self.items is None else f"the first {self.items}"
        return (
            f"calibrated on {self.sequences} × {length} tokens, predictor capped at {self.epochs} "
            f"epochs; perplexity on {self.evaluated} × {length} held-out tokens; {items} items per "
            "task"
        )


PROTOCOLS = {
    "default": Protocol(),
    "paper": Protocol(512, 2048, 50, candidates=PAPER_CANDIDATES, evaluated=64, items=None),
    "quick": Protocol(4, 96, 1, (0.8, 0.5), (0.05, 0.2), (0.5, 0.75, 1.0), 4, 8),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=folder_named, default=HERE.parent / "figures", help="(%(default)s)")
    add("--model", nargs="+", help="folders or Hub ids (both reference models)")
    add("--text", help="calibration and first corpus, a fifth held out (docstrings or WikiText-2)")
    add("--second-text", help="second corpus (pydoc-topics or C4)")
    add("--tasks-data", type=Path, help="folder of hellaswag, piqa and mmlu as JSON files")
    add("--protocol", choices=("default", "paper"), default="default", help="(%(default)s)")
    add("--seeds", type=int, default=1, help="runs of the predictor (%(default)s)")
    add("--device", default="cpu", help="(%(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="(%(default)s)")
    add("--quick", action="store_true", help="everything once, small: checks the road")
    add("--force", action="store_true", help="compute every step again")
    given = parser.parse_args()
    protocol = PROTOCOLS["quick" if given.quick else given.protocol]
    with ends_in_one_line("reproduce_paper"):
        if given.seeds < 1:
            raise ManifoldKVError("--seeds must be at least 1")
        check_writable(given.out)
        steps = Steps(given.out / "steps", force=given.force)
        names = dict(REFERENCE) if given.model is None else {Path(m).name: m for m in given.model}
        studies = [Study(name, model, given, protocol, steps) for name, model in names.items()]
        tables = [study.run() for study in studies]
    write_table(pd.concat(tables), given.out, [study.caption for study in studies])
    print(f"written to {given.out}")
    return 0


class Study:
    """All that is measured on one model. Reading texts and weights fails before any long work."""

    def __init__(
        self, name: str, model: str, given: argparse.Namespace, protocol: Protocol, steps: Steps
    ) -> None:
        embedded = model in REFERENCE.values()
        path = str(HERE / "reference_models" / model) if embedded else model
        self.name, self.protocol, self.steps, self.out = name, protocol, steps, given.out
        self.seeds = range(given.seeds)
        self.model, self.tokenizer = load_model(
            path, dtype=getattr(torch, given.dtype), device=given.device
        )
        config = self.model.config.get_text_config()
        self.layers, self.heads = config.num_hidden_layers, config.num_key_value_heads
        self.length = min(protocol.length, config.max_position_embeddings)
        first, second = _texts(given, embedded)
        self.calibration = self._tokens(first, protocol.sequences, "calibration")
        # WikiText has a test set of its own.
        own_test = first == WIKITEXT
        text, split = (PAPER_CORPORA["WikiText"], None) if own_test else (first, HELD_OUT)
        self.corpora = {
            _title(first): self._tokens(text, protocol.evaluated, split),
            _title(second): self._tokens(second, protocol.evaluated, None),
        }
        self.paper_corpora = {
            title: self._tokens(text, PAPER_WINDOWS, None, PAPER_LENGTH)
            for title, text in PAPER_CORPORA.items()
            if name in PAPER_WEIGHTS
        }
        self.data: Path | None = given.tasks_data
        self.tasks: tuple[str, ...] = TASKS
        if self.data is None and embedded:
            self.data, self.tasks = given.out / "steps" / name, (CONTINUATION,)
            self.data.mkdir(exist_ok=True)
            path_of_task = self.data / f"{CONTINUATION}.jsonl"
            items = protocol.items or 1000
            write_continuation_task(
                open_text("docstrings"), self.tokenizer, path_of_task, items=items
            )
        # A missing file is told of now.
        self.documents = {} if self.data is None else _digests(self.tasks, self.data)
        self.caption = f"{name} ({Path(model).name}): {protocol.caption(self.length)}"
        self.common = {
            "model": digest_of_model(self.model),
            "calibration": digest_of_tokens(self.calibration),
        }

    def _tokens(
        self, text: str, sequences: int, split: Split | None, length: int | None = None
    ) -> Tensor:
        size = {"sequences": sequences, "length": length or self.length}
        return sample_tokens(open_text(text), self.tokenizer, split=split, **size)

    def run(self) -> pd.DataFrame:
        """Measure, draw, and return the rows of table 1."""
        if self.name in PAPER_WEIGHTS:
            measured = {
                title: perplexity(self.model, tokens).perplexity
                for title, tokens in self.paper_corpora.items()
            }
            for line in mismatches(PAPER_WEIGHTS[self.name], measured):
                tqdm.write(f"warning: {line}", file=sys.stderr)
        plans = self.plans()
        evaluations = pd.concat(
            [
                self.evaluated(None, {"method": "uncompressed", "seed": 0}),
                *(
                    self.evaluated(plan, labels)
                    for plan, labels in tqdm(plans, desc=f"{self.name}: plans", disable=None)
                ),
            ],
            ignore_index=True,
        )
        of_series = evaluations["method"].map(SERIES).fillna("none")
        main_series = evaluations[evaluations["policy"] == of_series]
        self.save("accuracy", main_series, draw.accuracy)
        self.save("ppl", main_series, draw.perplexities)
        of_stief = evaluations[evaluations["method"].isin([STIEF, "uncompressed"])]
        self.save("policy_uniform", of_stief, draw.policies)
        self.save("quantization", self.quantized(plans), draw.quantization)
        self.save("bases_comparison", self.diagnostics(), draw.bases_comparison)
        self.save("ranks", self.profile(plans), draw.rank_profile)
        return draw.table_of_results(main_series)

    def save(self, stem: str, frame: pd.DataFrame, figure: Any) -> None:
        # The paper's labels: bases_comparison is Llama's, bases_comparison_qwen Qwen's.
        plain = (stem, self.name) == ("bases_comparison", "llama")
        path = self.out / (stem if plain else f"{stem}_{self.name}")
        frame.to_csv(path.with_suffix(".csv"), index=False)
        save_figure(figure(frame, title=self.caption), path)

    # Plans

    @cached_property
    def eigen(self) -> list[LayerBases]:
        """Full eigenbases, of which every rank is a part."""
        return [self.layer_bases(EIGEN, layer, 0) for layer in range(self.layers)]

    def stief(self, seed: int) -> list[LayerBases]:
        name = f"{self.name}: training, seed {seed}"
        layers = tqdm(range(self.layers), desc=name, disable=None)
        return [self.layer_bases(STIEF, layer, seed) for layer in layers]

    @cached_property
    def grouped(self) -> list[LayerBases]:
        return [self.layer_bases(GROUPED, layer, 0) for layer in range(self.layers)]

    def layer_bases(self, method: str, layer: int, seed: int) -> LayerBases:
        settings = self.bases_settings(method, seed) | {"layer": layer}

        def compute() -> dict[str, Basis]:
            activations = next(iter(capture(self.model, self.calibration, [layer])))
            return _bases(method, activations, self.protocol, seed).named()

        kept = self.steps.bases(f"bases-{method}", settings, self.heads, compute)
        return LayerBases.from_named(kept)

    def bases_settings(self, method: str, seed: int) -> dict[str, Any]:
        settings = self.common | {"method": method, "seed": seed}
        return settings | {"epochs": self.protocol.epochs, "candidates": self.protocol.candidates}

    def plans(self) -> list[tuple[CompressionPlan, dict[str, Any]]]:
        """Every plan that is measured, with its labels."""
        found = []
        for budget, ranks in self.threshold_ranks():
            labels = {"method": EIGEN, "policy": "threshold", "seed": 0}
            found.append((self.plan(self.eigen, ranks), labels | {"point": budget}))
        for ratio in self.protocol.ratios:
            labels = {"method": GROUPED, "policy": "optimal", "seed": 0}
            labels |= {"requested_ratio": ratio, "point": ratio}
            ranks = self.chosen_ranks(GROUPED, self.grouped, 0, "optimal", ratio)
            found.append((self.plan(self.grouped, ranks), labels))
        for seed in self.seeds:
            table = self.stief(seed)
            for ratio in self.protocol.ratios:
                labels = {"method": STIEF, "seed": seed, "requested_ratio": ratio, "point": ratio}
                for policy in ("sequential", "uniform", "optimal"):
                    ranks = self.chosen_ranks(STIEF, table, seed, policy, ratio)
                    found.append((self.plan(table, ranks), labels | {"policy": policy}))
        return found

    def plan(self, table: list[LayerBases], ranks: list[Ranks]) -> CompressionPlan:
        windows = sliding_windows(self.model.config)
        layers = tuple(
            LayerPlan(_at_rank(bases.keys, key), _at_rank(bases.values, value), window)
            for bases, (key, value), window in zip(table, ranks, windows, strict=True)
        )
        provenance = Provenance(
            model=self.name,
            text=next(iter(self.corpora)),
            sequences=self.calibration.shape[0],
            length=self.calibration.shape[1],
            objective="",
            solver="",
            seed=0,
            requested_ratio=0.0,
            versions={},
            threads=torch.get_num_threads(),
        )
        return CompressionPlan(layers, "pre", config_hash(self.model.config), provenance)

    def threshold_ranks(self) -> list[tuple[float, list[Ranks]]]:
        """EigenAttention's search in every layer on clean inputs, for every error budget."""
        budgets = self.protocol.error_budgets

        def compute() -> pd.DataFrame:
            rows = []
            for activations in capture(self.model, self.calibration[:8]):
                error = partial(_error, activations, self.eigen[activations.layer])
                keys, values = (_singular_values(activations, site) for site in SITES)
                for budget in budgets:
                    key, value = threshold(keys, values, error, budget)
                    row = {"budget": budget, "layer": activations.layer}
                    rows.append(row | {"key": key, "value": value})
            return pd.DataFrame(rows)

        frame = self.steps.frame("threshold", self.common | {"budgets": budgets}, compute)
        return [(budget, _ranks(frame[frame["budget"] == budget])) for budget in budgets]

    def chosen_ranks(
        self, method: str, table: list[LayerBases], seed: int, policy: str, ratio: float
    ) -> list[Ranks]:
        head_dim = _head_dim(self.eigen[0])
        budget = budget_from_ratio(ratio, self.layers, head_dim)
        if policy == "uniform":
            candidates = candidate_ranks(head_dim, self.protocol.candidates)
            return uniform(candidates, candidates, self.layers, budget, head_dim)
        surfaces = self.surfaces(method, table, seed, policy, budget)
        if policy == "optimal":
            return optimal(surfaces, budget, head_dim)
        rule = Sequential(self.layers, budget)
        return [rule.select(surface) for surface in surfaces]

    def surfaces(
        self, method: str, table: list[LayerBases], seed: int, policy: str, budget: int
    ) -> list[ErrorSurface]:
        """What ranks cost, by layer; behind compressed layers the budget has a say in it."""
        settings = self.bases_settings(method, seed)
        if policy == "sequential":
            settings |= {"budget": budget}

        def compute() -> pd.DataFrame:
            if policy == "sequential":
                _, found = sequential_ranks(self.model, self.calibration, table, budget)
            else:
                found = divergences(self.model, self.calibration, table)
            return _surfaces_to_frame(found)

        return _surfaces_from_frame(self.steps.frame(f"surfaces-{policy}", settings, compute))

    # Measurements

    def evaluated(self, plan: CompressionPlan | None, labels: dict[str, Any]) -> pd.DataFrame:
        """Perplexities of a plan and, if it is shown by task, accuracies, with its labels."""
        frame = self.perplexities(plan)
        if plan is None or labels["policy"] == SERIES[labels["method"]]:
            frame = pd.concat([frame, self.accuracies(plan)], ignore_index=True)
        ratio = 1.0 if plan is None else plan.ratio
        defaults = {"policy": "none", "requested_ratio": None, "point": 1.0, "bits": 16}
        for column, value in (defaults | labels).items():
            frame[column] = value
        return frame.assign(model=self.name, ratio=ratio, bytes_ratio=ratio)

    def perplexities(self, plan: CompressionPlan | None) -> pd.DataFrame:
        """With standard errors of the difference from the uncompressed model, window by window."""
        rows = []
        for corpus, tokens in self.corpora.items():
            nll = self.nll(plan, tokens)
            spread = nll if plan is None else nll - self.nll(None, tokens)
            value = math.exp(nll.mean())
            error = value * spread.std() / math.sqrt(len(nll))
            row = {"value": value, "standard_error": error, "measure": "perplexity", "of": corpus}
            rows.append(row)
        return pd.DataFrame(rows)

    def nll(self, plan: CompressionPlan | None, tokens: Tensor) -> pd.Series:
        """Nats per token of every window."""
        settings = self._measured(plan) | {"tokens": digest_of_tokens(tokens)}

        def compute() -> pd.DataFrame:
            return pd.DataFrame({"nll": perplexity(self.model, tokens, plan).by_sequence})

        return self.steps.frame("nll", settings, compute)["nll"]

    def accuracies(self, plan: CompressionPlan | None) -> pd.DataFrame:
        settings = self._measured(plan) | {"tasks": self.tasks, "items": self.protocol.items}
        settings |= {"documents": self.documents}

        def compute() -> pd.DataFrame:
            return zero_shot(
                *(self.model, self.tokenizer, self.tasks, plan),
                data=self.data,
                limit=self.protocol.items,
            )

        frame = self.steps.frame("accuracy", settings, compute)
        frame = frame.rename(columns={"task": "of", "accuracy": "value"})
        return frame.assign(measure="accuracy")[["value", "standard_error", "measure", "of"]]

    def _measured(self, plan: CompressionPlan | None) -> dict[str, Any]:
        return {
            "model": self.common["model"],
            "plan": None if plan is None else plan.digest(),
        }

    def quantized(self, plans: list[tuple[CompressionPlan, dict[str, Any]]]) -> pd.DataFrame:
        """Perplexity on the second corpus of the plans nearest to the paper's 60 %, rounded."""
        corpus = list(self.corpora)[1]
        rows = []
        for method in (EIGEN, STIEF):
            of_method = [p for p in plans if p[1]["method"] == method and p[1]["seed"] == 0]
            of_method = [p for p in of_method if p[1]["policy"] == SERIES[method]]
            plan, labels = min(of_method, key=lambda p: abs(p[0].ratio - QUANTIZED_RATIO))
            exact = plan.bytes_per_token()
            for bits in (16, *BITS):
                rounded = plan
                if bits < 16:
                    rounded = quantize(plan, self.model, self.calibration[:8], Quantization(bits))
                found = self.perplexities(rounded)
                found = found[found["of"] == corpus]
                share = plan.ratio * rounded.bytes_per_token() / exact
                numbers = {"ratio": plan.ratio, "bytes_ratio": share, "bits": bits}
                rows.append(found.assign(model=self.name, **labels, **numbers))
        return pd.concat(rows, ignore_index=True)

    def diagnostics(self) -> pd.DataFrame:
        """Errors of every layer at r = d/2 on held-out text."""
        tokens = next(iter(self.corpora.values()))
        half = round(0.5 * _head_dim(self.eigen[0]))
        frames = []
        runs = [(EIGEN, 0, self.eigen), *((STIEF, seed, self.stief(seed)) for seed in self.seeds)]
        for method, seed, table in runs:
            settings = self.common | asdict(self.protocol)
            settings |= {"method": method, "seed": seed, "tokens": digest_of_tokens(tokens)}
            bases = {
                layer: (_at_rank(b.keys, half), _at_rank(b.values, half))
                for layer, b in enumerate(table)
            }

            def compute(bases: Any = bases) -> pd.DataFrame:
                return diagnose(capture(self.model, tokens), bases)

            frame = self.steps.frame("diagnostics", settings, compute)
            frames.append(frame.assign(method=method, seed=seed, rank=half))
        return pd.concat(frames, ignore_index=True)

    def profile(self, plans: list[tuple[CompressionPlan, dict[str, Any]]]) -> pd.DataFrame:
        return pd.DataFrame(
            [
                labels | {"layer": index, "site": site, "rank_ratio": basis.rank / basis.head_dim}
                for plan, labels in plans
                if labels["policy"] == "sequential"
                for index, layer in enumerate(plan.layers)
                for site, basis in layer.sites
            ]
        )


def _bases(method: str, activations: LayerActivations, protocol: Protocol, seed: int) -> LayerBases:
    """Bases of a layer at all candidate ranks; an eigenbasis only whole."""
    head_dim = activations.head_dim
    ranks = [r for r in candidate_ranks(head_dim, protocol.candidates) if r < head_dim]
    found = []
    for site in SITES:
        grouping = HeadGrouping(GROUPINGS[method][site], activations.kv_heads)
        objective = OBJECTIVES.get("kq-svd" if method == GROUPED else method)()
        problem = objective.problem(activations, site, grouping)
        if method == EIGEN:
            found.append({head_dim: problem.closed_form(head_dim)})
            continue
        solver: Solver = Predictor(epochs=protocol.epochs) if method == STIEF else ClosedForm()
        bases = {rank: solver.solve(problem, rank, seed).basis for rank in ranks}
        found.append(bases | {head_dim: identity_basis(grouping, head_dim)})
    return LayerBases(*found)


def _error(activations: LayerActivations, bases: LayerBases, key: int, value: int) -> float:
    key_basis, value_basis = _at_rank(bases.keys, key), _at_rank(bases.values, value)
    return layer_errors(activations, key_basis, value_basis).layer_output_error


def _at_rank(bases: dict[int, Basis], rank: int) -> Basis:
    """The basis of a rank; of an eigenbasis its leading part."""
    if rank in bases:
        return bases[rank]
    (full,) = bases.values()
    down = full.down[..., :rank].contiguous()
    return Basis(down, down, full.grouping)


def _head_dim(bases: LayerBases) -> int:
    return next(iter(bases.keys.values())).head_dim


def _singular_values(activations: LayerActivations, site: Site) -> Tensor:
    grouping = HeadGrouping(GROUPINGS[EIGEN][site], activations.kv_heads)
    return singular_values(activations, site, grouping)


def _surfaces_to_frame(surfaces: list[ErrorSurface]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"layer": layer, "key": key, "value": value, "error": float(surface.errors[i, j])}
            for layer, surface in enumerate(surfaces)
            for i, key in enumerate(surface.key_ranks)
            for j, value in enumerate(surface.value_ranks)
        ]
    )


def _surfaces_from_frame(frame: pd.DataFrame) -> list[ErrorSurface]:
    found = []
    for _, rows in frame.groupby("layer"):
        wide = rows.pivot_table("error", "key", "value")
        errors = torch.from_numpy(wide.to_numpy(dtype="float64", copy=True))
        keys, values = (tuple(map(int, ranks)) for ranks in (wide.index, wide.columns))
        found.append(ErrorSurface(keys, values, errors))
    return found


def _ranks(frame: pd.DataFrame) -> list[Ranks]:
    ordered = frame.sort_values("layer")
    return [(int(k), int(v)) for k, v in zip(ordered["key"], ordered["value"], strict=True)]


def mismatches(model: str, measured: dict[str, float]) -> list[str]:
    """What is to be said if an uncompressed model is not the one the paper measured.

    Parameters
    ----------
    model : str
        As in paper_results.csv.
    measured : dict
        Corpus to perplexity.
    """
    table = pd.read_csv(HERE / "paper_results.csv")
    theirs = table[(table["model"] == model) & table["requested_ratio"].isna()].iloc[0]
    return [
        f"{model} uncompressed has a perplexity of {ours:.2f} on {corpus} in windows of "
        f"{PAPER_LENGTH} tokens, the paper's row says {theirs[corpus]:.2f}: weights, text or "
        "sampler differ, and so will all that follows"
        for corpus, ours in measured.items()
        if abs(ours / theirs[corpus] - 1) > MISMATCH
    ]


def _texts(given: argparse.Namespace, embedded: bool) -> tuple[str, str]:
    """Calibration text and second corpus."""
    first, second = ("docstrings", "pydoc-topics") if embedded else (WIKITEXT, C4)
    return given.text or first, given.second_text or second


def _digests(tasks: tuple[str, ...], data: Path) -> dict[str, str]:
    """SHA-256 of the documents of local tasks."""
    files = {task: local_task(task, data)["dataset_kwargs"]["data_files"]["test"] for task in tasks}
    return {task: hashlib.sha256(Path(f).read_bytes()).hexdigest() for task, f in files.items()}


def _title(text: str) -> str:
    """What a corpus is called in figures and tables."""
    known = {WIKITEXT: "WikiText-2", C4: "C4"}
    substitutes = {"docstrings": "docstrings (for WikiText)", "pydoc-topics": "topics (for C4)"}
    return (known | substitutes).get(text, Path(text).name)


def write_table(table: pd.DataFrame, out: Path, captions: list[str]) -> None:
    """table1 in three formats, the paper's own rows last and marked."""
    theirs = pd.read_csv(HERE / "paper_results.csv")
    theirs.insert(1, "method", "layer-output (the paper's number)")
    theirs.loc[theirs["requested_ratio"].isna(), "method"] = "uncompressed (the paper's number)"
    rows = pd.concat([table, theirs], ignore_index=True)
    rows.to_csv(out / "table1.csv", index=False)
    shown = with_errors(rows)
    notes = "".join(f"\n- {caption}" for caption in captions)
    text = (
        "# Table 1\n\nPerplexities (lower is better) and accuracies, ± standard errors over "
        "windows (of the difference from the uncompressed model) or items; means over seeds. "
        "The paper's rows are of other models and other texts "
        f"than ours.\n\n{shown.to_markdown(index=False)}\n\nOurs:\n{notes}\n"
    )
    (out / "table1.md").write_text(text, encoding="utf-8")
    latex = shown.to_latex(index=False, escape=True)
    (out / "table1.tex").write_text(latex, encoding="utf-8")


def with_errors(rows: pd.DataFrame) -> pd.DataFrame:
    """A table for reading: numbers as text, with their standard errors where there are any."""
    shown = rows[["model", "method"]].copy()
    for column in rows.columns[2:]:
        if column.endswith(" SE"):
            continue
        errors = rows.get(f"{column} SE", pd.Series(float("nan"), rows.index))
        shown[column] = [
            _number(value) + (f" ± {error:.2g}" if error == error else "")
            for value, error in zip(rows[column], errors, strict=True)
        ]
    return shown


def _number(value: float) -> str:
    return "–" if pd.isna(value) else f"{value:.3f}" if value < 2 else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
