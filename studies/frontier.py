"""What do bytes buy? Loss and recall against the bytes of the cache, for plans and their rivals.

    python studies/frontier.py
    python studies/frontier.py --model smollm2 --text allenai/c4:en \\
        --other-texts wikitext:wikitext-2-raw-v1 --window 2048
    python studies/frontier.py --compositions best integers sinks-recent --ratios 0.25 0.5

Compositions are recipes, recipes with a part taken out or put in, and what people would use instead
of a plan. Every plan is made for every ratio from the same calibration text. Measured are the loss
on held-out text, every token read through what the cache holds, and questions whose prompts are read
as they are, the answer decoded from what the cache holds. Bytes are all that the cache holds at the
window's length; bases come once and are named beside. Written into --out: results.csv (a row for
each measurement of each plan), summary.md and two figures. What is measured is stored in
--out/steps: an interrupted run goes on where it was, a repeated one draws at once.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import common
import pandas as pd
import torch
from frontier_report import draw, summary
from rivals import SINKS, SinksAndRecent, SnapKV, float8_cache, in_float8, recent_tokens
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedModel

from manifoldkv import (
    RECIPES,
    CompressionPlan,
    Optimal,
    Quantization,
    RankError,
    Recipe,
    Uniform,
    UnknownNameError,
    compress,
    full_rank_plan,
    open_text,
    quantize,
    sample_tokens,
)
from manifoldkv.evaluation import Comparison, Perplexity, perplexity
from manifoldkv.evaluation.questions import TASKS, Question, questions
from manifoldkv.evaluation.retrieval import (
    Holder,
    retrieval,
    retrieval_through,
    summarize,
    through_plan,
)
from manifoldkv.figures import save_figure
from manifoldkv.models.support import attention_of, decoder_layers
from manifoldkv.runs.checkpoints import digest_of_model, digest_of_tokens
from manifoldkv.solvers.base import check_seed
from manifoldkv.text.tokens import check_length

BITS = (8, 4, 3, 2)
ROUNDED_BITS = 4
"""Of latents in the compositions of rank and bits."""
CALIBRATION_OF_BITS = 8
"""Calibration sequences that ranges of integers are found on."""
CONTEXTS = 2
"""Batches of questions: so many prompts are held at a time for every thousand positions."""


class Composition(Protocol):
    """Something that makes caches, at a ratio that is asked for."""

    said: str

    def ratios(self, asked: list[float]) -> list[float]:
        """Return the ratios it is measured at, given those asked for."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return what its caches depend on, beside ratio, model and text."""
        ...

    def point(self, at: Setting, ratio: float) -> Point:
        """Return what it makes at a ratio."""
        ...


class Point(Protocol):
    """A way to hold tokens, made for a ratio."""

    def nbytes(self, tokens: int) -> int:
        """Return the bytes of a cache of so many tokens."""
        ...

    def perplexity(self, tokens: Tensor) -> Perplexity | None:
        """Return the loss through the cache, or None where that means nothing."""
        ...

    @property
    def holder(self) -> Holder:
        """Return how prompts are held."""
        ...

    def facts(self) -> dict[str, float]:
        """Return what else is known of it."""
        ...


@dataclass(frozen=True)
class Setting:
    """What every composition is given.

    Parameters
    ----------
    model : PreTrainedModel
        Measured.
    calibration : Tensor
        (sequences, length)
    window : int
        Tokens for which ratios are kept.
    rotary : {"pre", "post"}
        Of keys in plans.
    seed : int
        Of solvers.
    folder : Path
        Of what plans are made of.
    """

    model: PreTrainedModel
    calibration: Tensor
    window: int
    rotary: Any
    seed: int
    folder: Path

    @property
    def stock_bytes_per_token(self) -> int:
        """Return the bytes of a token in the stock cache, in 16-bit numbers."""
        attention = attention_of(decoder_layers(self.model)[0])
        heads = self.model.config.get_text_config().num_key_value_heads
        return 2 * len(decoder_layers(self.model)) * heads * int(attention.head_dim) * 2

    def compressed(self, recipe: Recipe, ratio: float) -> CompressionPlan:
        """Return the plan of a recipe."""
        return compress(
            self.model,
            self.calibration,
            ratio=ratio,
            recipe=recipe,
            rotary=self.rotary,
            seed=self.seed,
            context=self.window,
            folder=self.folder,
        )

    def rounded(self, plan: CompressionPlan, quantization: Quantization) -> CompressionPlan:
        """Return a plan with integer latents."""
        return quantize(plan, self.model, self.calibration[:CALIBRATION_OF_BITS], quantization)


