"""Loss and answers against the bytes of the cache.

    python studies/benchmark.py loss
    python studies/benchmark.py loss --model smollm2 --text allenai/c4:en \\
        --other-texts wikitext:wikitext-2-raw-v1 --window 2048
    python studies/benchmark.py loss --methods best integers sinks-recent --ratios 1/2 1/4

Every method compresses the cache to every ratio, calibrated on the same text. Measured are the loss
on held-out text, every token read through the compressed cache, and questions whose prompts are
read uncompressed and answered from the compressed cache. Bytes are those of the whole cache at the
window's length; bases are stored once and listed separately. Written into --out: results.csv (a row
for each measurement of each method and ratio), summary.md and two figures, and one of losses
against work if there are methods with a limit of it (work-4 to work-32).
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path

import common
import pandas as pd
from methods import AttendedMethod, Method
from reports.loss import draw, summary
from torch import Tensor
from tqdm import tqdm

from manifoldkv.evaluate import Comparison, Perplexity, perplexity
from manifoldkv.evaluate.questions import Question
from manifoldkv.evaluate.retrieval import summarize
from manifoldkv.evaluate.speed import decode_speed
from manifoldkv.runs.checkpoints import digest_of_tokens
from measurements import base
from measurements.base import MethodBenchmark, OperatingPoint

USUAL = (
    *("eigen-attention", "fast-uniform", "low-rank", "grouped", "grouped-4-bit"),
    *("best", "bits", "integers", "kivi", "fp8", "sinks-recent", "snapkv"),
)


def add_arguments(parser: common.Parser) -> None:
    base.add_calibration(parser, ratios=(2, 3, 4, 6, 8, 12, 16))
    base.add_questions(parser, tasks=["passkey"], items=16, nargs="*")
    base.add_methods(parser, USUAL)
    add = parser.add_argument
    parser.add_list("--other-texts", (), "further texts that are measured on", metavar="TEXT")
    add("--held-out", type=int, default=16, help="held-out windows of each text (%(default)s)")
    add("--window", type=int, default=512, help="tokens of each (%(default)s)")
    add("--task-length", type=int, default=512, help="tokens of a prompt (%(default)s)")
    after = "context lengths at which a decode step of every plan is timed"
    parser.add_list("--decode-after", (), after, type=int, metavar="TOKENS", nargs="*")


def run(given: argparse.Namespace, out: Path) -> None:
    results = LossBenchmark(given, out).measure()
    results.to_csv(out / "results.csv", index=False)
    redraw(out)
    described = {name: base.description(name) for name in given.methods}
    common.write_summary(out, summary(results, Path(given.model).name, described))


def redraw(out: Path) -> None:
    common.draw(out, draw)


class LossBenchmark(MethodBenchmark):
    """Loss on held-out texts, answers and decode times of methods."""

    def __init__(self, given: argparse.Namespace, out: Path) -> None:
        super().__init__(given, out, given.window)
        texts = (given.text, *given.other_texts)
        self.texts = {text: self.held_out(text, given.window) for text in texts}
        self.tasks = {task: self.questions(task, given.task_length) for task in given.tasks}

    def measure(self) -> pd.DataFrame:
        """Return a row for each operating point and text, task or context length."""
        stock = {text: self.stock_loss(tokens) for text, tokens in self.texts.items()}
        points = self.points()
        rows = [
            self.decode_row(point, point.method, tokens)
            for point in tqdm(points, desc="decoding", disable=None)
            for tokens in self.given.decode_after
            if isinstance(point.method, AttendedMethod)
        ]
        rows += [self.text_rows(point, stock) for point in tqdm(points, desc="texts", disable=None)]
        for posed in tqdm(self.tasks.values(), desc="tasks", disable=None):
            rows += self.task_rows(points, posed)
        results = pd.concat(rows, ignore_index=True)
        return results.assign(**self.columns, task_length=self.given.task_length)

    def decode_row(
        self, point: OperatingPoint, method: AttendedMethod, tokens: int
    ) -> pd.DataFrame:
        """Return the time of a decode step over that of the stock cache."""
        checkpoints = self.checkpoints_of(method).made_by(decode_speed)

        def compute() -> pd.DataFrame:
            return pd.DataFrame({"decode_time": [method.decode_time(tokens)]})

        checkpoints = checkpoints.keyed(tokens=tokens, threads=self.given.threads)
        frame = checkpoints.frame("decode", compute)
        return point.labelled(frame.assign(measured_on=str(tokens), kind="decode"))

    def stock_loss(self, tokens: Tensor) -> Perplexity:
        """Return the loss of the uncompressed model."""
        checkpoints = self.checkpoints.keyed(tokens=digest_of_tokens(tokens)).made_by(perplexity)

        def compute() -> pd.DataFrame:
            return pd.DataFrame({"nll": perplexity(self.model, tokens).by_sequence})

        return read_losses(checkpoints.frame("stock-text", compute), tokens)

    def text_rows(self, point: OperatingPoint, stock: dict[str, Perplexity]) -> pd.DataFrame:
        """Return the added loss on every text."""
        rows = []
        for text, tokens in self.texts.items():
            checkpoints = self.checkpoints_of(point.method).keyed(tokens=digest_of_tokens(tokens))
            frame = checkpoints.frame("text", partial(losses_frame, point.method, tokens))
            compared = Comparison(stock[text], read_losses(frame, tokens))
            rows.append(
                {
                    "measured_on": text,
                    "kind": "text",
                    "items": len(tokens),
                    "stock_nll": stock[text].nll,
                    "added_nll": compared.added_nll,
                    "nll_error": compared.standard_error,
                }
            )
        return point.labelled(pd.DataFrame(rows))

    def task_rows(self, points: list[OperatingPoint], posed: list[Question]) -> list[pd.DataFrame]:
        """Return the mean score and loss of a task's answers at every operating point."""
        stock = self.stock_answers(posed)
        holders = {
            str(index): (self.checkpoints_of(point.method), point.method.holder)
            for index, point in enumerate(points)
        }
        answers = self.answers(posed, holders)
        return [
            point.labelled(
                summarize(answers[str(index)], stock)
                .rename(columns={"task": "measured_on"})
                .assign(kind="task")
            )
            for index, point in enumerate(points)
        ]


def losses_frame(method: Method, tokens: Tensor) -> pd.DataFrame:
    measured = method.perplexity(tokens)
    missing = [math.nan] * len(tokens)
    return pd.DataFrame({"nll": missing if measured is None else measured.by_sequence})


def read_losses(frame: pd.DataFrame, tokens: Tensor) -> Perplexity:
    return Perplexity(tuple(frame["nll"]), tokens.shape[0] * (tokens.shape[1] - 1))
