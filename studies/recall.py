"""What is still found in a smaller cache? RULER's tasks, passkeys, copying, key-value pairs.

    python studies/recall.py
    python studies/recall.py --model smollm2 --text allenai/c4:en --task-lengths 1024 2048 \\
        --tasks passkey niah_single_1 niah_multikey_2 niah_multikey_3 ruler_vt ruler_cwe ruler_fwe
    python studies/recall.py --compositions integers sinks-recent best --ratios 0.25

Every composition makes a cache a given number of times smaller, and the answers are decoded from
it. Prompts are read as they are, and of plans also through what the cache holds: both are named. A
task of which the uncompressed model finds less than half is marked and left out of the averages; of
its answers only the loss is measured then, and they are not decoded, but for passkeys, which have a
map.
Written into --out: results.csv (a row for each task, length and cache) and summary.md; of passkeys
also passkeys.csv (a row for each question) and a map of those found by depth and length. What is
measured is stored in --out/steps: an interrupted run goes on where it was, a repeated one draws at
once.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np
import pandas as pd
from comparison import contest
from comparison.compositions import COMPOSITIONS, PlanPoint
from comparison.contest import Asked, Contest
from matplotlib.figure import Figure
from tqdm import tqdm

from manifoldkv.diagnostics.figures.style import title_above
from manifoldkv.evaluation.questions import TASKS, Question
from manifoldkv.evaluation.retrieval import Holder, summarize, through_plan
from manifoldkv.runs.checkpoints import Checkpoints

USUAL = ("integers", "sinks-recent", "snapkv", "eigen-attention", "fast-uniform", "grouped", "best")
MAPPED = "passkey"
PASSKEYS = "passkeys.csv"
DEPTHS = 5
"""Rows of the map."""
STOCK, EXACT, COMPRESSED = "uncompressed", "exact", "compressed"


def main() -> int:
    parser = common.Parser(f"{__doc__}\ncompositions:\n{contest.described()}")
    parser.add_model()
    parser.add_text()
    contest.add_arguments(parser, (0.25,), USUAL)
    add = parser.add_argument
    usual = ["passkey", "copying", "key-value"]
    add("--tasks", nargs="+", default=usual, help=f"of {', '.join(TASKS)} ({' '.join(usual)})")
    add("--task-lengths", type=int, nargs="+", default=[256, 512], help="of prompts (%(default)s)")
    add("--items", type=int, default=10, help="questions of each task and length (%(default)s)")
    parser.add_out("figures/recall/<model>")
    return common.run_study(parser, study)


def study(given: argparse.Namespace) -> None:
    contest.check(given)
    name = Path(given.model).name
    out = common.output_folder(given, "recall", name)
    if given.redraw:
        common.draw(out, draw, PASSKEYS)
        return
    recall = Recall(given, out)
    results, answers = recall.measure()
    results.to_csv(out / "results.csv", index=False)
    if len(answers):
        answers.to_csv(out / PASSKEYS, index=False)
        common.draw(out, draw, PASSKEYS)
    said = {name: COMPOSITIONS[name].said for name in given.compositions}
    common.write_summary(out, summary(results, name, said))


class Recall(Contest):
    """What compositions of a model still find."""

    def __init__(self, given: argparse.Namespace, out: Path) -> None:
        super().__init__(given, out, max(given.task_lengths))
        self.tasks = {
            (task, length): self.posed(task, length)
            for task in given.tasks
            for length in given.task_lengths
        }

    def measure(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return means by task, length and cache, and every question of the map."""
        points = self.points()
        rows, answers = [], []
        for (task, length), posed in tqdm(self.tasks.items(), desc="tasks", disable=None):
            stock = self.stock_answers(posed)
            counted = bool(summarize(stock, stock)["counted"].all())
            found = self.found(posed, points, decoded=counted or task == MAPPED)
            known = {"task_length": length, "threads": self.given.threads}
            rows.append(summarize(stock, stock).assign(composition=STOCK, ratio=1.0, **known))
            kept = [stock.assign(cache=STOCK, task_length=length)]
            for place, asked in enumerate(points):
                for prefill in (EXACT, COMPRESSED):
                    frame = found.get(f"{place} {prefill}")
                    if frame is None:
                        continue
                    row = asked.described(summarize(frame, stock))
                    rows.append(row.assign(prefill=prefill, task_length=length))
                    if prefill == EXACT:
                        kept.append(frame.assign(cache=labelled(asked), task_length=length))
            if task == MAPPED:
                answers += kept
        results = pd.concat(rows, ignore_index=True).assign(**self.common)
        return results, pd.concat(answers, ignore_index=True) if answers else pd.DataFrame()

    def found(
        self, posed: list[Question], points: list[Asked], *, decoded: bool
    ) -> dict[str, pd.DataFrame]:
        """Return the answers from every cache; without scores if they need not be decoded."""
        if decoded:
            return self.answers(posed, self.holders(points))
        once = [replace(question, new_tokens=1) for question in posed]
        answers = self.answers(once, self.holders(points))
        return {name: frame.assign(score=math.nan) for name, frame in answers.items()}

    def holders(self, points: list[Asked]) -> dict[str, tuple[Checkpoints, Holder]]:
        """Return how prompts are held: of plans, read in both ways."""
        found: dict[str, tuple[Checkpoints, Holder]] = {}
        for place, asked in enumerate(points):
            stored = self.stored(asked.name, asked.ratio)
            found[f"{place} {EXACT}"] = stored, asked.point.holder
            if isinstance(asked.point, PlanPoint):
                through = partial(_through, asked.point)
                found[f"{place} {COMPRESSED}"] = stored.keyed(prefill=COMPRESSED), through
        return found


