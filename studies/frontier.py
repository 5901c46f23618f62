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
import time
from functools import partial
from pathlib import Path
from typing import Any

import common
import pandas as pd
from comparison.compositions import COMPOSITIONS, USUAL, Point, Setting
from comparison.report import draw, summary
from torch import Tensor
from tqdm import tqdm

from manifoldkv import (
    RankError,
    UnknownNameError,
    open_text,
    sample_tokens,
)
from manifoldkv.evaluation import Comparison, Perplexity, perplexity
from manifoldkv.evaluation.questions import TASKS, Question, questions
from manifoldkv.evaluation.retrieval import (
    Holder,
    retrieval,
    retrieval_through,
    summarize,
)
from manifoldkv.figures import save_figure
from manifoldkv.runs.checkpoints import digest_of_model, digest_of_tokens
from manifoldkv.solvers.base import check_seed
from manifoldkv.text.tokens import check_length

PROMPT_TOKENS = 8192
"""Of a batch of questions, whose keys and values are held at a time."""
Asked = tuple[str, float, Point, pd.DataFrame]
"""A composition's name, the ratio, what it made, and the bytes of that."""
RATIOS = tuple(1 / times for times in (2, 3, 4, 6, 8, 12, 16))


def main() -> int:
    parser = common.Parser(__doc__ + "\ncompositions:\n" + "\n".join(_described()))
    parser.add_model()
    parser.add_text()
    add = parser.add_argument
    add(
        "--other-texts",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="also measured on, by their held-out parts (none)",
    )
    add(
        "--compositions",
        nargs="+",
        default=USUAL,
        metavar="NAME",
        help=f"({' '.join(USUAL)}); see below",
    )
    add(
        "--ratios",
        type=float,
        nargs="+",
        default=RATIOS,
        help="of plans and of what drops tokens (2, 3, 4, 6, 8, 12 and 16 times smaller)",
    )
    add("--sequences", type=int, default=64, help="for calibration (%(default)s)")
    add("--sequence-length", type=int, default=512, help="of these (%(default)s)")
    add("--held-out", type=int, default=16, help="windows of each text measured on (%(default)s)")
    add("--window", type=int, default=512, help="tokens in each (%(default)s)")
    add("--tasks", nargs="*", default=["passkey"], help=f"of {', '.join(TASKS)} (%(default)s)")
    add("--task-length", type=int, default=512, help="tokens of a prompt (%(default)s)")
    add("--items", type=int, default=16, help="questions of each task (%(default)s)")
    add("--rotary", choices=("pre", "post"), default="pre", help="(%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_threads()
    parser.add_out("figures/frontier/<model>")
    return common.run_study(parser, study)


def study(given: argparse.Namespace) -> None:
    unknown = [c for c in given.compositions if c not in COMPOSITIONS]
    if unknown:
        known = ", ".join(COMPOSITIONS)
        raise UnknownNameError(f"unknown composition {unknown[0]!r}; known: {known}")
    for ratio in given.ratios:
        if not 0 < ratio <= 1:
            raise RankError(f"--ratios {ratio:g} is not in (0, 1]")
    check_seed(given.seed)
    name = Path(given.model).name
    out = common.output_folder(given, "frontier", name)
    results = Frontier(given, out).measure()
    results.to_csv(out / "results.csv", index=False)
    for stem, figure in draw(results, name).items():
        save_figure(figure, out / stem)
    said = {name: COMPOSITIONS[name].said for name in given.compositions}
    common.write_summary(out, summary(results, name, said))


def _described() -> list[str]:
    width = max(map(len, COMPOSITIONS))
    return [f"  {name:{width}}  {it.said}" for name, it in COMPOSITIONS.items()]


class Frontier:
    """Compositions of a model and what they lose."""

    def __init__(self, given: argparse.Namespace, out: Path) -> None:
        self.given = given
        self.model, tokenizer = common.load(given.model)
        self.tokenizer = tokenizer
        check_length(self.model, max(given.window, given.task_length))
        self.source = open_text(given.text)
        calibration = sample_tokens(
            self.source,
            tokenizer,
            sequences=given.sequences,
            length=given.sequence_length,
            split="calibration",
        )
        self.texts = {
            text: sample_tokens(
                open_text(text),
                tokenizer,
                sequences=given.held_out,
                length=given.window,
                split="held-out",
            )
            for text in (given.text, *given.other_texts)
        }
        self.tasks: dict[str, list[Question]] = {
            task: questions(
                task,
                tokenizer,
                self.source,
                length=given.task_length,
                items=given.items,
                seed=given.seed,
            )
            for task in given.tasks
        }
        self.at = Setting(
            self.model, calibration, given.window, given.rotary, given.seed, out / "steps" / "plans"
        )
        self.common = {
            "model": Path(given.model).name,
            "calibration": given.text,
            "rotary": given.rotary,
            "seed": given.seed,
            "sequences": given.sequences,
            "length": given.sequence_length,
            "window": given.window,
            "task_length": given.task_length,
        }
        weights = digest_of_model(self.model)
        self.measured = common.stored_in(out, given).keyed(weights=weights)
        self.checkpoints = self.measured.keyed(
            **self.common, calibration_tokens=digest_of_tokens(calibration)
        )

    def measure(self) -> pd.DataFrame:
        stock_losses = {name: self.stock_loss(name) for name in self.texts}
        stock_answers = {task: self.stock_answers(task) for task in self.tasks}
        points = self.points()
        rows = [
            self.text_rows(point, stock_losses)
            for point in tqdm(points, desc="texts", disable=None)
        ]
        rows += self.task_rows(points, stock_answers)
        return pd.concat(rows, ignore_index=True).assign(**self.common)

    def points(self) -> list[Asked]:
        """Return what every composition makes at every ratio that it reaches, with its bytes."""
        found = []
        asked = [
            (name, ratio)
            for name in self.given.compositions
            for ratio in COMPOSITIONS[name].ratios(list(self.given.ratios))
        ]
        for name, ratio in tqdm(asked, desc="plans", disable=None):
            point = COMPOSITIONS[name].point(self.at, ratio)
            try:
                made = self.stored(name, ratio).frame("made", partial(self.made, point))
            except RankError as error:  # a rule may not reach a ratio: the others go on
                tqdm.write(f"frontier: {name} at {ratio:g} left out: {error}", file=sys.stderr)
                continue
            found.append((name, ratio, point, made))
        if not found:
            raise RankError("no composition reaches a ratio that was asked for")
        return found

    def stored(self, name: str, ratio: float) -> Any:
        """Return the checkpoints of a composition at a ratio."""
        known = COMPOSITIONS[name]
        stored = self.checkpoints.keyed(composition=known.describe(), asked=ratio)
        return stored.made_by(type(known), retrieval_through, *known.made_by())

    def made(self, point: Point) -> pd.DataFrame:
        start = time.perf_counter()
        nbytes = point.nbytes(self.given.window)
        seconds = time.perf_counter() - start
        per_token = nbytes / self.given.window
        fact = {
            "ratio": per_token / self.at.stock_bytes_per_token,
            "bytes_per_token": per_token,
            "seconds": seconds,
            "threads": self.given.threads,
        }
        nothing = {"basis_bytes": 0, "recent": 0, "attention_work": math.nan}
        return pd.DataFrame([fact | nothing | point.facts()])

    def stock_loss(self, text: str) -> Perplexity:
        tokens = self.texts[text]
        stored = self.measured.keyed(tokens=digest_of_tokens(tokens))

        def compute() -> pd.DataFrame:
            return pd.DataFrame({"nll": perplexity(self.model, tokens).by_sequence})

        return read_losses(stored.frame("stock-text", compute), tokens)

    def stock_answers(self, task: str) -> pd.DataFrame:
        stored = self.measured.keyed(questions=repr(self.tasks[task]))
        return stored.frame(
            "stock-task",
            lambda: retrieval(
                self.model, self.tokenizer, self.tasks[task], batch_size=self.batch_size
            ),
        )

    @property
    def batch_size(self) -> int:
        return max(1, PROMPT_TOKENS // self.given.task_length)

    def text_rows(self, asked: Asked, stock: dict[str, Perplexity]) -> pd.DataFrame:
        name, ratio, point, made = asked
        rows = []
        for text, tokens in self.texts.items():
            stored = self.stored(name, ratio).keyed(tokens=digest_of_tokens(tokens))
            frame = stored.frame("text", partial(written_losses, point, tokens))
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
        return described(name, ratio, made, pd.DataFrame(rows))

    def task_rows(self, points: list[Asked], stock: dict[str, pd.DataFrame]) -> list[pd.DataFrame]:
        """Ask the questions of every task from all points at once: a prompt is read once."""
        rows = []
        for task in tqdm(self.tasks, desc="tasks", disable=None):
            stores = [
                self.stored(name, ratio).keyed(questions=repr(self.tasks[task]))
                for name, ratio, *_ in points
            ]
            missing = {
                str(place): point.holder
                for place, (_, _, point, _) in enumerate(points)
                if not stores[place].has_frame("task")
            }
            found = self.answers(task, missing) if missing else {}
            for place, (name, ratio, _, made) in enumerate(points):
                frame = stores[place].frame("task", partial(found.get, str(place)))
                row = summarize(frame, stock[task]).rename(columns={"task": "measured_on"})
                rows.append(described(name, ratio, made, row.assign(kind="task")))
        return rows

    def answers(self, task: str, caches: dict[str, Holder]) -> dict[str, pd.DataFrame]:
        """Return how the questions of a task are answered from caches, by the names of these."""
        answers = retrieval_through(
            self.model, self.tokenizer, self.tasks[task], caches, batch_size=self.batch_size
        )
        return {
            str(name): part.drop(columns="cache").reset_index(drop=True)
            for name, part in answers.groupby("cache")
        }


def described(name: str, ratio: float, made: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows with what is known of the point that they were measured of."""
    known = {str(column): value for column, value in made.iloc[0].items()}
    return rows.assign(composition=name, requested_ratio=ratio, **known)


def written_losses(point: Point, tokens: Tensor) -> pd.DataFrame:
    found = point.perplexity(tokens)
    return pd.DataFrame({"nll": [math.nan] if found is None else found.by_sequence})


def read_losses(frame: pd.DataFrame, tokens: Tensor) -> Perplexity:
    losses = tuple(frame["nll"])
    if len(losses) < len(tokens):  # of one that has none
        losses = losses * len(tokens)
    return Perplexity(losses, tokens.shape[0] * (tokens.shape[1] - 1))


if __name__ == "__main__":
    sys.exit(main())
