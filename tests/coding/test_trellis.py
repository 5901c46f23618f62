"""Laws of trellis codes."""

from itertools import product

import numpy as np
import pytest
import torch

from manifoldkv.coding.allocation import GAUSSIAN_DISTORTION as OF_UNIFORM
from manifoldkv.coding.scales import scale_codes, scales_of
from manifoldkv.coding.trellis import (
    GAUSSIAN_DISTORTION,
    WINDOW,
    TrellisCoded,
    codebooks,
    pack,
    search,
    window_fields,
)

LATENTS = 192


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bits", range(1, 9))
def test_distortion_of_gaussians(bits: int) -> None:
    """It is the documented one, below that of uniform quantisers, not below Shannon's bound."""
    x = normal(256, LATENTS)
    widths = torch.full((LATENTS,), bits)
    windows = search(x, widths, torch.ones(LATENTS), codebooks())
    found = codebooks()[bits][torch.from_numpy(windows.astype(np.int64))]
    distortion = float((x - found).square().mean())
    accuracy = 0.1 if bits == 8 else 0.05  # of 8 bits the tails decide, in few samples
    assert distortion == pytest.approx(GAUSSIAN_DISTORTION[bits], rel=accuracy)
    assert 4.0**-bits < distortion < OF_UNIFORM[bits]


@pytest.mark.parametrize("widths", [(2, 1, 1), (3, 3), (4, 2, 1, 1), (8, 1), (1,)])
def test_no_other_stream_has_a_smaller_weighted_error(widths: tuple[int, ...]) -> None:
    bits, weights = torch.tensor(widths), torch.linspace(1, 3, len(widths))
    x = normal(5, len(widths))
    states = [list(product(*(range(1 << width) for width in widths)))]
    own = np.array(states[0])  # (streams, r)
    windows = np.zeros_like(own)
    for i, start in enumerate(np.cumsum(widths) - widths):
        stream = sum(
            own[:, j] << (sum(widths) - place - width)
            for j, (place, width) in enumerate(zip(np.cumsum(widths) - widths, widths, strict=True))
        )
        shifted = (stream << WINDOW) >> (sum(widths) - start)  # the bits before it stay on top
        windows[:, i] = shifted & ((1 << WINDOW) - 1)
    codewords = codebooks()[bits, torch.from_numpy(windows)]  # (streams, r)
    errors = (weights * (x.unsqueeze(1) - codewords).square()).sum(dim=2)
    chosen = torch.from_numpy(search(x, bits, weights, codebooks()).astype(np.int64))
    found = (weights * (x - codebooks()[bits, chosen]).square()).sum(dim=1)
    torch.testing.assert_close(found, errors.amin(dim=1))


def of_falling_variance() -> TrellisCoded:
    bits = torch.tensor([6] * 8 + [3] * 24 + [1] * 32, dtype=torch.uint8)
    deviation = 2.0 ** bits.float()
    return TrellisCoded(bits, deviation, deviation, torch.ones(64))


def test_tokens_with_outliers_have_larger_scales() -> None:
    """Their errors are nearer to those of the best scales than to those of root mean squares."""
    quantizer = of_falling_variance()
    x = normal(100, 64)
    x[:, 0] = torch.linspace(-14, 14, 100)
    x *= quantizer.deviation
    _, codes, found = quantizer.search(x)
    smallest = scale_codes((x / quantizer.deviation).square().mean(dim=1, keepdim=True).sqrt())
    errors = torch.stack([error_at(quantizer, x, smallest + k) for k in range(25)])
    chosen = error_at(quantizer, x, codes)
    torch.testing.assert_close((x - found).square().sum(dim=1), chosen)
    assert chosen.sum() < 6 * errors.amin(dim=0).sum() < errors[0].sum() / 20
    outliers = x[:, 0].abs() > 9 * quantizer.deviation[0]
    assert (codes > smallest)[outliers].all()
    assert (chosen < errors[0] / 10)[outliers].all()


def error_at(quantizer: TrellisCoded, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Squared errors of tokens whose scales are given by their codes, (n,)."""
    scales, bits = scales_of(codes), quantizer.bits.long()
    step = quantizer.step
    windows = search(x / scales / step, bits, step.square(), codebooks()).astype(np.int64)
    found = codebooks()[bits, torch.from_numpy(windows)] * step * scales
    return (x - found).square().sum(dim=1)


def test_scales_of_tokens_without_outliers_are_root_mean_squares() -> None:
    quantizer, scales = of_falling_variance(), torch.logspace(-4, 4, 100).unsqueeze(1)
    x = normal(100, 64).sign() * scales * quantizer.deviation
    assert torch.equal(quantizer.chosen_scales(x), scale_codes(scales))


def test_tokens_are_searched_alone_and_on_any_number_of_threads() -> None:
    x, bits = normal(150, 9), torch.tensor([5, 3, 3, 2, 2, 1, 1, 1, 1])
    before, found = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(search(x, bits, torch.ones(9), codebooks()))
    torch.set_num_threads(before)
    found.append(
        np.concatenate([search(one, bits, torch.ones(9), codebooks()) for one in x.split(1)])
    )
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()


def test_fields_cut_the_windows_out_of_the_streams() -> None:
    x, bits = normal(20, 9), torch.tensor([5, 3, 3, 2, 2, 1, 1, 1, 1])
    windows = search(x, bits, torch.ones(9), codebooks())
    codes = pack(windows, bits).long()
    assert codes.shape == (3, 20)  # 19 bits
    for latent, (upper, middle, lower, right, mask) in enumerate(window_fields(bits).tolist()):
        three = (codes[upper] << 16) | (codes[middle] << 8) | codes[lower]
        assert ((three >> right) & mask).tolist() == windows[:, latent].tolist()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_windows_of_any_latents_are_in_the_codebook(value: float) -> None:
    """The kernels look them up without a check."""
    x, bits = normal(3, 9), torch.tensor([5, 3, 3, 2, 2, 1, 1, 1, 1])
    others = search(x, bits, torch.ones(9), codebooks())
    x[1, 4] = value
    windows = search(x, bits, torch.ones(9), codebooks())
    assert windows.max() < 1 << WINDOW
    assert (windows[[0, 2]] == others[[0, 2]]).all()


def test_no_latents() -> None:
    windows = search(normal(3, 0), torch.zeros(0, dtype=torch.long), torch.ones(0), codebooks())
    assert windows.shape == (3, 0)
    assert pack(windows, torch.zeros(0, dtype=torch.long)).shape == (0, 3)
