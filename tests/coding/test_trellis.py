"""Laws of trellis codes."""

from itertools import product
from math import ceil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldkv.plan.formats.scales import NAN_SHORT, short_scales
from manifoldkv.plan.formats.trellis import (
    GAUSSIAN_DISTORTION,
    STATES,
    TrellisCoded,
    codebooks,
    own_bits,
    relative_steps,
    search,
    state_fields,
)
from manifoldkv.plan.formats.uniform import GAUSSIAN_DISTORTION as OF_UNIFORM

LATENTS, LENGTH = 192, STATES.bit_length() - 1
BOOKS = codebooks()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bits", [*GAUSSIAN_DISTORTION][1:])
def test_distortion_of_gaussians(bits: float) -> None:
    """It is the documented one, below those of mixtures of uniform quantisers, and above the least.

    Shannon's bound is the least.
    """
    x, widths = normal(256, LATENTS), torch.full((LATENTS,), bits)
    own, step = own_bits(widths), relative_steps(widths, BOOKS)
    assert int(own.sum()) == bits * LATENTS
    chosen = torch.from_numpy(search(x / step, own, step.square(), BOOKS).astype(np.int64))
    distortion = float((x - step * BOOKS[own, chosen]).square().mean())
    accuracy = 0.1 if bits > 7 else 0.05  # of 8 bits the tails decide, in few samples
    assert distortion == pytest.approx(GAUSSIAN_DISTORTION[bits], rel=accuracy)
    assert 4.0**-bits < distortion < (OF_UNIFORM[int(bits)] + OF_UNIFORM[ceil(bits)]) / 2


@given(st.lists(st.integers(1, 16), min_size=1, max_size=12))
def test_own_bits_are_the_bits_rounded_by_turns(halves: list[int]) -> None:
    bits = torch.tensor(sorted(halves, reverse=True)) / 2
    own = own_bits(bits)
    assert ((own - bits).abs() <= 0.5).all()
    assert own[-1] >= 1  # the last has no bits of a next one
    assert own.sum() <= ceil(float(bits.sum()))
    assert ((own.cumsum(0) - bits.cumsum(0)).abs() <= 0.5).all()


@pytest.mark.parametrize(
    "widths", [(2, 1, 1), (3, 3), (4, 2, 1, 1), (8, 1), (1,), (1, 2, 0, 1, 0, 1)]
)
def test_no_other_stream_has_a_smaller_weighted_error(widths: tuple[int, ...]) -> None:
    bits, weights = torch.tensor(widths), torch.linspace(1, 3, len(widths))
    x = normal(5, len(widths))
    own = np.array(list(product(*(range(1 << width) for width in widths))))  # (streams, r)
    states = np.zeros_like(own)
    for i, start in enumerate(np.cumsum(widths) - widths):
        stream = sum(
            own[:, j] << (sum(widths) - place - width)
            for j, (place, width) in enumerate(zip(np.cumsum(widths) - widths, widths, strict=True))
        )
        shifted = (stream << LENGTH) >> (sum(widths) - start)  # the bits before it stay on top
        states[:, i] = shifted & ((1 << LENGTH) - 1)
    codewords = BOOKS[bits, torch.from_numpy(states)]  # (streams, r)
    errors = (weights * (x.unsqueeze(1) - codewords).square()).sum(dim=2)
    chosen = torch.from_numpy(search(x, bits, weights, BOOKS).astype(np.int64))
    found = (weights * (x - BOOKS[bits, chosen]).square()).sum(dim=1)
    torch.testing.assert_close(found, errors.amin(dim=1))


def of_falling_variance() -> TrellisCoded:
    bits = torch.tensor([6.0] * 8 + [3.0] * 24 + [1.0] * 32)
    deviation = 2.0**bits
    return TrellisCoded(bits, deviation, deviation, torch.ones(64))


def test_tokens_with_outliers_have_larger_scales() -> None:
    """Their errors are nearer to those of the best scales than to those of root mean squares."""
    quantizer = of_falling_variance()
    x = normal(100, 64)
    x[:, 0] = torch.linspace(-14, 14, 100)
    x *= quantizer.deviation
    _, codes, found = encoded(quantizer, x)
    codes = codes.unsqueeze(1)
    smallest = nearest((x / quantizer.deviation).square().mean(dim=1, keepdim=True).sqrt())
    errors = torch.stack([error_at(quantizer, x, smallest + k) for k in range(9)])
    chosen = error_at(quantizer, x, codes)
    torch.testing.assert_close((x - found).square().sum(dim=1), chosen)
    assert chosen.sum() < 6 * errors.amin(dim=0).sum() < errors[0].sum() / 20
    outliers = x[:, 0].abs() > 9 * quantizer.deviation[0]
    assert (codes > smallest)[outliers].all()
    assert (chosen < errors[0] / 5)[outliers].all()


