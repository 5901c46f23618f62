"""Quantizers of Gaussian coordinates, and rotations that make coordinates Gaussian."""

from __future__ import annotations

from functools import cache

import torch
from scipy.linalg import hadamard
from torch import Tensor
from torch.special import ndtr, ndtri

from manifoldkv.core.errors import ModelError

SAMPLES, STEPS = 1 << 14, 120
"""Points of a step, and steps, of Lloyd's algorithm in the plane."""
AT_ONCE = 1 << 16
"""Points whose distances from all codewords are in memory at once."""
TINY = torch.finfo(torch.float32).tiny


@cache
def lloyd_max(bits: int) -> Tensor:
    """Return the scalar codebook of least mean squared error for N(0, 1), (2^bits,), ascending.

    Lloyd and Max: borders are midpoints of codewords, codewords are means between borders.
    """
    count = 1 << bits
    words = ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    while True:
        borders = torch.cat([words.new_tensor([-9]), (words[1:] + words[:-1]) / 2])
        borders = torch.cat([borders, words.new_tensor([9])])
        density = torch.exp(-borders.square() / 2) / (2 * torch.pi) ** 0.5
        means = -density.diff() / ndtr(borders).diff()
        if bool((means - words).abs().max() < 1e-10):
            return means.float()
        words = means


@cache
def plane_codebook(bits: int) -> Tensor:
    """Return a codebook of bits per coordinate for pairs of N(0, 1), (4^bits, 2), float32.

    Lloyd's algorithm on `SAMPLES` new points in every step, from words of N(0, 2), the density of
    the best ones; in the second half words move a tenth of the way, which averages over points.
    """
    generator = torch.Generator().manual_seed(0)
    words = 2**0.5 * torch.randn(1, 1 << 2 * bits, 2, generator=generator)
    for step in range(STEPS):
        points = torch.randn(1, SAMPLES, 2, generator=generator)
        moved = lloyd(points, torch.ones(1, SAMPLES), words, 1)
        words = words.lerp(moved, 1 if step < STEPS // 2 else 0.1)
    return words[0]


def lloyd(points: Tensor, weights: Tensor, words: Tensor, steps: int) -> Tensor:
    """Return codebooks of less weighted squared error, by Lloyd's algorithm.

    Every word becomes the mean of the points that are nearest to it; one without points stays.

    Parameters
    ----------
    points : Tensor
        Points of every codebook, (G, n, k).
    weights : Tensor
        Their weights, (G, n), not negative.
    words : Tensor
        Codebooks to begin with, (G, W, k).
    steps : int
        Number of steps.
    """
    count = words.shape[1]
    first = count * torch.arange(len(words), device=words.device).unsqueeze(1)
    weighed = torch.cat([points * weights.unsqueeze(2), weights.unsqueeze(2)], dim=2).flatten(0, 1)
    for _ in range(steps):
        nearest = (nearest_word(points, words) + first).flatten()
        sums = weighed.new_zeros(len(words) * count, weighed.shape[1])
        sums = sums.index_add_(0, nearest, weighed).view(len(words), count, -1)
        sums, totals = sums[..., :-1], sums[..., -1:]
        words = torch.where(totals > 0, sums / totals.clamp(min=TINY), words)
    return words


def nearest_word(points: Tensor, words: Tensor) -> Tensor:
    """Return the index of the nearest of words (…, W, k) for points (…, n, k), (…, n), int64."""
    half = words.square().sum(dim=-1).unsqueeze(-2) / 2
    at_once = max(1, AT_ONCE // words[..., 0, 0].numel())
    parts = [(x @ words.mT - half).argmax(dim=-1) for x in points.split(at_once, dim=-2)]
    return torch.cat(parts, dim=-1)


def check_hadamard(size: int) -> None:
    """Raise `ModelError` unless there is a Hadamard matrix for heads of some features."""
    if size & (size - 1):
        raise ModelError(
            f"heads are rotated by Hadamard matrices, whose size is a power of two, and those of "
            f"this model have {size} features"
        )


@cache
def randomized_hadamard(size: int, seed: int) -> Tensor:
    """Return an orthonormal Hadamard matrix behind random signs, (size, size), float32.

    Raises
    ------
    ModelError
        If the size is not a power of two.
    """
    check_hadamard(size)
    generator = torch.Generator().manual_seed(seed)
    signs = 2.0 * torch.randint(2, (size, 1), generator=generator) - 1
    return signs * torch.from_numpy(hadamard(size)).float() / size**0.5
