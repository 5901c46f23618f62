"""Answers that need a token far back: passkeys, copying, key-value pairs and mappings.

    python studies/benchmark.py recall
    python studies/benchmark.py recall --methods integers sinks-recent best --ratios 1/4
    python studies/benchmark.py recall --model smollm2 --text allenai/c4:en \\
        --task-lengths 1024 2048 --tasks passkey long-passkey uuid mapping

Every method compresses the cache to every ratio, and answers are decoded from it. Prompts are read
uncompressed (exact) and, of caches that are attended to, also through the compressed cache
(compressed), unless --exact-only is given. A task of which the uncompressed model answers less than
half is marked and left out of the averages; of its answers only the loss is measured, except for
passkeys, which have a map.
Written into --out: results.csv (a row for each task, length and cache), summary.md and a map of the
nats added to answers by task and cache; of passkeys also passkeys.csv (a row for each question) and
a map of the share found by depth and length.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import common
import pandas as pd
from methods import AttendedMethod
from reports.recall import STOCK, draw, draw_tasks, summary
from tqdm import tqdm

from manifoldkv.cache.compressed import Prefill
from manifoldkv.evaluation.questions import Question
from manifoldkv.evaluation.retrieval import Holder, summarize
from manifoldkv.runs.checkpoints import Checkpoints
from measurements import base
from measurements.base import MethodBenchmark, OperatingPoint

USUAL = ("integers", "sinks-recent", "snapkv", "eigen-attention", "fast-uniform", "grouped", "best")
MAPPED = "passkey"
PASSKEYS = "passkeys.csv"
EXACT: Prefill = "exact"
COMPRESSED: Prefill = "compressed"


def add_arguments(parser: common.Parser) -> None:
    base.add_calibration(parser, ratios=[4])
    base.add_questions(parser, tasks=["passkey", "copying", "key-value"], items=10)
    base.add_methods(parser, USUAL)
    lengths = (256, 512)
    parser.add_list("--task-lengths", lengths, "tokens of a prompt", type=int, metavar="TOKENS")
    base.add_window(parser)
    parser.add_argument(
        "--exact-only",
        action="store_true",
        help="read no prompt through a compressed cache, which takes half of the time",
    )


def run(given: argparse.Namespace, out: Path) -> None:
    results, answers = RecallBenchmark(given, out).measure()
    results.to_csv(out / "results.csv", index=False)
    if len(answers):
        answers.to_csv(out / PASSKEYS, index=False)
    redraw(out)
    described = {name: base.description(name) for name in given.methods}
    common.write_summary(out, summary(results, Path(given.model).name, described))


def redraw(out: Path) -> None:
    common.draw(out, draw_tasks)
    if (out / PASSKEYS).is_file():
        common.draw(out, draw, PASSKEYS)


class RecallBenchmark(MethodBenchmark):
    """Answers decoded from the caches of methods."""

    def __init__(self, given: argparse.Namespace, out: Path) -> None:
        super().__init__(given, out, given.window or max(given.task_lengths))
        self.tasks = {
            (task, length): self.questions(task, length)
            for task in given.tasks
            for length in given.task_lengths
        }

    def measure(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return means by task, length and cache, and the answers to all passkey questions."""
        points = self.points()
        rows, passkeys = [], []
        for (task, length), posed in tqdm(self.tasks.items(), desc="tasks", disable=None):
            stock = self.stock_answers(posed)
            counted = bool(summarize(stock, stock)["counted"].all())
            answers = self.answers_of(posed, points, decoded=counted or task == MAPPED)
            columns = {"task_length": length, "threads": self.given.threads}
            rows.append(summarize(stock, stock).assign(composition=STOCK, ratio=1.0, **columns))
            by_cache = [stock.assign(cache=STOCK, task_length=length)]
            for key, frame in answers.items():
                index, prefill = key.split()
                point = points[int(index)]
                row = point.labelled(summarize(frame, stock))
                rows.append(row.assign(prefill=prefill, task_length=length))
                if prefill == EXACT:
                    by_cache.append(frame.assign(cache=title(point), task_length=length))
            if task == MAPPED:
                passkeys += by_cache
        results = pd.concat(rows, ignore_index=True).assign(**self.columns)
        return results, pd.concat(passkeys, ignore_index=True) if passkeys else pd.DataFrame()

    def answers_of(
        self, posed: list[Question], points: list[OperatingPoint], *, decoded: bool
    ) -> dict[str, pd.DataFrame]:
        """Return answers by index of the point and prefill; without scores if not decoded."""
        if decoded:
            return self.answers(posed, self.holders(points))
        # With one answer that has to follow at once, no text is generated.
        read = [replace(q, answers=q.answers[:1], new_tokens=len(q.continuation)) for q in posed]
        answers = self.answers(read, self.holders(points))
        return {key: frame.assign(score=math.nan) for key, frame in answers.items()}

    def holders(self, points: list[OperatingPoint]) -> dict[str, tuple[Checkpoints, Holder]]:
        """Return checkpoints and holders by index of the point and prefill."""
        holders: dict[str, tuple[Checkpoints, Holder]] = {}
        for index, (_, method, _) in enumerate(points):
            checkpoints = self.checkpoints_of(method)
            holders[f"{index} {EXACT}"] = checkpoints, method.holder
            if isinstance(method, AttendedMethod) and not self.given.exact_only:
                through = partial(method.holder, prefill=COMPRESSED)
                holders[f"{index} {COMPRESSED}"] = checkpoints.keyed(prefill=COMPRESSED), through
        return holders


def title(point: OperatingPoint) -> str:
    return f"{point.name}, {1 / point.facts['ratio']:.1f} times smaller"
