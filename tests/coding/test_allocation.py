"""Bits from one budget, against brute force and its dual."""

import itertools
from math import ceil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldkv.coding.allocation import PACK, allocate, allocate_streams
from manifoldkv.coding.costs import gaussian_costs
from manifoldkv.core.errors import ArgumentError
from manifoldkv.plan.formats.trellis import GAUSSIAN_DISTORTION as GAUSSIAN_OF_TRELLIS

FEW_WIDTHS = (0, 1, 2, 3)


def convex_costs(draw: st.DrawFn, packs: int, widths: int) -> np.ndarray:
    falls = st.lists(st.floats(0.01, 1), min_size=widths - 1, max_size=widths - 1)
    rows = []
    for _ in range(packs):
        drops = sorted(draw(falls), reverse=True)
        rows.append(np.concatenate([[sum(drops)], sum(drops) - np.cumsum(drops)]))
    return np.array(rows)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[np.ndarray], int]:
    """Convex costs of two sites at 0, 1, 2 and 3 bits (bytes, a pack being eight latents)."""
    sites = [convex_costs(draw, draw(st.integers(1, 2)), 4) for _ in range(2)]
    return sites, draw(st.integers(0, 14))


def brute_force(costs: list[np.ndarray], bytes_of: list[int], budget: int) -> float:
    every = np.concatenate(costs)
    return min(
        sum(every[i, c] for i, c in enumerate(choice))
        for choice in itertools.product(range(len(bytes_of)), repeat=len(every))
        if sum(bytes_of[c] for c in choice) <= budget
    )


def cost_of(costs: list[np.ndarray], bits: list[np.ndarray], widths: tuple[int, ...]) -> float:
    return sum(
        cost[i, widths.index(b)]
        for cost, chosen in zip(costs, bits, strict=True)
        for i, b in enumerate(chosen)
    )


@given(problems())
def test_no_choice_of_bits_is_better(problem: tuple[list[np.ndarray], int]) -> None:
    costs, budget = problem
    bits = allocate(costs, budget)
    assert [len(chosen) for chosen in bits] == [len(cost) for cost in costs]
    assert sum(int(chosen.sum()) for chosen in bits) <= budget
    best = brute_force(costs, [0, 1, 2, 3], budget)
    assert cost_of(costs, bits, FEW_WIDTHS) == pytest.approx(best)


@given(
    st.lists(st.lists(st.floats(0.01, 9), min_size=2, max_size=30), min_size=1, max_size=3),
    st.floats(0, 2),
    st.integers(0, 40),
    st.integers(0, 7),
)
def test_bits_of_streams_are_within_some_bytes_of_the_best(
    variances: list[list[float]], price: float, budget: int, spare: int
) -> None:
    """Nothing within a budget costs less than its Lagrangian dual; sites may leave some bytes."""
    widths = tuple(GAUSSIAN_OF_TRELLIS)
    costs = [
        gaussian_costs(torch.tensor(one, dtype=torch.float64), GAUSSIAN_OF_TRELLIS).numpy()
        for one in variances
    ]
    for cost in costs:
        cost[:, 1:] += price  # of a latent that is stored
    bits = allocate_streams(costs, widths, budget, [1] * len(costs), spare)
    assert sum(max(0, ceil((chosen.sum() - spare) / 8)) for chosen in bits) <= budget
    found = cost_of(costs, bits, widths)
    rows = np.concatenate(costs)

    def dual(size: float) -> float:
        prices = np.append(0, np.geomspace(1e-9, 100, 2000))
        priced = rows + prices[:, np.newaxis, np.newaxis] * np.array(widths)  # (prices, D, widths)
        return float((priced.min(axis=2).sum(axis=1) - 8 * size * prices).max())

    most = budget + len(costs) * spare / 8
    assert dual(most) - 1e-9 <= found <= 1.01 * dual(max(0, budget - 3 * len(costs)))


@given(
    st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=4),
    st.integers(0, 16),
)
def test_any_costs_are_within_a_step_of_the_best(rows: list[list[float]], budget: int) -> None:
    costs = [np.array(rows)]
    bytes_of = list(FEW_WIDTHS)
    bits = allocate(costs, budget)
    assert bits[0].sum() <= budget
    found = cost_of(costs, bits, FEW_WIDTHS)
    assert found >= brute_force(costs, bytes_of, budget) - 1e-12
    # What the last bytes could still save is at most what the widest step does.
    assert found <= brute_force(costs, bytes_of, max(0, budget - 3)) + 1e-12


def test_a_budget_for_everything_gives_everything() -> None:
    costs = [np.array([[4.0, 2.0, 1.0, 0.5], [1.0, 0.1, 0.01, 0.01]])]
    (bits,) = allocate(costs, 100)
    assert bits.tolist() == [3, 2]  # the last step would save nothing
    (none,) = allocate(costs, 0)
    assert none.tolist() == [0, 0]


def test_packs_fill_whole_bytes() -> None:
    assert all(PACK * bits % 8 == 0 for bits in range(1, 9))


def test_no_budget_is_negative() -> None:
    with pytest.raises(ArgumentError, match="budget must be >= 0, got -1"):
        allocate([np.ones((1, 4))], -1)
