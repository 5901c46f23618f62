"""Train the codes of trellis-coded latents, constants of the package.

    python studies/train_codes.py

A codeword is computed from its state by a multiplier and an offset (`trellis.Code`). Of many random
pairs of the two, those with the least mean squared error on a Gaussian source, at the best unit of
their codewords, are kept and compared again on more samples. The code of latents that add no bits
is compared at half a bit, by turns with the code of one bit. Takes four minutes on one core; prints
a row of `trellis.CODES` for every number of bits, with its distortion on other samples, and the
distortions of half widths.
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

from manifoldkv.plan.formats.trellis import STATES, Code, own_bits, relative_steps, search

LATENTS = 250
"""Latents of a stream."""
STREAMS = (6, 40, 400)
"""Streams that all codes, those kept first and those kept second are compared on."""
KEPT = (0.02, 8)
"""Share of all codes that are kept first, and number of those that are kept second."""
SPREADS = {1: 0.85, 0: 0.55, 2: 1.0, 3: 1.1, 4: 1.2, 5: 1.3, 6: 1.4, 7: 1.5, 8: 1.6}
"""Root mean squares of the codewords of a good code, about, by bits."""
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
    codes: dict[int, Code] = {}
    for bits in tqdm(SPREADS, desc="bits", disable=None):
        multiplier, offset, unit = (best := chosen(bits, codes, given.codes, given.seed)).code
        codes[bits] = best.code
        print(f"    Code({multiplier}, {offset}, {unit:.5e}),  # {bits}: {best.distortion:.5g}")
    x = np.random.default_rng([given.seed, len(SPREADS)]).standard_normal(
        (STREAMS[-1], LATENTS), np.float32
    )
    for half in range(1, 2 * max(SPREADS), 2):
        print(f"{half / 2} bits: {distortion(half / 2, codes, x):.5g}")


def chosen(bits: int, others: dict[int, Code], count: int, seed: int) -> Tried:
    """Return the best of random codes, and its distortion on other samples.

    That of 0 bits is at half a bit, with the code of one bit among the others.
    """
    generator = np.random.default_rng([seed, bits])
    few, more, many, other = (
        generator.standard_normal((streams, LATENTS), np.float32) for streams in (*STREAMS, 400)
    )

    def tried(code: Code, x: NDArray[np.float32]) -> Tried:
        return Tried(distortion(bits or 0.5, others | {bits: code}, x), code)

    def best_unit(code: Code, x: NDArray[np.float32]) -> Tried:
        return min(tried(code._replace(unit=code.unit * factor), x) for factor in NEARBY)

    drawn = generator.integers(1, 1 << 32, (count, 2)).tolist()
    codes = [with_spread(Code(a, c, 1.0), SPREADS[bits]) for a, c in drawn]
    first = sorted(tried(code, few) for code in codes)[: max(KEPT[1], round(KEPT[0] * count))]
    second = sorted(best_unit(one.code, more) for one in first)[: KEPT[1]]
    return tried(min(best_unit(one.code, many) for one in second).code, other)


def with_spread(code: Code, spread: float) -> Code:
    return code._replace(unit=spread / float(code.codewords().std()) * code.unit)


def distortion(bits: float, codes: dict[int, Code], x: NDArray[np.float32]) -> float:
    """Return the mean squared error of streams (streams, latents)."""
    books = torch.ones(1 + max(codes), STATES)
    for index, code in codes.items():
        books[index] = code.codewords()
    widths = torch.full((LATENTS,), bits)
    own, steps = own_bits(widths), relative_steps(widths, books)
    scaled = torch.from_numpy(x) / steps
    found = torch.from_numpy(search(scaled, own, steps.square(), books).astype(np.int64))
    return float((steps * (scaled - books[own, found])).square().mean())


if __name__ == "__main__":
    sys.exit(main())
