"""Bits from one budget: against brute force, SciPy and the theory of quantisers."""

import itertools
from math import ceil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import norm

from manifoldkv.coding.allocation import (
    GAUSSIAN_STEPS,
    WIDTHS,
    allocate,
    allocate_streams,
    best_gains,
    coherent_costs,
    fit_quantizers,
    gaussian_costs,
    pack_size,
    quantized,
)
from manifoldkv.coding.trellis import GAUSSIAN_DISTORTION as GAUSSIAN_OF_TRELLIS
from manifoldkv.errors import ArgumentError

FEW_WIDTHS = (0, 2, 4, 8)


def gaussian_distortion(step: float, bits: int) -> float:
    """Mean squared error of the quantiser on a standard Gaussian, by integration."""
    half = 2 ** (bits - 1)
    edges = np.concatenate([[-np.inf], np.arange(-half + 1, half) * step, [np.inf]])
    middles = (np.arange(-half, half) + 0.5) * step
    p = np.diff(norm.cdf(edges))
    first = -np.diff(norm.pdf(edges))
    finite = np.where(np.isfinite(edges), edges, 0)
    second = p - np.diff(finite * norm.pdf(edges))
    return float(np.sum(second - 2 * middles * first + middles**2 * p))


@pytest.mark.parametrize("bits", range(1, 9))
def test_steps_for_gaussians_are_the_best(bits: int) -> None:
    found = minimize_scalar(gaussian_distortion, bounds=(0.01, 3), args=(bits,), method="bounded")
    assert GAUSSIAN_STEPS[bits] == pytest.approx(found.x, rel=0.01)


def test_fitted_steps_find_the_gaussian_ones_and_wider_ones_for_tails() -> None:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(20_000, 2, generator=generator, dtype=torch.float64)
    normal[:, 1] *= 100
    found = fit_quantizers(normal, WIDTHS)
    for place, bits in enumerate(found.widths[1:], 1):
        ratio = found.step[:, place] / (GAUSSIAN_STEPS[bits] * torch.tensor([1.0, 100.0]))
        assert ratio.sub(1).abs().max() < 0.25
        expected = gaussian_distortion(GAUSSIAN_STEPS[bits], bits)
        assert float(found.distortion[0, place]) == pytest.approx(expected, rel=0.15)
    tails = normal[:, :1] ** 3
    of_tails = fit_quantizers(tails, WIDTHS)
    scale = tails.square().mean().sqrt()
    assert (of_tails.step[0, 4:] > 1.3 * scale * found.step[0, 4:]).all()


@given(st.integers(0, 2**32 - 1), st.integers(1, 7))
def test_distortion_never_rises_with_a_bit_more(seed: int, coordinates: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    samples = torch.randn(64, coordinates, generator=generator, dtype=torch.float64)
    samples = samples * torch.randn(64, 1, generator=generator, dtype=torch.float64).exp()
    distortion = fit_quantizers(samples, WIDTHS).distortion
    assert (distortion.diff(dim=1) <= 1e-12 * distortion[:, :1]).all()


@given(st.integers(0, 2**32 - 1), st.floats(1, 20))
def test_no_gain_costs_less_and_a_bit_more_never_costs_more(seed: int, coherence: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    samples = torch.randn(500, 3, generator=generator, dtype=torch.float64)
    fitted = fit_quantizers(samples)
    costs = coherent_costs(fitted.distortion, coherence)
    assert (costs.diff(dim=1) <= 1e-12).all()
    power = samples.square().mean(dim=0)
    torch.testing.assert_close(costs[:, 0], coherence * power)
    torch.testing.assert_close(coherent_costs(fitted.distortion, 1.0), fitted.distortion)
    for place, bits in enumerate(WIDTHS[1:], 1):
        given_back = quantized(samples, fitted.step[:, place], bits)
        gains = best_gains(samples, given_back, coherence)

        def cost(gain: float, c: int, given_back: torch.Tensor = given_back) -> float:
            """What remains of the latent counts `coherence` times, noise once."""
            x, y = samples[:, c], given_back[:, c]
            kept = float((x * y).mean() / power[c])
            noise = float((y - kept * x).square().mean() / power[c])
            return coherence * (1 - gain * kept) ** 2 + gain**2 * noise

        for c in range(3):
            best = minimize_scalar(cost, bounds=(0.1, 5), args=(c,), method="bounded")
            assert float(gains[c]) == pytest.approx(best.x, abs=1e-3)
            # The formula is that of a quantiser whose levels are the means of what they stand for.
            assert float(costs[c, place] / power[c]) == pytest.approx(best.fun, rel=0.2)


def test_at_full_coherence_what_is_given_back_is_unbiased() -> None:
    samples = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0)).double()
    given_back = quantized(samples, torch.tensor([1.0, 0.5]), 2)
    gains = best_gains(samples, given_back, 1e12)
    torch.testing.assert_close(
        (samples * gains * given_back).mean(dim=0), samples.square().mean(dim=0)
    )
    nothing = torch.zeros(5, 1, dtype=torch.float64)
    assert best_gains(nothing, nothing).tolist() == [1.0]


