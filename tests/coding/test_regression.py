"""Predictions of low rank: against a truncated singular value decomposition."""

import numpy as np
import pytest
import torch
from torch import Tensor

from manifoldkv.coding.regression import RIDGE, reduced_rank, ridge

INPUTS, FEATURES = 9, 6


def positive(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(size, 2 * size, generator=generator, dtype=torch.float64)
    return root @ root.mT / size


GRAM, FISHER = positive(INPUTS, 0), positive(FEATURES, 1)
CROSSED = torch.randn(
    INPUTS, FEATURES, generator=torch.Generator().manual_seed(2), dtype=torch.float64
)
FULL = ridge(GRAM, CROSSED)


def root_of(matrix: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(values)) @ vectors.T


def truncated(rank: int) -> np.ndarray:
    """The best weights of a rank, by Eckart and Young in the metric of inputs and of errors."""
    fisher = FISHER.numpy() + RIDGE * np.trace(FISHER.numpy()) / FEATURES * np.eye(FEATURES)
    left, right = root_of(GRAM.numpy()), root_of(fisher)
    u, s, vt = np.linalg.svd(left @ FULL.numpy() @ right)
    kept = (u[:, :rank] * s[:rank]) @ vt[:rank]
    return np.linalg.solve(left, kept) @ np.linalg.inv(right)


@pytest.mark.parametrize("rank", range(1, FEATURES + 1))
def test_a_prediction_of_low_rank_is_the_best_one(rank: int) -> None:
    first, second = reduced_rank(FULL, GRAM, FISHER, rank)
    assert first.shape == (INPUTS, rank)
    assert second.shape == (rank, FEATURES)
    np.testing.assert_allclose((first @ second).numpy(), truncated(rank), atol=1e-10)
    if rank == FEATURES:
        torch.testing.assert_close(first @ second, FULL)


def test_more_rank_loses_less() -> None:
    losses = []
    for rank in range(1, FEATURES + 1):
        first, second = reduced_rank(FULL, GRAM, FISHER, rank)
        missing = first @ second - FULL
        losses.append(float((missing.mT @ GRAM @ missing * FISHER).sum()))
    assert (np.diff(losses) < 0).all()
    assert losses[-1] < 1e-12 * losses[0]
