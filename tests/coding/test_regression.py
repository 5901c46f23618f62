"""Predictions of low rank: against a truncated singular value decomposition."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manifoldkv.coding.regression import (
    LEAST_DEVIATION,
    PREDICTION_RIDGE,
    RIDGE,
    Regression,
    reduced_rank,
    ridge,
)

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


@pytest.mark.parametrize("unit", [2.0**-60, 1.0, 2.0**60])
def test_factors_do_not_depend_on_the_unit_of_errors(unit: float) -> None:
    """A Fisher matrix of a text that costs next to nothing leaves no factor that 16 bits lose."""
    for found, expected in zip(
        reduced_rank(FULL, GRAM, unit * FISHER, 3), reduced_rank(FULL, GRAM, FISHER, 3), strict=True
    ):
        torch.testing.assert_close(found, expected)
        assert found.abs().max() < 100


def test_more_rank_loses_less() -> None:
    losses = []
    for rank in range(1, FEATURES + 1):
        first, second = reduced_rank(FULL, GRAM, FISHER, rank)
        missing = first @ second - FULL
        losses.append(float((missing.mT @ GRAM @ missing * FISHER).sum()))
    assert (np.diff(losses) < 0).all()
    assert losses[-1] < 1e-12 * losses[0]


@given(
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    tokens=st.sampled_from([2, 40, 300]),
    scale=st.sampled_from([1e-9, 1.0, 1e9]),
    latents=st.integers(0, INPUTS),
    data=st.data(),
)
def test_no_weight_exceeds_what_the_inputs_determine(
    seed: int, dtype: torch.dtype, tokens: int, scale: float, latents: int, data: st.DataObject
) -> None:
    """Inputs are means, and a few latents mapped to features: what rounding leaves has no weight.

    Of inputs of a deviation of one, the weights of a ridge regression are at most ``1 / 2√ridge``
    times the deviation of an output.
    """
    generator = torch.Generator().manual_seed(seed)
    means = torch.tensor(
        data.draw(st.lists(st.floats(-100, 100), min_size=INPUTS, max_size=INPUTS)), dtype=dtype
    )
    spread = 10 ** torch.tensor(
        data.draw(st.lists(st.floats(-9, 1), min_size=INPUTS, max_size=INPUTS)), dtype=dtype
    )
    up = torch.randn(latents, INPUTS, generator=generator, dtype=dtype) * spread
    inputs = scale * (torch.randn(tokens, latents, generator=generator, dtype=dtype) @ up + means)
    x = torch.randn(tokens, FEATURES, generator=generator, dtype=dtype)
    mean, weights = Regression.of(x, inputs, 1).on_all()
    assert bool(mean.isfinite().all())
    exact = inputs.double()
    deviations, sizes = exact.std(dim=0, correction=0), exact.square().mean(dim=0).sqrt()
    largest = x.double().std(dim=0, correction=0) / (2 * PREDICTION_RIDGE**0.5)
    varying = deviations > LEAST_DEVIATION * sizes * 1.01
    floor = torch.where(varying, deviations, LEAST_DEVIATION * sizes).unsqueeze(1)
    assert bool((weights.abs() * floor <= 1.05 * largest).all())
    constant = deviations < LEAST_DEVIATION * sizes / 1.01
    assert not bool(weights[constant].any())
