"""Parts that all kinds of measurement share: options, texts, operating points and answers."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import common
import pandas as pd
from methods import METHODS, Method, Setting
from torch import Tensor
from tqdm import tqdm

from manifoldkv import open_text
from manifoldkv.core.errors import ArgumentError, ModelError, PlanError
from manifoldkv.core.seeds import check_seed
from manifoldkv.evaluate.questions import TASKS, Question, questions
from manifoldkv.evaluate.retrieval import Holder, check_questions, retrieval, retrieval_through
from manifoldkv.models.fingerprint import digest_of_model
from manifoldkv.models.tokens import check_length
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_tokens

PROMPT_TOKENS = 8192
"""Tokens of a batch of questions, whose keys and values are in memory at once."""


def ratio_of(text: str) -> float:
    """Return a ratio that is written as a decimal number or as a fraction."""
    try:
        ratio = float(Fraction(text))
    except (ValueError, ArithmeticError):
        raise argparse.ArgumentTypeError(f"not a number or a fraction: {text}") from None
    if not 0 < ratio <= 1:
        raise argparse.ArgumentTypeError(f"a ratio must be in (0, 1], got {text}")
    return ratio


def add_calibration(parser: common.Parser, *, ratios: Sequence[int], threads: int = 2) -> None:
    """Add the options of every kind of measurement, with the defaults of this one."""
    parser.add_model()
    parser.add_text()
    add = parser.add_argument
    parser.add_list(
        "--ratios",
        [Fraction(1, times) for times in ratios],
        "bytes of the cache over those of the uncompressed one",
        type=ratio_of,
        metavar="R",
    )
    add("--sequences", type=int, default=64, help="calibration sequences (%(default)s)")
    add("--sequence-length", type=int, default=512, help="tokens of each (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_threads(threads)


def add_questions(
    parser: common.Parser, *, tasks: Sequence[str], items: int, nargs: str = "+"
) -> None:
    """Add the options of measurements that ask questions."""
    parser.add_list("--tasks", tasks, f"of {', '.join(TASKS)}", metavar="TASK", nargs=nargs)
    parser.add_argument(
        "--items", type=int, default=items, help="questions of each task (%(default)s)"
    )


def add_window(parser: common.Parser) -> None:
    """Add the option of measurements whose prompts are not those that sizes hold for."""
    described = "tokens at which sizes are counted (those of the longest prompt)"
    parser.add_argument("--window", type=int, metavar="TOKENS", help=described)


def add_methods(parser: common.Parser, default: Sequence[str]) -> None:
    """Add the options of measurements that compare methods, and describe all methods."""
    parser.add_list("--methods", default, "of those described below")
    parser.add_argument(
        "--rotary",
        choices=("pre", "post"),
        default="pre",
        help="compress keys before or after rotation (%(default)s)",
    )
    names = METHODS.names()
    width = max(map(len, names))
    lines = [f"  {name:{width}}  {description(name)}" for name in names]
    parser.epilog = "\n".join(["methods:", *lines])


def description(method: str) -> str:
    """Return the first line of a method's docstring."""
    return (METHODS.get(method).__doc__ or "").partition("\n")[0]


class Benchmark:
    """A model with its calibration text and its questions.

    Parameters
    ----------
    given : Namespace
        Options of `add_calibration`, and of `add_questions` if there are any.
    out : Path
        Folder of the results and their checkpoints.
    longest : int
        Tokens of the longest sequence that is measured on.
    """

    def __init__(self, given: argparse.Namespace, out: Path, longest: int) -> None:
        check_seed(given.seed)
        self.given = given
        self.model, self.tokenizer = common.load(given.model)
        check_length(self.model, longest)
        self.source = open_text(given.text)
        self.calibration = common.tokens_of(
            given.text, self.tokenizer, "calibration", given.sequences, given.sequence_length
        )
        self.plans = out / "steps" / "plans"
        self.checkpoints = common.stored_in(out, given).keyed(weights=digest_of_model(self.model))

    def held_out(self, text: str, length: int) -> Tensor:
        """Return windows (held_out, length) of a text's held-out part."""
        return common.tokens_of(text, self.tokenizer, "held-out", self.given.held_out, length)

    def questions(self, task: str, length: int) -> list[Question]:
        """Return the questions of a task with prompts of a length.

        Raises
        ------
        ArgumentError
            If the task is unknown.
            If a prompt or its answer is too long for the task or the model.
        """
        items, seed = self.given.items, self.given.seed
        posed = questions(task, self.tokenizer, self.source, length=length, items=items, seed=seed)
        check_questions(self.model, posed)
        return posed


