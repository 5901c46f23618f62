"""Time of decode steps and prompts on compressed caches, against the stock cache.

    python studies/benchmark.py speed
    python studies/benchmark.py speed --model smollm2 --text allenai/c4:en --window 2048
    python studies/benchmark.py speed --model smollm2 --plans plans/bits plans/best
    python studies/benchmark.py speed --shapes

Plans are those of methods at every ratio, calibrated on a text, or plans that were saved before.
Timed are decode steps of one sequence after every number of --tokens, and after the first of them
decode steps of a batch and the reading of a prompt. Both caches take turns in one run, and numbers
are medians over rounds; working memory is the peak of one more step beyond the caches, as a share
of the uncompressed cache. More tokens than the model takes are cut. Written into --out:
results.csv (a row for each plan and measurement), summary.md and a figure.

--shapes times the attention of one layer with the shapes of an 8B model instead, on random data,
and what the time is made of. Written are shapes.csv (a row for each cache and part), summary.md and
a figure.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import common
import pandas as pd
import torch
from methods import METHODS, AttendedMethod
from reports import shapes as shapes_report
from reports import speed as report
from tqdm import tqdm
from transformers import PreTrainedModel

from manifoldkv import CompressionPlan
from manifoldkv.core.errors import ArgumentError
from manifoldkv.evaluate.speed import decode_speed, prefill_speed
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.fingerprint import digest_of_model
from manifoldkv.models.tokens import positions
from manifoldkv.runs.checkpoints import Checkpoints
from manifoldkv.serve import kernels
from measurements import base, random_model, shapes
from measurements.base import MethodBenchmark

USUAL = ("bits", "best")
NEW_TOKENS = 16
"""Decode steps of a round."""
SHAPES = "shapes.csv"
RANDOM = "a random model of {} layers with the shapes of an 8B model"
PACKAGES = ("manifoldkv", "torch", "transformers", "numba")
"""Packages that times depend on."""


def add_arguments(parser: common.Parser) -> None:
    base.add_calibration(parser, ratios=[8], threads=1)
    base.add_methods(parser, USUAL)
    add = parser.add_argument
    add("--window", type=int, default=512, help="tokens at which ratios hold (%(default)s)")
    add("--plans", nargs="+", type=Path, metavar="FOLDER", help="plans, in place of methods")
    after = "context lengths at which a decode step is timed"
    parser.add_list("--tokens", (2048, 8000), after, type=int, metavar="TOKENS")
    add("--batch", type=int, help="sequences of a batch (8, and 1 with --shapes)")
    add("--rounds", type=int, default=5, help="rounds of every measurement (%(default)s)")
    parser.add_device()
    add(
        "--shapes",
        nargs="?",
        type=int,
        const=32768,
        metavar="TOKENS",
        help="time one layer with the shapes of an 8B model after TOKENS tokens (%(const)s)",
    )
    add(
        "--random",
        type=int,
        metavar="LAYERS",
        help="time a random model with these shapes and LAYERS layers, of which an 8B model has 32",
    )


def run(given: argparse.Namespace, out: Path) -> None:
    if given.batch is None:
        given.batch = 8 if given.shapes is None else 1
    counts = {"rounds": given.rounds, "batch": given.batch, "tokens": min(given.tokens)}
    counts |= {} if given.shapes is None else {"shapes": given.shapes}
    counts |= {} if given.random is None else {"random": given.random}
    for name, count in counts.items():
        if count < 1:
            raise ArgumentError(f"--{name} must be >= 1, got {count}")
    checkpoints = common.stored_in(out, given).keyed(rounds=given.rounds, **machine(given))
    checkpoints = checkpoints.keyed(kernels=digest_of_kernels())
    if given.shapes is not None:
        counts = {"tokens": given.shapes, "batch": given.batch}
        device = torch.device(given.device)
        compute = partial(shapes.measure, **counts, rounds=given.rounds, device=device)
        frame = checkpoints.made_by(shapes.measure).keyed(**counts)
        results = frame.frame("shapes", compute).assign(rounds=given.rounds, **machine(given))
        results.to_csv(out / SHAPES, index=False)
        common.draw(out, shapes_report.draw, SHAPES)
        common.write_summary(out, shapes_report.summary(results))
        return
    results = measured(given, out, checkpoints)
    results.to_csv(out / "results.csv", index=False)
    common.draw(out, report.draw)
    common.write_summary(out, report.summary(results))


def redraw(out: Path) -> None:
    drawn = {"results.csv": report.draw, SHAPES: shapes_report.draw}
    there = [name for name in drawn if (out / name).is_file()]
    for name in there or ["results.csv"]:
        common.draw(out, drawn[name], name)


def machine(given: argparse.Namespace) -> dict[str, Any]:
    """Return what times depend on beside the code."""
    if given.device.startswith("cuda"):
        device = torch.cuda.get_device_name(given.device)
    else:
        device = f"{given.device}, {torch.backends.cpu.get_cpu_capability()}"
    described = ", ".join(f"{name} {version(name)}" for name in PACKAGES if find_spec(name))
    return {"threads": given.threads, "device": device, "versions": described}


def digest_of_kernels() -> str:
    """Return the SHA-256 of the kernels, which are imported at their first use."""
    folder = Path(*kernels.__path__)
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return hashlib.sha256(sources).hexdigest()


class NamedPlan(NamedTuple):
    """A plan with the name of its method or folder, and the ratio that was asked for."""

    name: str
    requested_ratio: float
    plan: CompressionPlan


@dataclass(frozen=True)
class Measurement:
    """A kind of measurement with its number of tokens and of sequences."""

    kind: str
    tokens: int
    batch: int

    def of(self, model: PreTrainedModel, plan: CompressionPlan, rounds: int) -> pd.DataFrame:
        """Return one row of times and bytes."""
        if self.kind == "prefill":
            return pd.DataFrame(
                [asdict(prefill_speed(model, plan, tokens=self.tokens, rounds=rounds))]
            )
        counts = {"tokens": self.tokens, "batch": self.batch, "rounds": rounds}
        return pd.DataFrame([asdict(decode_speed(model, plan, new_tokens=NEW_TOKENS, **counts))])


def measured(given: argparse.Namespace, out: Path, checkpoints: Checkpoints) -> pd.DataFrame:
    """Return a row for each plan and measurement."""
    load = saved_plans if given.plans else plans_of_methods
    model, plans = (random_plans if given.random else load)(given, out)
    model.to(given.device)
    lengths = lengths_of(given.tokens, positions(model) - NEW_TOKENS)
    kinds = [Measurement("decode", tokens, 1) for tokens in lengths]
    kinds += [Measurement("batch", lengths[0], given.batch), Measurement("prefill", lengths[0], 1)]
    weights = f"{given.random} random layers" if given.random else digest_of_model(model)
    steps = checkpoints.made_by(decode_speed).keyed(weights=weights)
    rows = []
    for name, requested_ratio, plan in tqdm(plans, desc="plans", disable=None):
        for kind in tqdm(kinds, desc="measurements", disable=None, leave=False):
            keyed = steps.keyed(plan=plan.digest(), **asdict(kind))
            compute: Callable[[], pd.DataFrame] = partial(kind.of, model, plan, given.rounds)
            rows.append(
                keyed.frame("speed", compute).assign(
                    composition=name,
                    requested_ratio=requested_ratio,
                    measurement=kind.kind,
                    batch=kind.batch,
                    ratio=plan.ratio_at(kind.tokens),
                    work=plan.compute,
                )
            )
    results = pd.concat(rows, ignore_index=True)
    for cache in ("stock", "compressed"):
        results[f"{cache}_working_share"] = (
            results[f"{cache}_working_bytes"] / results["stock_bytes"]
        )
    model_name = RANDOM.format(given.random) if given.random else Path(given.model).name
    return results.assign(model=model_name, rounds=given.rounds, **machine(given))


def lengths_of(asked: list[int], longest: int) -> list[int]:
    """Return different numbers of tokens, at most the longest."""
    for tokens in asked:
        if tokens > longest:
            message = f"{tokens:,} tokens are cut to {longest:,}: the model takes no more"
            tqdm.write(message, file=sys.stderr)
    return list(dict.fromkeys(min(tokens, longest) for tokens in asked))


def random_plans(given: argparse.Namespace, out: Path) -> tuple[PreTrainedModel, list[NamedPlan]]:
    """Return a random model, and a random plan of it."""
    model = random_model.random_model(given.random, torch.device(given.device))
    plan = random_model.random_plan(model, min(given.tokens))
    return model, [NamedPlan(random_model.PLAN, 1 / 8, plan)]


def saved_plans(given: argparse.Namespace, out: Path) -> tuple[PreTrainedModel, list[NamedPlan]]:
    """Return the model, and plans by the names of their folders.

    Raises
    ------
    ArgumentError
        If two folders have the same name.
    """
    names = [folder.resolve().name for folder in given.plans]
    if len(set(names)) < len(names):
        raise ArgumentError(f"plans must be in folders of different names, got {', '.join(names)}")
    model, _ = common.load(given.model)
    plans = []
    for name, folder in zip(names, given.plans, strict=True):
        plan = CompressionPlan.load(folder)
        plan.check_model(Decoder.of(model))
        plan.check_attended()
        plans.append(NamedPlan(name, plan.provenance.requested_ratio, plan))
    return model, plans


def plans_of_methods(
    given: argparse.Namespace, out: Path
) -> tuple[PreTrainedModel, list[NamedPlan]]:
    """Return the model, and the plans of all methods at all ratios.

    Raises
    ------
    ArgumentError
        If a method has no plan.
    """
    for name in given.methods:
        if not issubclass(METHODS.get(name), AttendedMethod):
            raise ArgumentError(f"{name} has no plan, and only plans are timed: leave it out")
    benchmark = MethodBenchmark(given, out, given.window)
    plans = [
        NamedPlan(point.name, point.method.ratio, point.method.plan)
        for point in benchmark.points()
        if isinstance(point.method, AttendedMethod)
    ]
    return benchmark.model, plans
