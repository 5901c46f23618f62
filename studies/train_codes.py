"""Train the codes of trellis-coded latents, constants of the package.

    python studies/train_codes.py

A codeword is computed from its state by a multiplier and an offset (`trellis.Code`). Of many random
pairs of the two, those with the least mean squared error on a Gaussian source, at the best unit of
their codewords, are kept and compared again on more samples. Takes ten minutes on one core; prints
a row of `trellis.CODES` for every width, with its distortion on other samples.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

import common
import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from manifoldkv.coding.trellis import Code, search

LATENTS = 250
"""Latents of a stream."""
STREAMS = (6, 40, 400)
"""Streams that all codes, those kept first and those kept second are compared on."""
KEPT = (0.02, 8)
"""Share of all codes that are kept first, and number of those that are kept second."""
SPREADS = {1: 0.85, 2: 1.0, 3: 1.1, 4: 1.2, 5: 1.3, 6: 1.4, 7: 1.5, 8: 1.6}
"""Root mean squares of the codewords of a good code, about, by width."""
NEARBY = (0.93, 0.96, 1.0, 1.04, 1.08)
"""Factors of the spread that are tried."""


class Tried(NamedTuple):
    """A code and its distortion."""

    distortion: float
    code: Code


def main() -> int:
    parser = common.Parser(__doc__)
    add = parser.add_argument
    add("--codes", type=int, default=20_000, help="random codes of every width (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_threads()
    return common.run_study(parser, study)


def study(given: argparse.Namespace) -> None:
    for bits in tqdm(SPREADS, desc="widths", disable=None):
        multiplier, offset, unit = (best := chosen(bits, given.codes, given.seed)).code
        print(
            f"    Code({multiplier}, {offset}, {unit:.5e}),  # {bits} bits: {best.distortion:.5g}"
        )


def chosen(bits: int, count: int, seed: int) -> Tried:
    """Return the best of random codes of a width, and its distortion on other samples."""
    generator = np.random.default_rng([seed, bits])
    few, more, many, other = (
        generator.standard_normal((streams, LATENTS), np.float32) for streams in (*STREAMS, 400)
    )
    drawn = generator.integers(1, 1 << 32, (count, 2)).tolist()
    codes = [with_spread(Code(a, c, 1.0), SPREADS[bits]) for a, c in drawn]
    first = sorted(Tried(distortion(code, bits, few), code) for code in codes)
    first = first[: max(KEPT[1], round(KEPT[0] * count))]
    second = sorted(best_unit(one.code, bits, more) for one in first)[: KEPT[1]]
    best = min(best_unit(one.code, bits, many) for one in second)
    return Tried(distortion(best.code, bits, other), best.code)


def with_spread(code: Code, spread: float) -> Code:
    return code._replace(unit=spread / float(code.codewords().std()) * code.unit)


def best_unit(code: Code, bits: int, x: NDArray[np.float32]) -> Tried:
    codes = [code._replace(unit=code.unit * factor) for factor in NEARBY]
    return min(Tried(distortion(one, bits, x), one) for one in codes)


def distortion(code: Code, bits: int, x: NDArray[np.float32]) -> float:
    """Return the mean squared error of streams (streams, latents)."""
    widths, codewords = torch.full((LATENTS,), bits), code.codewords()
    books = codewords.expand(1 + bits, -1)
    found = search(torch.from_numpy(x), widths, torch.ones(LATENTS), books).astype(np.int64)
    return float(np.square(x - codewords.numpy()[found]).mean())


if __name__ == "__main__":
    sys.exit(main())
