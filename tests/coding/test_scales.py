"""Scales of tokens in 8 bits."""

import numpy as np
import torch

from manifoldkv.plan.formats.scales import (
    INFINITY_CODE,
    LARGEST_SCALE,
    SMALLEST_SCALE,
    scale_codes,
    scales_of,
)

CODES = torch.arange(INFINITY_CODE, dtype=torch.uint8)  # of all finite scales


def test_scales_are_the_first_bits_of_float16() -> None:
    expected = (CODES.numpy().astype(np.uint16) << 7).view(np.float16).astype(np.float32)
    assert np.array_equal(scales_of(CODES).numpy(), expected)
    assert float(scales_of(CODES)[-1]) == LARGEST_SCALE


def test_scales_keep_their_codes() -> None:
    assert torch.equal(scale_codes(scales_of(CODES)), CODES)


def test_scales_are_rounded_to_the_nearest() -> None:
    scales = scales_of(CODES).double()
    x = torch.cat([torch.rand(4000).double() * 3, 2 ** (torch.rand(4000).double() * 40 - 25)])
    x = x.float().double()
    found = scales_of(scale_codes(x.float())).double()
    least = (x.unsqueeze(1) - scales).abs().min(dim=1).values
    inside = x <= LARGEST_SCALE
    assert torch.equal((found - x).abs()[inside], least[inside])
    normal = inside & (x >= SMALLEST_SCALE)
    assert float(((found - x) / x)[normal].abs().max()) <= 1 / 16


def test_ties_are_even() -> None:
    scales = scales_of(CODES)
    found = scale_codes((scales[1:] + scales[:-1]) / 2).int()
    assert torch.equal(found, torch.arange(1, INFINITY_CODE).int() // 2 * 2)


def test_scales_that_are_too_large_or_not_numbers() -> None:
    found = scales_of(scale_codes(torch.tensor([1e9, torch.inf, torch.nan, 0.0])))
    assert found[:2].tolist() == [LARGEST_SCALE] * 2
    assert found[2].isnan()
    assert found[3] == 0
