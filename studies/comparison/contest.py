"""A model, and the caches that compositions make of it: what several studies begin with."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import common
import pandas as pd
from tqdm import tqdm

from comparison.compositions import COMPOSITIONS, PlanPoint, Point, Setting
from manifoldkv import open_text, sample_tokens
from manifoldkv.errors import ArgumentError, ModelError, PlanError
from manifoldkv.evaluation.questions import Question, questions
from manifoldkv.evaluation.retrieval import (
    Holder,
    check_questions,
    retrieval,
    retrieval_through,
)
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_model, digest_of_tokens
from manifoldkv.seeds import check_seed
from manifoldkv.text.tokens import check_length

PROMPT_TOKENS = 8192
"""Of a batch of questions, whose keys and values are held at a time."""


def add_arguments(parser: common.Parser, ratios: tuple[float, ...], usual: tuple[str, ...]) -> None:
    """Add what a contest is given: compositions, ratios, calibration."""
    add = parser.add_argument
    add(
        "--compositions",
        nargs="+",
        default=usual,
        metavar="NAME",
        help=f"({' '.join(usual)}); see below",
    )
    add(
        "--ratios",
        type=float,
        nargs="+",
        default=ratios,
        help="of plans and of what drops tokens "
        f"({', '.join(f'{1 / ratio:g}' for ratio in ratios)} times smaller)",
    )
    add("--sequences", type=int, default=64, help="for calibration (%(default)s)")
    add("--sequence-length", type=int, default=512, help="of these (%(default)s)")
    add("--rotary", choices=("pre", "post"), default="pre", help="(%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_threads()


def described() -> str:
    """Return the compositions and what they are, for the end of a help."""
    width = max(map(len, COMPOSITIONS))
    return "\n".join(f"  {name:{width}}  {it.said}" for name, it in COMPOSITIONS.items())


def check(given: argparse.Namespace) -> None:
    """Refuse compositions that do not exist, and ratios and seeds that are none."""
    unknown = [c for c in given.compositions if c not in COMPOSITIONS]
    if unknown:
        known = ", ".join(COMPOSITIONS)
        raise ArgumentError(f"unknown composition {unknown[0]!r}; known: {known}")
    for ratio in given.ratios:
        if not 0 < ratio <= 1:
            raise ArgumentError(f"--ratios {ratio:g} is not in (0, 1]")
    check_seed(given.seed)


class Asked(NamedTuple):
    """A composition at a ratio, what it makes there, and what is known of that."""

    name: str
    ratio: float
    point: Point
    made: pd.DataFrame

    def described(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Return rows with what is known of the point that they were measured of."""
        known = {str(column): value for column, value in self.made.iloc[0].items()}
        return rows.assign(composition=self.name, requested_ratio=self.ratio, **known)