class PlanPoint:
    """A plan, made when it is needed."""

    def __init__(self, at: Setting, make: Callable[[], CompressionPlan]) -> None:
        self._at = at
        self._make = make

    @cached_property
    def plan(self) -> CompressionPlan:
        return self._make()

    def nbytes(self, tokens: int) -> int:
        return self.plan.nbytes(tokens)

    def perplexity(self, tokens: Tensor) -> Perplexity:
        return perplexity(self._at.model, tokens, self.plan)

    @property
    def holder(self) -> Holder:
        return partial(through_plan, plan=self.plan)

    def facts(self) -> dict[str, float]:
        attention = attention_of(decoder_layers(self._at.model)[0])
        query_heads = int(attention.o_proj.weight.shape[1]) // int(attention.head_dim)
        return {
            "basis_bytes": self.plan.basis_nbytes(),
            "recent": self.plan.recent,
            "attention_work": attention_work(self.plan, query_heads),
        }


@dataclass(frozen=True)
class Ranks:
    """A recipe, its latents in 16 bits or rounded to fewer."""

    recipe: Recipe
    said: str
    bits: int | None = None
    only_at: tuple[float, ...] = ()

    def ratios(self, asked: list[float]) -> list[float]:
        return [ratio for ratio in asked if not self.only_at or ratio in self.only_at]

    def describe(self) -> dict[str, Any]:
        return {"recipe": self.recipe.describe(), "bits": self.bits}

    def point(self, at: Setting, ratio: float) -> PlanPoint:
        if self.bits is None:
            return PlanPoint(at, partial(at.compressed, self.recipe, ratio))
        return PlanPoint(at, partial(self._rounded, at, ratio, self.bits))

    def _rounded(self, at: Setting, ratio: float, bits: int) -> CompressionPlan:
        """Return the plan with the largest ranks whose integers stay within the ratio."""
        of_ranks = min(1.0, ratio * 16 / bits)
        while True:
            plan = at.rounded(at.compressed(self.recipe, of_ranks), Quantization(bits))
            taken = plan.nbytes(at.window) / (at.window * at.stock_bytes_per_token)
            if taken <= ratio:
                return plan
            of_ranks *= 0.995 * ratio / taken


@dataclass(frozen=True)
class Integers:
    """No rank is cut; every element is an integer."""

    layout: Any
    said: str
    all_bits: tuple[int, ...] = BITS

    def ratios(self, asked: list[float]) -> list[float]:
        return [bits / 16 for bits in self.all_bits]

    def describe(self) -> dict[str, Any]:
        return {"integers": self.layout}

    def point(self, at: Setting, ratio: float) -> PlanPoint:
        quantization = Quantization(round(16 * ratio), self.layout)
        return PlanPoint(at, lambda: at.rounded(full_rank_plan(at.model), quantization))


@dataclass(frozen=True)
class Float8:
    """Eight-bit floats."""

    said: str

    def ratios(self, asked: list[float]) -> list[float]:
        return [0.5]

    def describe(self) -> dict[str, Any]:
        return {"rival": "fp8"}

    def point(self, at: Setting, ratio: float) -> _Float8Point:
        return _Float8Point(at)