def test_what_is_given_back_lies_in_the_middle_of_an_interval() -> None:
    x = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    step = torch.tensor(0.5, dtype=torch.float64)
    found = quantized(x, step, 3)
    assert set(found.tolist()) == {(i + 0.5) * 0.5 for i in range(-4, 4)}
    inside = x.abs() < 2
    assert (found - x)[inside].abs().max() <= 0.25 + 1e-12


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
    widths = (0, 1, 2, 3)
    bits = allocate(costs, widths, budget)
    assert [len(chosen) for chosen in bits] == [len(cost) for cost in costs]
    assert sum(int(chosen.sum()) for chosen in bits) <= budget
    best = brute_force(costs, [0, 1, 2, 3], budget)
    assert cost_of(costs, bits, widths) == pytest.approx(best)


@given(
    st.lists(st.lists(st.floats(0.01, 9), min_size=2, max_size=30), min_size=1, max_size=3),
    st.floats(0, 2),
    st.integers(0, 40),
)
def test_bits_of_streams_are_within_some_bytes_of_the_best(
    variances: list[list[float]], price: float, budget: int
) -> None:
    """Nothing within a budget costs less than its Lagrangian dual; sites may leave some bytes."""
    widths = tuple(GAUSSIAN_OF_TRELLIS)
    costs = [
        gaussian_costs(torch.tensor(one, dtype=torch.float64), GAUSSIAN_OF_TRELLIS).numpy()
        for one in variances
    ]
    for cost in costs:
        cost[:, 1:] += price  # of a latent that is stored
    bits = allocate_streams(costs, widths, budget, [1] * len(costs))
    assert sum(ceil(chosen.sum() / 8) for chosen in bits) <= budget
    found = cost_of(costs, bits, widths)
    rows = np.concatenate(costs)

    def dual(size: int) -> float:
        prices = np.append(0, np.geomspace(1e-9, 100, 2000))
        priced = rows + prices[:, np.newaxis, np.newaxis] * np.array(widths)  # (prices, D, widths)
        return float((priced.min(axis=2).sum(axis=1) - 8 * size * prices).max())

    assert dual(budget) - 1e-9 <= found <= 1.01 * dual(max(0, budget - 3 * len(costs)))


@given(
    st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=4),
    st.integers(0, 16),
)
def test_unequal_steps_and_any_costs_are_within_a_step_of_the_best(
    rows: list[list[float]], budget: int
) -> None:
    costs = [np.array(rows)]
    bytes_of = [0, 1, 2, 4]
    bits = allocate(costs, FEW_WIDTHS, budget)
    taken = sum(bytes_of[FEW_WIDTHS.index(b)] for b in bits[0])
    assert taken <= budget
    found = cost_of(costs, bits, FEW_WIDTHS)
    assert found >= brute_force(costs, bytes_of, budget) - 1e-12
    # What the last bytes could still save is at most what the widest step does.
    assert found <= brute_force(costs, bytes_of, max(0, budget - 3)) + 1e-12


def test_a_budget_for_everything_gives_everything() -> None:
    costs = [np.array([[4.0, 2.0, 1.0, 0.5], [1.0, 0.1, 0.01, 0.01]])]
    (bits,) = allocate(costs, FEW_WIDTHS, 100)
    assert bits.tolist() == [8, 4]  # the last step would save nothing
    (none,) = allocate(costs, FEW_WIDTHS, 0)
    assert none.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("widths", "latents"), [(FEW_WIDTHS, 4), (WIDTHS, 8), ((0, 4, 8), 2), ((0, 8), 1)]
)
def test_packs_fill_whole_bytes(widths: tuple[int, ...], latents: int) -> None:
    assert pack_size(widths) == latents
    assert all(latents * bits % 8 == 0 for bits in widths)
    assert any(latents // 2 * bits % 8 for bits in widths) or latents == 1


@pytest.mark.parametrize("widths", [(), (0,), (2, 4), (0, 4, 2), (0, 4, 4), (0, 9)])
def test_widths_that_are_none(widths: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="increase from 0 to at most 8"):
        fit_quantizers(torch.ones(2, 2), widths)
    with pytest.raises(ArgumentError, match="increase from 0 to at most 8"):
        allocate([np.ones((1, len(widths)))], widths, 1)


def test_no_budget_is_negative() -> None:
    with pytest.raises(ArgumentError, match="budget must be >= 0, got -1"):
        allocate([np.ones((1, 4))], FEW_WIDTHS, -1)


def test_a_constant_coordinate_needs_no_bits() -> None:
    found = fit_quantizers(torch.zeros(10, 3))
    assert float(found.distortion.max()) < 1e-30
