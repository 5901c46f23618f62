"""How long a smaller cache generates the text of the uncompressed model.

    python studies/benchmark.py agreement
    python studies/benchmark.py agreement --model smollm2 --text allenai/c4:en \\
        --methods best bits kivi --ratios 1/4 1/8 --prompt-length 1024 --new-tokens 512

The uncompressed model extends every prompt by its most probable tokens. Measured are the share of
these tokens that are also the most probable ones given the compressed cache (the acceptance rate),
and the number of tokens before the first that is not. Prompts are read uncompressed and then
compressed. Written into --out: results.csv (a row for each prompt and cache), summary.md and a
figure.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import common
import pandas as pd
from reports.agreement import draw, summary

from manifoldkv.evaluation.agreement import UNCOMPRESSED, agreement
from manifoldkv.runs.checkpoints import digest_of_tokens
from measurements import base
from measurements.base import MethodBenchmark

USUAL = ("best", "bits", "integers", "kivi")


def add_arguments(parser: common.Parser) -> None:
    base.add_calibration(parser, ratios=(4, 8))
    base.add_methods(parser, USUAL)
    add = parser.add_argument
    add("--held-out", type=int, default=8, help="prompts (%(default)s)")
    add("--prompt-length", type=int, default=256, help="tokens of each (%(default)s)")
    add("--new-tokens", type=int, default=64, help="tokens after each (%(default)s)")


def run(given: argparse.Namespace, out: Path) -> None:
    results = AgreementBenchmark(given, out).measure()
    results.to_csv(out / "results.csv", index=False)
    redraw(out)
    described = {name: base.description(name) for name in given.methods}
    common.write_summary(out, summary(results, Path(given.model).name, described))


def redraw(out: Path) -> None:
    common.draw(out, draw)


class AgreementBenchmark(MethodBenchmark):
    """Greedy texts of the uncompressed model, read from the caches of methods."""

    def __init__(self, given: argparse.Namespace, out: Path) -> None:
        super().__init__(given, out, given.prompt_length)
        self.prompts = self.held_out(given.text, given.prompt_length)

    def measure(self) -> pd.DataFrame:
        """Return a row for each prompt and cache, those of the uncompressed cache first."""
        points, new_tokens = self.points(), self.given.new_tokens
        steps = [
            self.checkpoints_of(point.method)
            .made_by(agreement)
            .keyed(prompts=digest_of_tokens(self.prompts), new_tokens=new_tokens)
            for point in points
        ]
        missing = {
            str(index): point.method.holder
            for index, point in enumerate(points)
            if not steps[index].has_frame("agreement")
        }
        found = pd.DataFrame({"cache": []})
        if missing:
            found = agreement(self.model, self.prompts, missing, new_tokens=new_tokens)
        stock = found[found["cache"] == UNCOMPRESSED]
        stock = self.checkpoints.keyed(
            prompts=digest_of_tokens(self.prompts), new_tokens=new_tokens
        ).frame("stock-agreement", lambda: stock)
        frames = [stock.assign(composition=UNCOMPRESSED, ratio=1.0)]
        for index, (point, step) in enumerate(zip(points, steps, strict=True)):
            part = found[found["cache"] == str(index)]
            frame = step.frame("agreement", lambda part=part: part)  # type: ignore[misc]
            frames.append(point.labelled(frame))
        results = pd.concat(frames, ignore_index=True).drop(columns="cache")
        return results.assign(**self.columns, new_tokens=new_tokens)
