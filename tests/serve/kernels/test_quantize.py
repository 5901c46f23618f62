"""Rounding and packing by the kernel, beside torch's."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldkv.plan.formats.mixed import MixedWidths
from manifoldkv.plan.formats.scales import scales_of
from manifoldkv.serve.cache import mixed
from manifoldkv.serve.cache.mixed import MixedWidthStore

CPU = torch.device("cpu")


@contextmanager
def by_torch() -> Iterator[None]:
    with patch.object(mixed, "can_compile", lambda dtype, device: False):
        yield


def stores(widths: list[int], seed: int) -> tuple[MixedWidthStore, MixedWidthStore]:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.tensor(sorted(widths, reverse=True), dtype=torch.uint8)
    numbers = [torch.rand(len(bits), generator=generator) + 0.3 for _ in range(3)]
    quantizer = MixedWidths(bits, *numbers)
    compiled = MixedWidthStore(quantizer, torch.float32, CPU)
    with by_torch():
        return compiled, MixedWidthStore(quantizer, torch.float32, CPU)


@given(
    widths=st.lists(st.integers(0, 8), min_size=1, max_size=20),
    seed=st.integers(0, 99),
    exponent=st.integers(-10, 7),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5)),
)
def test_codes_and_scales_are_those_of_torch(
    widths: list[int], seed: int, exponent: int, shape: tuple[int, int]
) -> None:
    """Scales below and above those of the codes too."""
    compiled, reference = stores(widths, seed)
    batch, tokens = shape
    x = torch.randn(batch, 1, tokens, len(widths), generator=torch.Generator().manual_seed(seed))
    x = x * 10.0**exponent
    read = compiled.append_and_read(x)
    expected = reference.append_and_read(x)
    for ours, others in zip(compiled.parts, reference.parts, strict=True):
        torch.testing.assert_close(ours.view, others.view, rtol=2e-3, atol=0, equal_nan=True)
    same = (compiled.parts[0].view == reference.parts[0].view).all()
    if same:  # a latent on the bound of an interval may have a neighbouring code
        torch.testing.assert_close(read, expected, rtol=2e-3, atol=1e-30)
    torch.testing.assert_close(read, compiled.read(0, tokens), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_is_seen(number: float) -> None:
    compiled, reference = stores([4, 4, 2], 0)
    x = torch.ones(1, 1, 2, 3)
    x[0, 0, 1, 1] = number
    scales = []
    for store in (compiled, reference):
        store.append(x)
        scales.append(scales_of(store.parts[0].view[:, :, -1].flatten()))
    assert torch.equal(scales[0].isnan(), scales[1].isnan())
    torch.testing.assert_close(scales[0], scales[1], equal_nan=True, rtol=1e-3, atol=0)


@pytest.mark.parametrize("shared", [True, False])
def test_a_few_tokens_are_projected(shared: bool) -> None:
    widths = [8, 4, 4, 1]
    compiled, _ = stores(widths, 0)
    expected_store, _ = stores(widths, 0)
    x, mean = torch.randn(2, 3, 10), torch.randn(*((1, 1) if shared else (2, 3)), 10)
    down = torch.randn(len(widths), 10)
    read = compiled.append_projected(x, mean, down)
    expected = expected_store.append_and_read(((x - mean) @ down.mT).unsqueeze(1))
    torch.testing.assert_close(read, expected[:, 0], rtol=1e-4, atol=1e-5)
    for ours, others in zip(compiled.parts, expected_store.parts, strict=True):
        torch.testing.assert_close(ours.view, others.view, rtol=2e-3, atol=0)
