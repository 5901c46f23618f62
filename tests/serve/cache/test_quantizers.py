"""Laws of quantizers and stores, and the numbers of every format against independent ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manifoldkv.coding.tables import entropy_coded
from manifoldkv.core.errors import PlanError
from manifoldkv.plan.formats.integers import (
    Integers,
    StaticIntegers,
    TokenIntegers,
    group_ranges,
    packed_bytes,
)
from manifoldkv.plan.formats.mixed import MixedWidths
from manifoldkv.plan.formats.quantizer import Quantizer
from manifoldkv.plan.formats.quantizers import Unquantized
from manifoldkv.plan.formats.scales import LARGEST_SCALE, scale_codes, scales_of
from manifoldkv.plan.formats.trellis import TrellisCoded
from manifoldkv.plan.formats.uniform import quantized
from manifoldkv.serve.cache.integers import pack, unpack
from manifoldkv.serve.cache.mixed import MixedWidthStore
from manifoldkv.serve.cache.stores import store_for
from manifoldkv.testing import QuantizerConformance
from manifoldkv.testing.quantizers import read

BITS = (8, 4, 3, 2)
CPU = torch.device("cpu")


def mixed_of(bits: list[int], **tensors: Tensor) -> MixedWidths:
    """Steps, deviations and gains of 1, where there are no others."""
    ones = {name: torch.ones(len(bits)) for name in ("step", "deviation", "gain")}
    return MixedWidths(torch.tensor(bits, dtype=torch.uint8), **ones | tensors)


class TestUnquantized(QuantizerConformance):
    quantizer = Unquantized()
    groups = 3


class TestStaticIntegers(QuantizerConformance):
    quantizer = StaticIntegers(4, 5, torch.tensor([-9.0, 9.0]).expand(2, 3, 2))
    groups = 2


class TestTokenIntegers(QuantizerConformance):
    quantizer = TokenIntegers(3, 5)
    groups = 2


class TestMixedWidths(QuantizerConformance):
    bits = (8, 7, 5, 4, 4, 3, 2, 2, 1, 1, 0, 0)
    quantizer = mixed_of([*bits], step=torch.full((12,), 0.3), gain=torch.full((12,), 1.1))


class TestTrellisCoded(QuantizerConformance):
    bits = (8, 7, 5, 4, 3.5, 3, 2, 1.5, 1, 0.5, 0.5, 0)
    quantizer = TrellisCoded(
        torch.tensor(bits),
        step=torch.full((12,), 0.9),
        deviation=torch.logspace(1, -1, 12),
        gain=torch.full((12,), 1.1),
    )


class TestEntropyCoded(QuantizerConformance):
    quantizer = entropy_coded(torch.randn(200, 12, generator=torch.Generator().manual_seed(1)))

    def test_no_cache_holds_it(self) -> None:
        with pytest.raises(NotImplementedError, match="no store for quantizer entropy-coded"):
            self.store()


def stored(quantizer: Quantizer, x: Tensor) -> Tensor:
    store = store_for(quantizer, x.shape[-1], torch.float32, CPU)
    store.append(x)
    return read(store)


@given(st.sampled_from(BITS), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_packing_loses_nothing_and_takes_the_bytes_it_says(
    bits: int, features: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (2, 3, features), generator=generator, dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape[-1] == packed_bytes(features, bits)
    assert torch.equal(unpack(packed, bits, features), codes)


def test_a_byte_holds_numbers_that_lie_far_apart() -> None:
    assert pack(torch.tensor([1, 2, 3], dtype=torch.uint8), 4).tolist() == [0x31, 0x02]
    assert pack(torch.tensor([1, 2, 3, 0, 2], dtype=torch.uint8), 2).tolist() == [0b00101101, 2]
    three_bits = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7], dtype=torch.uint8)
    assert pack(three_bits, 3).tolist() == [0b10001000, 0b11011101, 0b11110000]


def test_ranges_with_a_short_last_group() -> None:
    x = torch.tensor([[1.0, 5.0, -2.0, 7.0, 3.0]])
    assert group_ranges(x, 2).tolist() == [[[1, 5], [-2, 7], [3, 3]]]
    assert group_ranges(x.view(1, 1, 5), 8, dims=(1,)).tolist() == [[[-2, 7]]]


def random_latents(tokens: int = 40, features: int = 10) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(-1, 1, features)
    return torch.randn(2, 3, tokens, features, generator=generator) * spread + spread


@pytest.mark.parametrize("bits", BITS)
def test_the_error_of_static_ranges_is_half_a_step(bits: int) -> None:
    x = random_latents()
    ranges = group_ranges(x, 4, dims=(0, 2))  # (heads, groups, 2)
    step = (ranges[..., 1] - ranges[..., 0]) / (2**bits - 1)
    step = step.repeat_interleave(4, dim=-1)[..., :10].unsqueeze(1)  # (heads, 1, features)
    found = stored(StaticIntegers(bits, 4, ranges), x)
    assert bool(((found - x).abs() <= 0.501 * step).all())


def rounded_by_numpy(x: np.ndarray, bits: int, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Elements (..., features) rounded a group after the other, and how far off they may be."""
    rounded, bounds = [], []
    for start in range(0, x.shape[-1], group_size):
        group = x[..., start : start + group_size]
        low, high = group.min(-1, keepdims=True), group.max(-1, keepdims=True)
        step = (high - low) / np.float32(2**bits - 1)
        offset, scale = (pair.astype(np.float16).astype(np.float32) for pair in (low, step))
        codes = np.rint((group - offset) / np.where(scale == 0, 1, scale))
        rounded.append(codes.clip(0, 2**bits - 1) * scale + offset)
        # A float16 is off by a 2^11th of itself, or by half of the smallest one: the offset's error
        # shows in elements that it leaves outside, the scale's in as many steps as there are.
        exact = 0.5 * step + 2.0**-11 * (np.abs(low) + 1.5 * (high - low)) + 2.0**-25 * 2**bits
        bounds.append(np.broadcast_to(1.001 * exact, group.shape))
    return np.concatenate(rounded, axis=-1), np.concatenate(bounds, axis=-1)