class Contest:
    """Compositions of a model.

    Parameters
    ----------
    given : Namespace
        With what `add_arguments` adds, ``model``, ``text`` and ``items``.
    out : Path
        Folder of the results, and of steps.
    window : int
        Tokens for which ratios are kept.
    """

    def __init__(self, given: argparse.Namespace, out: Path, window: int) -> None:
        self.given = given
        self.model, self.tokenizer = common.load(given.model)
        check_length(self.model, window)
        self.source = open_text(given.text)
        calibration = sample_tokens(
            self.source,
            self.tokenizer,
            sequences=given.sequences,
            length=given.sequence_length,
            split="calibration",
        )
        folder = out / "steps" / "plans"
        self.at = Setting(self.model, calibration, window, given.rotary, given.seed, folder)
        self.common = {
            "model": Path(given.model).name,
            "calibration": given.text,
            "rotary": given.rotary,
            "seed": given.seed,
            "sequences": given.sequences,
            "length": given.sequence_length,
            "window": window,
        }
        self.measured = common.stored_in(out, given).keyed(weights=digest_of_model(self.model))
        self._of_plans = self.measured.keyed(
            **self.common, calibration_tokens=digest_of_tokens(calibration)
        )

    def posed(self, task: str, length: int) -> list[Question]:
        """Return the questions of a task with prompts of so many tokens, which the model takes.

        Raises
        ------
        ArgumentError
            If there is no such task.
            If there are no such questions, or they and their answers are too long for the model.
        """
        found = questions(
            task,
            self.tokenizer,
            self.source,
            length=length,
            items=self.given.items,
            seed=self.given.seed,
        )
        check_questions(self.model, found)
        return found

    def points(self) -> list[Asked]:
        """Return what every composition makes at every ratio that it reaches, with its bytes.

        What cannot be made is left out, with a line on standard error that says why.

        Raises
        ------
        ArgumentError
            If nothing can be made.
        """
        found = []
        asked = [
            (name, ratio)
            for name in self.given.compositions
            for ratio in COMPOSITIONS[name].ratios(list(self.given.ratios))
        ]
        for name, ratio in tqdm(asked, desc="plans", disable=None):
            try:
                found.append(self._asked(name, ratio))
            except (ArgumentError, PlanError, ModelError) as error:
                tqdm.write(f"{name} at {ratio:g} is left out: {error}", file=sys.stderr)
        if not found:
            raise ArgumentError(
                "no composition can be made for this model at a ratio that was asked for"
            )
        return found

    def _asked(self, name: str, ratio: float) -> Asked:
        point = COMPOSITIONS[name].point(self.at, ratio)
        stored = self.stored(name, ratio)
        if isinstance(point, PlanPoint) and not self.given.force:
            point = point.stored_in(self.at.folder / f"{name}-{stored.digest[:16]}")
        made = stored.frame("made", partial(self._made, point))
        return Asked(name, ratio, point, made)

    def stored(self, name: str, ratio: float) -> Checkpoints:
        """Return the checkpoints of a composition at a ratio."""
        known = COMPOSITIONS[name]
        stored = self._of_plans.keyed(composition=known.describe(), asked=ratio)
        return stored.made_by(type(known), retrieval_through, *known.made_by())

    def _made(self, point: Point) -> pd.DataFrame:
        start = time.perf_counter()
        nbytes = point.nbytes(self.at.window)
        seconds = time.perf_counter() - start
        fact = {
            "ratio": nbytes / self.at.stock_bytes(self.at.window),
            "bytes_per_token": nbytes / self.at.window,
            "seconds": seconds,
            "threads": self.given.threads,
        }
        nothing = {"basis_bytes": 0, "attention_work": math.nan}
        return pd.DataFrame([fact | nothing | point.facts()])

    def stock_answers(self, asked: list[Question]) -> pd.DataFrame:
        """Return how the uncompressed model answers questions."""
        stored = self.measured.keyed(questions=repr(asked)).made_by(retrieval)

        def compute() -> pd.DataFrame:
            size = batch_size(asked)
            return retrieval(self.model, self.tokenizer, asked, batch_size=size)

        return stored.frame("stock-task", compute)

    def answers(
        self, asked: list[Question], holders: Mapping[str, tuple[Checkpoints, Holder]]
    ) -> dict[str, pd.DataFrame]:
        """Return how questions are answered from caches, by the names of these.

        A prompt is read once for all of them, and only for those whose answers are not stored.
        """
        stores = {
            name: stored.keyed(questions=repr(asked)) for name, (stored, _) in holders.items()
        }
        missing = {
            name: holder
            for name, (_, holder) in holders.items()
            if not stores[name].has_frame("task")
        }
        found: dict[Any, pd.DataFrame] = {}
        if missing:
            answers = retrieval_through(
                self.model, self.tokenizer, asked, missing, batch_size=batch_size(asked)
            )
            for name, part in answers.groupby("cache"):
                found[name] = part.drop(columns="cache").reset_index(drop=True)
        return {
            name: stores[name].frame("task", partial(found.__getitem__, name)) for name in holders
        }


def batch_size(asked: list[Question]) -> int:
    """Return how many questions are asked at a time."""
    return max(1, PROMPT_TOKENS // max(len(question.prompt) for question in asked))
