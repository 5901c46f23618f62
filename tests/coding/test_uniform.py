"""Uniform quantizers and the costs of their errors, against SciPy and the theory of quantizers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import norm

from manifoldkv.coding.costs import best_gains, coherent_costs
from manifoldkv.plan.formats.uniform import GAUSSIAN_STEPS, WIDTHS, fit_quantizers, quantized


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
    for place, bits in enumerate(WIDTHS[1:], 1):
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


def test_a_constant_coordinate_needs_no_bits() -> None:
    found = fit_quantizers(torch.zeros(10, 3))
    assert float(found.distortion.max()) < 1e-30
