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
from functools import partial
from pathlib import Path

import common
import pandas as pd
from reports.agreement import draw, summary

from manifoldkv.evaluate.agreement import UNCOMPRESSED, agreement
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_tokens
from measurements import base
from measurements.base import MethodBenchmark

USUAL = ("best", "bits", "integers", "kivi")


def add_arguments(parser: common.Parser) -> None:
    base.add_calibration(parser, ratios=(4, 8))
    base.add_methods(parser, USUAL)
    add = parser.add_argument
    add("--held-out", type=int, default=8, help="prompts (%(default)s)")
    add("--prompt-length", type=int, default=256, help="tokens of each (%(default)s)")
    base.add_window(parser)
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
        super().__init__(given, out, given.window or given.prompt_length)
        self.prompts = self.held_out(given.text, given.prompt_length)

    def measure(self) -> pd.DataFrame:
        """Return a row for each prompt and cache, those of the uncompressed cache first."""
        points = self.points()
        prompts, new_tokens = digest_of_tokens(self.prompts), self.given.new_tokens

        def step_of(checkpoints: Checkpoints) -> Checkpoints:
            return checkpoints.made_by(agreement).keyed(prompts=prompts, new_tokens=new_tokens)

        steps = {str(i): step_of(self.checkpoints_of(x.method)) for i, x in enumerate(points)}
        missing = {
            name: points[int(name)].method.holder
            for name, step in steps.items()
            if not step.has_frame("agreement")
        }
        computed = {}
        if missing:
            found = agreement(self.model, self.prompts, missing, new_tokens=new_tokens)
            computed = {str(name): part for name, part in found.groupby("cache")}
        steps |= {UNCOMPRESSED: step_of(self.checkpoints)}
        read = {
            name: step.frame("agreement", partial(computed.__getitem__, name))
            for name, step in steps.items()
        }
        frames = [read[UNCOMPRESSED].assign(composition=UNCOMPRESSED, ratio=1.0)]
        frames += [point.labelled(read[str(index)]) for index, point in enumerate(points)]
        results = pd.concat(frames, ignore_index=True).drop(columns="cache")
        length = self.given.prompt_length
        return results.assign(**self.columns, prompt_length=length, new_tokens=new_tokens)