@given(
    st.sampled_from(BITS),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 13),
    st.integers(1, 16),
    st.floats(-3, 3),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
)
def test_token_ranges_are_those_of_numpy(
    bits: int,
    appended: list[int],
    features: int,
    group_size: int,
    magnitude: float,
    tile: int,
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    x = random.normal(size=(2, 3, sum(appended), features)) * 10**magnitude
    x = (x + x.std() * random.normal(size=features) * 3).astype(np.float32)  # features differ
    store = store_for(TokenIntegers(bits, group_size), features, torch.float32, CPU)
    for piece in torch.from_numpy(x).split(appended, dim=2):
        store.append(piece)
    found = read(store, tile).numpy()
    expected, bound = rounded_by_numpy(x, bits, group_size)
    assert np.array_equal(found, expected)
    assert bool((np.abs(found.astype(np.float64) - x) <= bound).all())


def test_elements_outside_their_range_are_clamped() -> None:
    x = torch.tensor([[[[-5.0, 9.0]]]])
    found = stored(StaticIntegers(8, 64, torch.tensor([[[-1.0, 1.0]]])), x)
    assert torch.allclose(found, torch.tensor([[[[-1.0, 1.0]]]]))
    # A scale is at most the largest of 8 bits, and a code the last of its width.
    found = stored(
        mixed_of([2, 0], step=torch.full((2,), 0.5)), torch.tensor([[[[1e9, 1.0], [-1e9, 2.0]]]])
    )
    most = 0.75 * LARGEST_SCALE
    assert found[0, 0].tolist() == [[most, 0.0], [-most, 0.0]]


def test_constant_latents_are_exact() -> None:
    x = torch.full((1, 1, 3, 5), 0.5)
    assert torch.equal(stored(TokenIntegers(2, 64), x), x)
    zeros = torch.zeros(1, 1, 3, 2)
    assert torch.equal(stored(mixed_of([4, 4], step=torch.full((2,), 0.1)), zeros), zeros)


@st.composite
def mixed_cases(draw: st.DrawFn) -> tuple[MixedWidths, Tensor]:
    """A quantizer with latents (2, 1, tokens, features)."""
    bits = sorted(draw(st.lists(st.integers(0, 8), min_size=1, max_size=40)), reverse=True)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    step, deviation, gain = torch.rand(3, len(bits), generator=generator)
    latents = 3 * torch.randn(2, 1, draw(st.integers(1, 20)), len(bits), generator=generator)
    return mixed_of(bits, step=step + 0.1, deviation=deviation + 0.5, gain=gain + 0.5), latents


def by_latent(quantizer: MixedWidths, latents: Tensor) -> Tensor:
    """By the quantiser of a coordinate, one after the other."""
    coded = quantizer.bits > 0
    whitened = latents[..., coded] / quantizer.deviation[coded]
    scale = scales_of(scale_codes(whitened.square().mean(dim=-1).sqrt()))
    columns = [
        quantized(latents[..., i] / scale, quantizer.step[i], int(bits)) * scale * quantizer.gain[i]
        if bits
        else torch.zeros_like(latents[..., i])
        for i, bits in enumerate(quantizer.bits)
    ]
    return torch.stack(columns, dim=-1)


@given(mixed_cases(), st.integers(1, 20), st.integers(1, 7))
def test_mixed_widths_are_the_quantisers_of_all_coordinates(
    drawn: tuple[MixedWidths, Tensor], piece: int, tile: int
) -> None:
    quantizer, latents = drawn
    store = MixedWidthStore(quantizer, torch.float32, CPU)
    for part in latents.split(piece, dim=2):
        store.append(part)
    starts = [start for start, _, _ in store.tiles(0, tile)]
    assert starts == list(range(0, latents.shape[2], tile))
    expected = by_latent(quantizer, latents)
    torch.testing.assert_close(read(store, tile), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(quantizer.reconstruct(latents), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", range(1, 9))
def test_latents_of_all_widths_fill_their_bits(bits: int) -> None:
    assert packed_bytes(8, bits) == bits
    assert packed_bytes(80, bits) == 10 * bits
    half = 2 ** (bits - 1)
    codes = torch.arange(-half, half).repeat(256 // (2 * half)) + 0.25
    latents = torch.stack([codes.roll(token) for token in range(3)]).view(1, 1, 3, 256)
    # Tokens hold every code, and are of scale 1.
    deviation = codes.square().mean().sqrt().expand(256)
    store = MixedWidthStore(mixed_of([bits] * 256, deviation=deviation), torch.float32, CPU)
    store.append(latents)
    torch.testing.assert_close(read(store), latents + 0.25)
    assert store.nbytes == 3 * (32 * bits + 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": torch.tensor([2, 4], dtype=torch.uint8)}, "must not increase, and be at most 8"),
        ({"bits": torch.tensor([9, 4], dtype=torch.uint8)}, "must not increase, and be at most 8"),
        ({"bits": torch.tensor([16, 4], dtype=torch.uint8)}, "must not increase, and be at most 8"),
        ({"bits": torch.tensor([4, 2])}, r"in torch.uint8, got \(2,\) in torch.int64"),
        ({"bits": torch.tensor([[4, 2]], dtype=torch.uint8)}, "must be .features,. in torch.uint8"),
        ({"bits": torch.tensor([], dtype=torch.uint8)}, "must be .features,. in torch.uint8"),
        ({"step": torch.zeros(2)}, "step of every latent must be positive"),
        ({"step": torch.ones(3)}, r"step of latents must be \(2,\) in float32, got \(3,\)"),
        ({"step": torch.ones(1, 2)}, r"step of latents must be \(2,\) in float32, got \(1, 2\)"),
        ({"step": torch.full((2,), torch.nan)}, "step of latents must be finite"),
        ({"deviation": -torch.ones(2)}, "deviation of every latent must be positive"),
        ({"gain": torch.ones(2).double()}, "gain of latents must be .* in torch.float64"),
        ({"gain": torch.full((2,), torch.nan)}, "gain of latents must be finite"),
        ({"gain": torch.full((2,), 1e9)}, "gain of latents must be finite, at most 1e.08"),
    ],
)
def test_impossible_mixed_widths_are_refused(changes: dict[str, Tensor], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(mixed_of([4, 2]), **changes)


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        ([4, 2], "in torch.float32, got .2,. in torch.int64"),
        ([4.0, 1.25], "must be multiples of 1/2"),
        ([4.0, torch.nan], "at most 8"),
        ([4.0, -0.5], "at most 8"),
        ([4.0, 4.5], "must not increase"),
    ],
)
def test_impossible_bits_of_a_trellis_are_refused(bits: list[float], message: str) -> None:
    ones = torch.ones(2)
    with pytest.raises(PlanError, match=message):
        TrellisCoded(torch.tensor(bits), ones, ones, ones)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (TokenIntegers, (5, 64), "bits must be one of 2, 3, 4, 8, got 5"),
        (TokenIntegers, (4, 0), "group_size must be >= 1, got 0"),
        (StaticIntegers, (4, 8, torch.ones(2)), "ranges must be .head groups"),
        (StaticIntegers, (4, 8, torch.tensor([[[1.0, 0.0]]])), "low before high"),
        (StaticIntegers, (4, 8, torch.full((1, 1, 2), torch.inf)), "ranges must be finite"),
        (StaticIntegers, (4, 8, torch.ones(1, 1, 2).half()), "float32 or float64, got torch"),
    ],
)
def test_impossible_integers_are_refused(
    kind: type[Integers], arguments: tuple, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        kind(*arguments)
