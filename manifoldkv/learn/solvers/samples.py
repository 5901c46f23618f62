"""Samples of the calibration data for steps of a solver."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from manifoldkv.statistics.layer import Batch, LayerActivations


def stratified_rows(length: int, count: int, generator: torch.Generator) -> Tensor | None:
    """Return a random position in each of `count` equal parts, (count,), or None for all rows."""
    if count >= length:
        return None
    edges = torch.linspace(0, length, count + 1, dtype=torch.float64)
    within = torch.rand(count, generator=generator, dtype=torch.float64)
    rows = (edges[:-1] + within * edges.diff()).floor()
    return rows.clamp(max=length - 1).long()


def random_sequences(total: int, count: int, generator: torch.Generator) -> Tensor:
    """Return indices of `count` distinct sequences, (count,), or of all if there are fewer."""
    return torch.randperm(total, generator=generator)[:count]


def sample_of_rows(activations: LayerActivations, rows: int, generator: torch.Generator) -> Batch:
    """Return `rows` query rows in all, from many sequences: about 8 of each, or more."""
    count = min(activations.sequences, max(1, rows // 8))
    sequences = random_sequences(activations.sequences, count, generator)
    return Batch(sequences, stratified_rows(activations.length, -(-rows // count), generator))


def row_batches(
    activations: LayerActivations, sequences: int, rows: int, generator: torch.Generator
) -> Iterator[Batch]:
    """Yield batches without end in which every query row occurs once before any occurs again.

    Parameters
    ----------
    activations : LayerActivations
        Calibration data.
    sequences, rows : int
        Number of sequences of a batch, and of evenly spaced query rows of each.
    generator : torch.Generator
        Random generator of the order.
    """
    stride = max(1, activations.length // rows)
    while True:
        for offset in torch.randperm(stride, generator=generator).tolist():
            positions = torch.arange(offset, activations.length, stride)
            order = torch.randperm(activations.sequences, generator=generator)
            for part in order.split(sequences):
                yield Batch(part, positions if stride > 1 else None)