def _through(point: PlanPoint, model: Any, prompts: Any) -> Any:
    """Hold prompts in a plan's cache, read through it; the plan is made when it is needed."""
    return through_plan(model, prompts, point.plan, prefill="compressed")


def labelled(asked: Asked) -> str:
    return f"{asked.name}, {1 / asked.made['ratio'].iloc[0]:.1f} times smaller"


def draw(answers: pd.DataFrame) -> dict[str, Figure]:
    """Return a map of passkeys found, depth against length, for every cache."""
    caches = list(dict.fromkeys(answers["cache"]))
    lengths = sorted(answers["task_length"].unique())
    columns = min(4, len(caches))
    rows = -(-len(caches) // columns)
    figure = Figure(figsize=(2.4 * columns + 0.8, 2.3 * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for panel, cache in zip(axes, caches, strict=False):
        part = answers[answers["cache"] == cache]
        depth = (part["depth"] * DEPTHS).astype(int)
        table = part.assign(depth=depth).pivot_table(
            index="depth", columns="task_length", values="score", aggfunc="mean"
        )
        grid = table.reindex(index=range(DEPTHS), columns=lengths).to_numpy(dtype=float)
        image = panel.pcolormesh(grid, vmin=0, vmax=1, cmap="cividis")
        panel.set_title(cache.replace(", ", ",\n"), fontsize=8)
        places = np.arange(len(lengths)) + 0.5
        panel.set_xticks(places, [str(length) for length in lengths], fontsize=7)
        middles = np.arange(DEPTHS) + 0.5
        panel.set_yticks(middles, [f"{middle / DEPTHS:.0%}" for middle in middles], fontsize=7)
        for (row, column), share in np.ndenumerate(grid):
            if not np.isnan(share):
                colour = "black" if share > 0.5 else "white"
                place = (column + 0.5, row + 0.5)
                panel.annotate(
                    f"{share:.1f}", place, ha="center", va="center", fontsize=7, color=colour
                )
    for unused in axes[len(caches) :]:
        unused.remove()
    axes[0].invert_yaxis()  # of all: they share it
    figure.supxlabel("tokens of the prompt", fontsize=9)
    figure.supylabel("depth of the passkey", fontsize=9)
    by_cache = answers.groupby("cache", sort=False)["score"].mean()
    found = "; ".join(f"{cache} {share:.2f}" for cache, share in by_cache.items())
    title_above(figure, f"Share of passkeys found: {found}")
    figure.colorbar(image, ax=list(axes[: len(caches)]), shrink=0.6, label="share found")
    return {"passkeys_by_depth_and_length": figure}


def summary(results: pd.DataFrame, name: str, said: dict[str, str]) -> list[str]:
    """Return the lines of summary.md."""
    first = results.iloc[0]
    lines = [
        f"# What is still found in a smaller cache of {name}",
        "",
        f"Share of answers found (standard error) and nats per token added to the answers, "
        f"{first['items']} questions of each task and length. {first['sequences']} calibration "
        f"sequences of {first['length']} tokens of {common.short(first['calibration'])}, keys of "
        f"plans {first['rotary']}-rotation, seed {first['seed']}; sizes against a cache in 16 "
        f"bits, with all that is kept exact, at {first['window']} tokens. Prompts are read as they "
        "are (exact) or through what the cache holds (compressed); answers are decoded from the "
        "cache. Tasks in brackets are those of which the uncompressed model finds less than half: "
        "they do not count in the averages, and of their answers only the loss is measured.",
    ]
    for length, part in results.groupby("task_length"):
        lines += ["", f"## Prompts of {length} tokens", "", *_table(part)]
    lines += ["", "Compositions:", ""]
    return [*lines, *(f"- `{composition}`: {text}" for composition, text in said.items())]


def _table(part: pd.DataFrame) -> list[str]:
    counted = part[part["composition"] == STOCK].set_index("task")["counted"]
    titles = [task if counted[task] else f"({task})" for task in counted.index]
    rows = []
    caches = part.fillna({"prefill": "-"}).groupby(["composition", "ratio", "prefill"], sort=False)
    for (composition, _, prefill), line in caches:
        of_counted = line[line["counted"]]
        average = f"{of_counted['score'].mean():.2f}, {of_counted['added_nll'].mean():+.2f}"
        cells = [f"{_score(row)}, {row['added_nll']:+.2f}" for _, row in line.iterrows()]
        times = f"{1 / line['ratio'].iloc[0]:.2f}"
        rows.append(
            [f"`{composition}`", times, prefill, average if len(of_counted) else "-", *cells]
        )
    return common.table(["cache", "times smaller", "prompts", "average", *titles], rows)


def _score(row: Any) -> str:
    if math.isnan(row["score"]):
        return "-"
    return f"{row['score']:.2f} ({row['score_error']:.2f})"


if __name__ == "__main__":
    sys.exit(main())
