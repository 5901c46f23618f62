import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldkv import Quantization
from manifoldkv.cache.packed import (
    FeatureRangeStore,
    ResidualStore,
    StaticRangeStore,
    TokenRangeStore,
    group_ranges,
    pack,
    unpack,
)
from manifoldkv.cache.storage import Store

BITS = (8, 4, 3, 2)


@given(st.sampled_from(BITS), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_packing_loses_nothing_and_takes_the_bytes_it_says(
    bits: int, features: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (2, 3, features), generator=generator, dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape[-1] == Quantization(bits).code_bytes(features)
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


def latents_of(store: Store, size: int = 7) -> torch.Tensor:
    return torch.cat([tile for _, _, tile in store.tiles(0, size)], dim=2)


def random_latents(tokens: int = 40, features: int = 10) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(-1, 1, features)
    return torch.randn(2, 3, tokens, features, generator=generator) * spread + spread


@pytest.mark.parametrize("bits", BITS)
class TestErrorIsHalfAStep:
    def test_static_ranges(self, bits: int) -> None:
        x = random_latents()
        quantization = Quantization(bits, "static", group_size=4)
        ranges = group_ranges(x, 4, dims=(0, 2))  # (runs, groups, 2)
        store = StaticRangeStore(quantization, 10, torch.float32, ranges)
        store.append(x)
        step = (ranges[..., 1] - ranges[..., 0]) / (2**bits - 1)
        step = step.repeat_interleave(4, dim=-1)[..., :10].unsqueeze(1)  # (runs, 1, features)
        assert bool(((latents_of(store) - x).abs() <= 0.501 * step).all())

    def test_feature_ranges(self, bits: int) -> None:
        x = random_latents()
        store = FeatureRangeStore(Quantization(bits, "kivi", group_size=8), 10, torch.float32)
        store.append(x[:, :, :16])
        store.append(x[:, :, 16:])
        by_run = x.unflatten(2, (5, 8))
        step = (by_run.amax(3) - by_run.amin(3)) / (2**bits - 1)
        step = step.repeat_interleave(8, dim=2)
        rounding = 2**-10 * (step * 2**bits + x.abs().amax())
        assert bool(((latents_of(store, 19) - x).abs() <= 0.5 * step + rounding).all())


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
    store = TokenRangeStore(
        Quantization(bits, "token", group_size=group_size), features, torch.float32
    )
    for piece in torch.from_numpy(x).split(appended, dim=2):
        store.append(piece)
    found = latents_of(store, tile).numpy()
    expected, bound = rounded_by_numpy(x, bits, group_size)
    assert np.array_equal(found, expected)
    assert bool((np.abs(found.astype(np.float64) - x) <= bound).all())


def test_static_ranges_clamp() -> None:
    ranges = torch.tensor([[[-1.0, 1.0]]])
    store = StaticRangeStore(Quantization(8, "static"), 2, torch.float32, ranges)
    store.append(torch.tensor([[[[-5.0, 9.0]]]]))
    assert torch.allclose(latents_of(store), torch.tensor([[[[-1.0, 1.0]]]]))


def test_constant_latents_are_exact() -> None:
    store = TokenRangeStore(Quantization(2), 5, torch.float32)
    store.append(torch.full((1, 1, 3, 5), 0.5))
    assert torch.equal(latents_of(store), torch.full((1, 1, 3, 5), 0.5))


@pytest.mark.parametrize("unseen", [1, 4, 6, 9])
@pytest.mark.parametrize("pieces", [[20], [1] * 20, [3, 10, 7]])
def test_tokens_that_nobody_reads_widen_no_range(pieces: list[int], unseen: int) -> None:
    quantization = Quantization(4, "kivi", group_size=4, residual=3)
    x = random_latents(20, 3)
    large = x.clone()
    large[:, :, :unseen] *= 1000
    found, expected, widened = (
        ResidualStore(quantization, FeatureRangeStore(quantization, 3, torch.float32), of_them)
        for of_them in (unseen, unseen, 0)
    )
    for store, latents in ((found, large), (expected, x), (widened, large)):
        for piece in latents.split(pieces, dim=2):
            start = 0
            for count in store.pieces(piece.shape[2]):
                store.append(piece[:, :, start : start + count])
                start += count
    read, wanted, other = (latents_of(store)[:, :, unseen:] for store in (found, expected, widened))
    assert torch.equal(read, wanted)
    if unseen % 4:
        assert float((other - wanted).abs().max()) > 0.1
    else:  # whole runs are theirs
        assert torch.equal(other, wanted)


@given(st.lists(st.integers(1, 30), max_size=8), st.integers(1, 9), st.integers(0, 11))
def test_the_newest_tokens_stay_exact(appended: list[int], run: int, residual: int) -> None:
    quantization = Quantization(2, "kivi", group_size=run, residual=residual)
    store = ResidualStore(quantization, FeatureRangeStore(quantization, 3, torch.float32))
    x = random_latents(sum(appended) + 1, 3)
    tokens = 0
    for count in appended:
        for piece in store.pieces(count):
            store.append(x[:, :, tokens : tokens + piece])
            tokens += piece
            exact = quantization.exact_tokens(tokens)
            assert exact >= min(tokens, residual)
            assert exact < residual + run or tokens < residual + run
            newest = slice(tokens - exact, tokens)
            assert torch.equal(latents_of(store)[:, :, newest], x[:, :, newest])
    assert len(store) == tokens == sum(appended)


@given(st.integers(0, 40), st.integers(1, 60), st.integers(1, 9), st.integers(0, 11))
def test_within_a_piece_as_many_tokens_are_rounded_as_at_its_end(
    before: int, count: int, run: int, residual: int
) -> None:
    quantization = Quantization(2, "kivi", group_size=run, residual=residual)
    store = ResidualStore(quantization, TokenRangeStore(quantization, 3, torch.float32))
    store.append(random_latents(before + 1, 3)[:, :, :before])
    pieces = store.pieces(count)
    assert sum(pieces) == count
    tokens = before
    for piece in pieces:
        rounded = {n - quantization.exact_tokens(n) for n in range(tokens + 1, tokens + piece + 1)}
        assert len(rounded) == 1
        tokens += piece
