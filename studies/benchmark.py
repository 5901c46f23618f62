"""How much do smaller caches lose, and how fast are they? Recipes and baselines on one model.

    python studies/benchmark.py loss       loss and answers against the bytes of the cache
    python studies/benchmark.py recall     answers that need a token far back
    python studies/benchmark.py agreement  greedy texts that stay those of the uncompressed model
    python studies/benchmark.py storage    size, loss and speed of a cache on disk
    python studies/benchmark.py speed      time of decode steps and prompts
    python studies/benchmark.py loss --help

Every measurement has its own options; without any it runs on a model of this repository. Methods
are classes in studies/methods, one file for each family. Every step is a checkpoint in --out/steps:
an interrupted run resumes there, and a repeated one only draws.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import common
from measurements import agreement, loss, recall, speed, storage

MEASUREMENTS = {
    "loss": loss,
    "recall": recall,
    "agreement": agreement,
    "storage": storage,
    "speed": speed,
}


def main() -> int:
    parser = common.Parser(__doc__)
    kinds = parser.add_subparsers(dest="measurement", required=True, metavar="MEASUREMENT")
    for name, kind in MEASUREMENTS.items():
        described = kind.__doc__ or ""
        of_kind = kinds.add_parser(name, description=described, help=described.partition("\n")[0])
        kind.add_arguments(of_kind)
        of_kind.add_out(f"figures/runs/{name}/<model>")
    return common.run_study(parser, study)


def study(given: argparse.Namespace) -> None:
    kind = MEASUREMENTS[given.measurement]
    out = common.output_folder(given, "runs", given.measurement, Path(given.model).name)
    if given.redraw:
        kind.redraw(out)
    else:
        kind.run(given, out)


if __name__ == "__main__":
    sys.exit(main())