def error_at(quantizer: TrellisCoded, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Squared errors of tokens whose scales are given by their codes, (n,)."""
    scales, bits = short_scales()[codes.clamp(max=NAN_SHORT - 1)], quantizer.own_bits
    step = quantizer.step
    states = search(x / scales / step, bits, step.square(), BOOKS).astype(np.int64)
    found = BOOKS[bits, torch.from_numpy(states)] * step * scales
    return (x - found).square().sum(dim=1)


def test_scales_of_tokens_without_outliers_are_root_mean_squares() -> None:
    """Of the 15 scales of 4 bits the nearest one."""
    quantizer, scales = of_falling_variance(), torch.logspace(-4, 4, 100).unsqueeze(1)
    x = normal(100, 64).sign() * scales * quantizer.deviation
    assert torch.equal(encoded(quantizer, x)[1], nearest(scales).squeeze(1))


def nearest(scales: torch.Tensor) -> torch.Tensor:
    return (scales - short_scales()).abs().argmin(dim=1, keepdim=True)


def encoded(quantizer: TrellisCoded, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Streams (bytes, n), codes of scales (n,) and reconstructions (n, r) of tokens (n, r)."""
    streams = torch.empty(quantizer.stream_bytes, len(x), dtype=torch.uint8)
    found = quantizer.encode(x.unsqueeze(0), (streams.flatten().numpy(), 0, len(x)))
    return streams, (streams[-1] & 15).long(), found[0]


def of_mixed_widths() -> TrellisCoded:
    bits = torch.tensor([5, 3, 3, 2.5, 1.5, 1, 1, 1, 0.5, 0])
    ones = torch.ones(10)
    return TrellisCoded(bits, 2 * ones, ones, 1.1 * ones)


def test_tokens_are_encoded_alone_and_on_any_number_of_threads() -> None:
    quantizer, x = of_mixed_widths(), normal(150, 9)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(encoded(quantizer, x))
    torch.set_num_threads(before)
    alone = [encoded(quantizer, one) for one in x.split(1)]
    parts = zip(*alone, strict=True)
    found.append([torch.cat(x, dim) for x, dim in zip(parts, (1, 0, 0), strict=True)])
    for parts in zip(*found, strict=True):
        assert torch.equal(parts[0], parts[1])
        assert torch.equal(parts[0], parts[2])


def test_reconstructions_are_the_codewords_of_the_stream() -> None:
    quantizer, x = of_mixed_widths(), normal(20, 9)
    codes, scales, found = encoded(quantizer, x)
    assert codes.shape == (3, 20)  # 18.5 bits and 4
    stream, bits = codes.long(), quantizer.own_bits
    for latent, (upper, middle, lower, right, mask) in enumerate(state_fields(bits).tolist()):
        three = (stream[upper] << 16) | (stream[middle] << 8) | stream[lower]
        codewords = BOOKS[bits[latent]][(three >> right) & mask]
        expected = 2 * 1.1 * codewords * short_scales()[scales]
        torch.testing.assert_close(found[:, latent], expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_any_latents_are_encoded_and_leave_other_tokens_alone(value: float) -> None:
    quantizer, x = of_mixed_widths(), normal(3, 9)
    others = encoded(quantizer, x)
    x[1, 4] = value
    codes, scales, found = encoded(quantizer, x)
    assert torch.equal(codes[:, [0, 2]], others[0][:, [0, 2]])
    assert torch.equal(scales[[0, 2]], others[1][[0, 2]])
    assert torch.equal(found[[0, 2]], others[2][[0, 2]])
    assert found[1].isnan().all() if value != value else found[1].isfinite().all()


def test_no_latents() -> None:
    empty = torch.zeros(4)
    quantizer = TrellisCoded(empty, empty + 1, empty + 1, empty + 1)
    codes, scales, found = encoded(quantizer, normal(3, 0))
    assert [codes.shape, found.shape] == [(1, 3), (3, 0)]
    assert scales.tolist() == [NAN_SHORT] * 3
