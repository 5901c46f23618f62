"""What do bytes buy? Loss and recall against the bytes of the cache, for plans and their rivals.

    python studies/frontier.py
    python studies/frontier.py --model smollm2 --text allenai/c4:en \\
        --other-texts wikitext:wikitext-2-raw-v1 --window 2048
    python studies/frontier.py --compositions best integers sinks-recent --ratios 0.25 0.5

Compositions are recipes, recipes with a part taken out or put in, and what people would use instead
of a plan. Every plan is made for every ratio from the same calibration text. Measured are the loss
on held-out text, every token read through what the cache holds, and questions whose prompts are
read as they are, the answer decoded from what the cache holds. Bytes are all that the cache holds
at the window's length; bases come once and are named beside. Written into --out: results.csv (a row
for each measurement of each plan), summary.md and two figures. What is measured is stored in
--out/steps: an interrupted run goes on where it was, a repeated one draws at once.
"""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial
from pathlib import Path

import common
import pandas as pd
from comparison import contest
from comparison.compositions import COMPOSITIONS, USUAL, PlanPoint, Point
from comparison.contest import Asked, Contest
from comparison.report import draw, summary
from torch import Tensor
from tqdm import tqdm

from manifoldkv import open_text, sample_tokens
from manifoldkv.evaluation import Comparison, Perplexity, perplexity
from manifoldkv.evaluation.questions import TASKS, Question
from manifoldkv.evaluation.retrieval import summarize
from manifoldkv.evaluation.speed import decode_speed
from manifoldkv.runs.checkpoints import digest_of_tokens

RATIOS = tuple(1 / times for times in (2, 3, 4, 6, 8, 12, 16))


def main() -> int:
    parser = common.Parser(f"{__doc__}\ncompositions:\n{contest.described()}")
    parser.add_model()
    parser.add_text()
    contest.add_arguments(parser, RATIOS, USUAL)
    add = parser.add_argument
    add(
        "--other-texts",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="also measured on, by their held-out parts (none)",
    )
    add("--held-out", type=int, default=16, help="windows of each text measured on (%(default)s)")
    add("--window", type=int, default=512, help="tokens in each (%(default)s)")
    add("--tasks", nargs="*", default=["passkey"], help=f"of {', '.join(TASKS)} (passkey)")
    add("--task-length", type=int, default=512, help="tokens of a prompt (%(default)s)")
    add("--items", type=int, default=16, help="questions of each task (%(default)s)")
    add(
        "--decode-after",
        type=int,
        nargs="*",
        default=[],
        metavar="TOKENS",
        help="also time a decode step of every plan after so many, against the stock cache (none)",
    )
    parser.add_out("figures/frontier/<model>")
    return common.run_study(parser, study)


def study(given: argparse.Namespace) -> None:
    contest.check(given)
    name = Path(given.model).name
    out = common.output_folder(given, "frontier", name)
    if given.redraw:
        common.draw(out, draw)
        return
    results = Frontier(given, out).measure()
    results.to_csv(out / "results.csv", index=False)
    common.draw(out, draw)
    said = {name: COMPOSITIONS[name].said for name in given.compositions}
    common.write_summary(out, summary(results, name, said))


class Frontier(Contest):
    """Compositions of a model and what they lose."""

    def __init__(self, given: argparse.Namespace, out: Path) -> None:
        super().__init__(given, out, given.window)
        self.texts = {
            text: sample_tokens(
                open_text(text),
                self.tokenizer,
                sequences=given.held_out,
                length=given.window,
                split="held-out",
            )
            for text in (given.text, *given.other_texts)
        }
        self.tasks = {task: self.posed(task, given.task_length) for task in given.tasks}

    def measure(self) -> pd.DataFrame:
        stock_losses = {name: self.stock_loss(name) for name in self.texts}
        points = self.points()
        timed = [
            self.decode_row(asked, tokens)
            for asked in tqdm(points, desc="decoding", disable=None)
            for tokens in self.given.decode_after
            if isinstance(asked.point, PlanPoint)
        ]
        rows = timed + [
            self.text_rows(asked, stock_losses)
            for asked in tqdm(points, desc="texts", disable=None)
        ]
        for task in tqdm(self.tasks, desc="tasks", disable=None):
            rows += self.task_rows(points, self.tasks[task])
        found = pd.concat(rows, ignore_index=True)
        return found.assign(**self.common, task_length=self.given.task_length)

    def decode_row(self, asked: Asked, tokens: int) -> pd.DataFrame:
        """Return what a decode step of a plan takes, in those of the stock cache."""
        point = asked.point
        assert isinstance(point, PlanPoint)
        stored = self.stored(asked.name, asked.ratio).made_by(decode_speed)

        def compute() -> pd.DataFrame:
            return pd.DataFrame({"decode_time": [point.decode_time(tokens)]})

        frame = stored.keyed(tokens=tokens, threads=self.given.threads).frame("decode", compute)
        return asked.described(frame.assign(measured_on=str(tokens), kind="decode"))

    def stock_loss(self, text: str) -> Perplexity:
        """Return how well the uncompressed model predicts a text."""
        tokens = self.texts[text]
        stored = self.measured.keyed(tokens=digest_of_tokens(tokens)).made_by(perplexity)

        def compute() -> pd.DataFrame:
            return pd.DataFrame({"nll": perplexity(self.model, tokens).by_sequence})

        return read_losses(stored.frame("stock-text", compute), tokens)

    def text_rows(self, asked: Asked, stock: dict[str, Perplexity]) -> pd.DataFrame:
        """Return what a point adds to the loss on every text."""
        rows = []
        for text, tokens in self.texts.items():
            stored = self.stored(asked.name, asked.ratio).keyed(tokens=digest_of_tokens(tokens))
            frame = stored.frame("text", partial(written_losses, asked.point, tokens))
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
        return asked.described(pd.DataFrame(rows))

    def task_rows(self, points: list[Asked], posed: list[Question]) -> list[pd.DataFrame]:
        """Return how the questions of a task are answered from every point."""
        stock = self.stock_answers(posed)
        holders = {
            str(place): (self.stored(asked.name, asked.ratio), asked.point.holder)
            for place, asked in enumerate(points)
        }
        found = self.answers(posed, holders)
        return [
            asked.described(
                summarize(found[str(place)], stock)
                .rename(columns={"task": "measured_on"})
                .assign(kind="task")
            )
            for place, asked in enumerate(points)
        ]


def written_losses(point: Point, tokens: Tensor) -> pd.DataFrame:
    found = point.perplexity(tokens)
    nothing = [math.nan] * len(tokens)
    return pd.DataFrame({"nll": nothing if found is None else found.by_sequence})


def read_losses(frame: pd.DataFrame, tokens: Tensor) -> Perplexity:
    return Perplexity(tuple(frame["nll"]), tokens.shape[0] * (tokens.shape[1] - 1))


if __name__ == "__main__":
    sys.exit(main())