class OperatingPoint(NamedTuple):
    """A method at one ratio, with the facts that all its rows repeat."""

    name: str
    method: Method
    facts: dict[str, Any]

    def labelled(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Return rows with the name, the requested ratio and the facts."""
        return rows.assign(composition=self.name, requested_ratio=self.method.ratio, **self.facts)


class MethodBenchmark(Benchmark):
    """Methods compared on one model.

    Parameters
    ----------
    given : Namespace
        Options of `add_calibration` and `add_methods`.
    out : Path
        Folder of the results and their checkpoints.
    window : int
        Tokens at which ratios are counted.
    """

    def __init__(self, given: argparse.Namespace, out: Path, window: int) -> None:
        for name in given.methods:
            METHODS.get(name)
        super().__init__(given, out, window)
        self.setting = Setting(
            self.model, self.calibration, window, given.rotary, given.seed, self.plans
        )
        self.columns = {
            "model": Path(given.model).name,
            "calibration": given.text,
            "rotary": given.rotary,
            "seed": given.seed,
            "sequences": given.sequences,
            "length": given.sequence_length,
            "window": window,
        }
        self._of_plans = self.checkpoints.keyed(
            **self.columns, calibration_tokens=digest_of_tokens(self.calibration)
        )

    def points(self) -> list[OperatingPoint]:
        """Return every method at every ratio that it reaches.

        What a method cannot reach is left out, with a line on standard error that says why.

        Raises
        ------
        ArgumentError
            If no method reaches a ratio.
        """
        points = []
        requested = [
            (name, ratio)
            for name in self.given.methods
            for ratio in METHODS.get(name).ratios(list(self.given.ratios))
        ]
        for name, ratio in tqdm(requested, desc="plans", disable=None):
            try:
                points.append(self._point(name, ratio))
            except (ArgumentError, PlanError, ModelError) as error:
                tqdm.write(f"{name} at {ratio:g} is left out: {error}", file=sys.stderr)
        if not points:
            raise ArgumentError("no method reaches a requested ratio on this model")
        return points

    def _point(self, name: str, ratio: float) -> OperatingPoint:
        method = METHODS.get(name)(self.setting, ratio)
        for one in () if self.given.force else method.planned():
            digest = self.checkpoints_of(one).digest[:16]
            one.plan_folder = self.plans / f"{METHODS.describe(one)['name']}-{digest}"
        facts = self.checkpoints_of(method).frame("made", partial(self._facts, method))
        columns = {str(column): value for column, value in facts.iloc[0].items()}
        return OperatingPoint(name, method, columns)

    def checkpoints_of(self, method: Method) -> Checkpoints:
        """Return the checkpoints of a method at its ratio."""
        checkpoints = self._of_plans.keyed(method=method.describe(), ratio=method.ratio)
        return checkpoints.made_by(type(method))

    def _facts(self, method: Method) -> pd.DataFrame:
        window = self.setting.window
        start = time.perf_counter()
        nbytes, own = method.nbytes(window), method.facts()
        seconds = time.perf_counter() - start
        facts = {
            "ratio": nbytes / self.setting.stock_bytes(window),
            "bytes_per_token": nbytes / window,
            "seconds": seconds,
            "threads": self.given.threads,
        }
        return pd.DataFrame([facts | own])

    def stock_answers(self, posed: list[Question]) -> pd.DataFrame:
        """Return the answers of the uncompressed model."""
        checkpoints = self.checkpoints.keyed(questions=repr(posed)).made_by(retrieval)
        size = batch_size(posed)
        compute = partial(retrieval, self.model, self.tokenizer, posed, batch_size=size)
        return checkpoints.frame("stock-task", compute)

    def answers(
        self, posed: list[Question], holders: Mapping[str, tuple[Checkpoints, Holder]]
    ) -> dict[str, pd.DataFrame]:
        """Return the answers decoded from named caches.

        A prompt is read once for all caches whose answers are not on disk.
        """
        steps = {
            name: checkpoints.keyed(questions=repr(posed))
            for name, (checkpoints, _) in holders.items()
        }
        missing = {
            name: holder
            for name, (_, holder) in holders.items()
            if not steps[name].has_frame("task")
        }
        computed: dict[Any, pd.DataFrame] = {}
        if missing:
            answers = retrieval_through(
                self.model, self.tokenizer, posed, missing, batch_size=batch_size(posed)
            )
            for name, part in answers.groupby("cache"):
                computed[name] = part.drop(columns="cache").reset_index(drop=True)
        return {
            name: steps[name].frame("task", partial(computed.__getitem__, name)) for name in holders
        }


def batch_size(posed: list[Question]) -> int:
    """Return the number of questions of a batch."""
    return max(1, PROMPT_TOKENS // max(len(question.prompt) for question in posed))