@dataclass(frozen=True)
class _Float8Point:
    at: Setting

    def nbytes(self, tokens: int) -> int:
        return tokens * self.at.stock_bytes_per_token // 2

    def perplexity(self, tokens: Tensor) -> Perplexity:
        return losses(
            self.at.model, tokens, lambda: {"past_key_values": float8_cache(self.at.model)}
        )

    @property
    def holder(self) -> Holder:
        return in_float8

    def facts(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class Dropping:
    """Tokens are kept whole, or not at all."""

    name: str
    said: str

    def ratios(self, asked: list[float]) -> list[float]:
        return asked

    def describe(self) -> dict[str, Any]:
        return {"rival": self.name}

    def point(self, at: Setting, ratio: float) -> _DroppingPoint:
        return _DroppingPoint(at, self.name, ratio)


@dataclass(frozen=True)
class _DroppingPoint:
    at: Setting
    name: str
    ratio: float

    def nbytes(self, tokens: int) -> int:
        return max(SINKS + 1, int(self.ratio * tokens)) * self.at.stock_bytes_per_token

    def perplexity(self, tokens: Tensor) -> Perplexity | None:
        if self.name == "snapkv":  # it chooses once, after a prompt
            return None
        seen = seen_beside_sinks(tokens.shape[1], recent_tokens(tokens.shape[1], self.ratio))
        return losses(self.at.model, tokens, lambda: {"attention_mask": seen})

    @property
    def holder(self) -> Holder:
        return SnapKV(self.ratio) if self.name == "snapkv" else SinksAndRecent(self.ratio)

    def facts(self) -> dict[str, float]:
        return {"basis_bytes": 0}


BEST = RECIPES["best"]
FAST_UNIFORM = replace(RECIPES["fast"], ranks=Uniform())
GROUPED = replace(BEST, ranks=Uniform(), recent_share=0.0, tuning_steps=0)
COMPOSITIONS: dict[str, Composition] = {
    "eigen-attention": Ranks(RECIPES["eigen-attention"], "the recipe"),
    "paper": Ranks(RECIPES["paper"], "the recipe, with the paper's solver", only_at=(0.5,)),
    "fast": Ranks(RECIPES["fast"], "the recipe: the paper's objective, Riemannian Adam"),
    "fast-uniform": Ranks(FAST_UNIFORM, "fast, the same ranks in every layer"),
    "best": Ranks(BEST, "the recipe"),
    "best-latents-only": Ranks(
        replace(BEST, recent_share=0.0), "best, no token kept exact", only_at=(0.5,)
    ),
    "grouped-orthonormal": Ranks(
        replace(RECIPES["eigen-attention"], key_grouping="all", value_grouping="all"),
        "eigen-attention, all heads in one basis",
    ),
    "grouped": Ranks(GROUPED, "kq-svd (oblique), all heads in one basis"),
    "grouped-recent": Ranks(
        replace(GROUPED, recent_share=BEST.recent_share),
        "and the newest tokens exact, a quarter of the bytes",
    ),
    "grouped-optimal": Ranks(replace(GROUPED, ranks=Optimal()), "grouped with optimal ranks"),
    "grouped-optimal-recent": Ranks(
        replace(BEST, tuning_steps=0), "and the newest tokens exact: best without tuning"
    ),
    "grouped-4-bit": Ranks(GROUPED, "grouped, latents of 4 bits", bits=ROUNDED_BITS),
    "grouped-layer-output": Ranks(
        replace(FAST_UNIFORM, key_grouping="all", value_grouping="all"),
        "fast (layer-output, orthonormal), all heads in one basis",
    ),
    "fast-optimal-tuned": Ranks(
        replace(RECIPES["fast"], ranks=Optimal(), tuning_steps=BEST.tuning_steps),
        "fast in the paper's head sharing, optimal ranks, tuned",
        only_at=(0.5,),
    ),
    "eigen-attention-recent": Ranks(
        replace(RECIPES["eigen-attention"], recent_share=BEST.recent_share),
        "eigen-attention, the newest tokens exact",
    ),
    "integers": Integers(
        "token",
        "no rank cut; every head rotated by Hadamard, integers of 8, 4, 3 and 2 bits with a range "
        "per token and head",
    ),
    "kivi": Integers(
        "kivi", "the same in KIVI's layout, the newest 64 tokens exact", all_bits=(4, 2)
    ),
    "fp8": Float8("keys and values in the format e4m3, no scale"),
    "sinks-recent": Dropping(
        "sinks-recent", f"the first {SINKS} tokens and the newest, others dropped (StreamingLLM)"
    ),
    "snapkv": Dropping(
        "snapkv", "the tokens that the end of the prompt attends to, others dropped (SnapKV)"
    ),
}
USUAL = (
    *("eigen-attention", "fast-uniform", "best", "grouped", "grouped-recent", "grouped-4-bit"),
    *("integers", "kivi", "fp8", "sinks-recent", "snapkv"),
)
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
        help="of plans and of what drops tokens (a half to a sixteenth: 2, 3, 4, 6, 8, 12, 16 times)",
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
            self.text_rows(*point, made, stock_losses)
            for *point, made in tqdm(points, desc="texts", disable=None)
        ]
        rows += self.task_rows(points, stock_answers)
        return pd.concat(rows, ignore_index=True).assign(**self.common)

    def points(self) -> list[tuple[str, float, Point, pd.DataFrame]]:
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
        return self.checkpoints.keyed(composition=COMPOSITIONS[name].describe(), asked=ratio)

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
        return read_losses(
            stored.frame("stock-text", lambda: write_losses(perplexity(self.model, tokens))), tokens
        )

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
        return max(1, CONTEXTS * 4096 // self.given.task_length)

    def text_rows(
        self,
        name: str,
        ratio: float,
        point: Point,
        made: pd.DataFrame,
        stock: dict[str, Perplexity],
    ) -> pd.DataFrame:
        rows = []
        for text, tokens in self.texts.items():
            stored = self.stored(name, ratio).keyed(tokens=digest_of_tokens(tokens))
            frame = stored.frame(
                "text", lambda tokens=tokens: write_losses(point.perplexity(tokens))
            )
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

    def task_rows(
        self, points: list[tuple[str, float, Point, pd.DataFrame]], stock: dict[str, pd.DataFrame]
    ) -> list[pd.DataFrame]:
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
            found: dict[str, pd.DataFrame] = {}
            if missing:
                answers = retrieval_through(
                    self.model,
                    self.tokenizer,
                    self.tasks[task],
                    missing,
                    batch_size=self.batch_size,
                )
                for place, part in answers.groupby("cache"):
                    found[str(place)] = part.drop(columns="cache").reset_index(drop=True)
            for place, (name, ratio, _, made) in enumerate(points):
                frame = stores[place].frame("task", lambda place=place: found[str(place)])
                row = summarize(frame, stock[task]).rename(columns={"task": "measured_on"})
                rows.append(described(name, ratio, made, row.assign(kind="task")))
        return rows


def described(name: str, ratio: float, made: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows with what is known of the point that they were measured of."""
    known = made.iloc[0].to_dict()
    return rows.assign(composition=name, requested_ratio=ratio, **known)


def write_losses(found: Perplexity | None) -> pd.DataFrame:
    return pd.DataFrame({"nll": [math.nan] if found is None else found.by_sequence})


def read_losses(frame: pd.DataFrame, tokens: Tensor) -> Perplexity:
    losses = tuple(frame["nll"])
    if len(losses) < len(tokens):  # of one that has none
        losses = losses * len(tokens)
    return Perplexity(losses, tokens.shape[0] * (tokens.shape[1] - 1))


@torch.no_grad()
def losses(
    model: PreTrainedModel, tokens: Tensor, keywords: Callable[[], dict[str, Any]]
) -> Perplexity:
    """Return how well a model predicts tokens when it is called with some keywords, window by one."""
    found = []
    for sequence in tqdm(tokens.to(model.device).split(1), disable=None, leave=False):
        logits = model(input_ids=sequence, **keywords()).logits[0, :-1]
        found.append(cross_entropy(logits.float(), sequence[0, 1:]).item())
    return Perplexity(tuple(found), tokens.shape[0] * (tokens.shape[1] - 1))


def seen_beside_sinks(tokens: int, recent: int, sinks: int = SINKS) -> Tensor:
    """Return which tokens every query sees of the first ones and the newest, (1, 1, n, n).

    The newest are those before it and itself.
    """
    slots = torch.arange(tokens)
    distance = slots.unsqueeze(1) - slots
    seen = (distance >= 0) & ((distance < recent) | (slots < sinks))
    return seen.view(1, 1, tokens, tokens)


def attention_work(plan: CompressionPlan, query_heads: int) -> float:
    """Multiplications per cached token of a decode step, against the uncompressed cache.

    Scores and mixtures on latents of g concatenated heads are g·r long. Keys stored before rotation
    are expanded instead, every KV head of every token once a step, and scored at head_dim.
    """
    work = full = 0
    for layer in plan.layers:
        d, heads = layer.key.head_dim, layer.key.grouping.heads
        full += 2 * query_heads * d
        work += query_heads * layer.value.rank * layer.value.grouping.width
        if plan.rotary == "post":
            work += query_heads * layer.key.rank * layer.key.grouping.width
        else:
            work += query_heads * d + heads * d * layer.key.rank * layer.key.grouping.width
    return work / full


if __name__ == "__main__":
    sys.exit(main())
