"""Train the codebooks of trellis-coded latents, which are part of the package.

    python studies/train_codebooks.py

Lloyd's algorithm on a Gaussian source: the Viterbi search assigns samples to codewords, and every
codeword moves to the mean of its samples. Of several random starts the best on other samples is
kept. Takes about five minutes on one core; prints the distortion of every width.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import common
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from scipy.stats import norm
from tqdm import tqdm

from manifoldkv.coding.trellis import CODEBOOKS, WINDOW, search

LATENTS = 256
"""Latents of a stream; the last ones, whose windows end in zeros, are not learnt from."""
STATES = 1 << WINDOW
WIDTHS = range(1, 9)


def main() -> int:
    parser = common.Parser(__doc__)
    add = parser.add_argument
    add("--samples", type=int, default=1 << 19, help="samples of the source (%(default)s)")
    add("--steps", type=int, default=30, help="steps of Lloyd's algorithm (%(default)s)")
    add("--starts", type=int, default=6, help="random starts of every width (%(default)s)")
    add("--out", type=Path, default=CODEBOOKS, help="file (that of the package)")
    parser.add_threads()
    return common.run_study(parser, study)


def study(given: argparse.Namespace) -> None:
    codebooks = np.zeros((1 + len(WIDTHS), STATES), np.float32)
    for bits in tqdm(WIDTHS, desc="widths", disable=None):
        tried = [trained(bits, seed, given.samples, given.steps) for seed in range(given.starts)]
        best = min(range(given.starts), key=lambda index: tried[index][1])
        codebooks[bits], distortion = tried[best]
        print(f"{bits} bits: distortion {distortion:.5f}")
    save_file({"codebooks": torch.from_numpy(codebooks)}, given.out)


def trained(bits: int, seed: int, samples: int, steps: int) -> tuple[NDArray[np.float32], float]:
    """Return a codebook (states,) and its distortion on other samples."""
    generator = np.random.default_rng(seed)
    quantiles = norm.ppf((np.arange(STATES) + 0.5) / STATES)
    codebook = generator.permutation(quantiles).astype(np.float32)
    x = gaussian(generator, samples)
    for _ in range(steps):
        windows = searched(x, bits, codebook)[:, :-WINDOW].ravel()
        sums = np.bincount(windows, x[:, :-WINDOW].ravel(), STATES)
        counts = np.bincount(windows, minlength=STATES)
        codebook = np.where(counts > 0, sums / np.maximum(counts, 1), codebook).astype(np.float32)
    x = gaussian(np.random.default_rng(1 << 16), samples // 2)
    return codebook, float(np.square(x - codebook[searched(x, bits, codebook)]).mean())


def gaussian(generator: np.random.Generator, samples: int) -> NDArray[np.float32]:
    return generator.standard_normal((samples // LATENTS, LATENTS), dtype=np.float32)


def searched(x: NDArray[np.float32], bits: int, codebook: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the states of samples, (streams, latents)."""
    widths = torch.full((LATENTS,), bits)
    codebooks = torch.from_numpy(codebook).expand(1 + len(WIDTHS), -1)
    return search(torch.from_numpy(x), widths, torch.ones(LATENTS), codebooks).astype(np.int64)


if __name__ == "__main__":
    sys.exit(main())
