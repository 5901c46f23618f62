"""Latents of mixed widths: what is given back is what a quantiser in floating point gives."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manifoldkv import PlanError
from manifoldkv.basis import Basis, HeadGrouping
from manifoldkv.cache.mixed import MixedWidthStore
from manifoldkv.plan.coded import CodedBasis
from manifoldkv.plan.coding import Coding
from manifoldkv.plan.quantization import packed_bytes
from manifoldkv.ranks.bits import quantized

CPU = torch.device("cpu")


@st.composite
def codings(draw: st.DrawFn) -> tuple[Coding, Tensor]:
    """A coding of two head groups with its latents (2, 2, tokens, features)."""
    widths = st.integers(0, 8) | st.just(16)
    bits = sorted(draw(st.lists(widths, min_size=1, max_size=40)), reverse=True)
    if not any(bits):
        bits[0] = 1
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    step = torch.rand(2, len(bits), generator=generator) + 0.1
    deviation = None
    if draw(st.booleans()):
        deviation = torch.rand(2, len(bits), generator=generator) + 0.5
    gain = torch.rand(2, len(bits), generator=generator) + 0.5 if draw(st.booleans()) else None
    tokens = draw(st.integers(1, 20))
    latents = 3 * torch.randn(2, 2, tokens, len(bits), generator=generator)
    coding = Coding(torch.tensor(bits, dtype=torch.uint8), step, deviation=deviation, gain=gain)
    return coding, latents


def given_back(coding: Coding, latents: Tensor) -> Tensor:
    """By the quantiser of a coordinate, one after the other."""
    norm = torch.ones(*latents.shape[:3], 1)
    if coding.deviation is not None:
        coded = (coding.bits > 0) & (coding.bits <= 8)
        whitened = latents[..., coded] / coding.deviation[:, None, coded]
        norm = whitened.square().mean(dim=-1, keepdim=True).sqrt().half().float()
    columns = [
        quantized(latents[..., i] / norm[..., 0], coding.step[:, i, None], int(bits)) * norm[..., 0]
        if 0 < bits <= 8
        else torch.zeros_like(latents[..., i])
        for i, bits in enumerate(coding.bits)
    ]
    found = torch.stack(columns, dim=-1)
    found = found if coding.gain is None else found * coding.gain.unsqueeze(1)
    return torch.where(coding.bits == 16, latents, found)


@given(codings(), st.integers(1, 20), st.integers(1, 7))
def test_it_is_the_quantisers_of_all_coordinates(
    given_coding: tuple[Coding, Tensor], piece: int, tile: int
) -> None:
    coding, latents = given_coding
    store = MixedWidthStore(coding, torch.float32, CPU)
    for part in latents.split(piece, dim=2):
        store.append(part)
    tiles = list(store.tiles(0, tile))
    assert [start for start, _, _ in tiles] == list(range(0, latents.shape[2], tile))
    found = torch.cat([tile for _, _, tile in tiles], dim=2)
    assert found.shape == latents.shape
    torch.testing.assert_close(found, given_back(coding, latents), rtol=1e-5, atol=1e-6)
    assert store.nbytes == 2 * 2 * latents.shape[2] * coding.token_bytes(torch.float32)


@given(codings(), st.integers(0, 2**32 - 1))
def test_attention_sees_what_the_cache_gives_back(
    given_coding: tuple[Coding, Tensor], seed: int
) -> None:
    coding, latents = given_coding
    size, columns = len(coding.bits) + 3, len(coding.bits)
    generator = torch.Generator().manual_seed(seed)
    down, up = (torch.randn(1, size, columns, generator=generator) for _ in range(2))
    grouping = HeadGrouping("shared", 2)
    x = torch.randn(2, 2, latents.shape[2], size, generator=generator)
    coding = replace(coding, mean=torch.randn(2, size, generator=generator))
    found = CodedBasis(Basis(down, up, grouping), coding).project(x)
    mean = coding.mean.unsqueeze(1)
    expected = given_back(coding, (x - mean) @ down) @ up.mT + mean
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_gradients_pass_rounding_within_the_range_and_no_further() -> None:
    """Against the derivatives of what is given back, of which every code is held."""
    identity = torch.eye(2).unsqueeze(0)
    step = torch.tensor([[0.5, 0.5]], requires_grad=True)
    gain = torch.tensor([[1.0, 2.0]], requires_grad=True)
    coding = Coding(torch.tensor([2, 2], dtype=torch.uint8), step, gain=gain)
    x = torch.tensor([[[[0.3, 5.0]]]], requires_grad=True)
    found = CodedBasis(Basis(identity, identity, HeadGrouping("all", 1)), coding).project(x)
    assert found.tolist() == [[[[0.25, 1.5]]]]
    found.sum().backward()
    assert x.grad is not None
    assert step.grad is not None
    assert gain.grad is not None
    assert x.grad.tolist() == [[[[1.0, 0.0]]]]
    # Code 0 stands for half a step and lies at 0.6 of one; code 1 is the last.
    assert step.grad.tolist() == [[pytest.approx(0.5 - 0.6), 2 * 1.5]]
    assert gain.grad.tolist() == [[0.25, 0.75]]


@pytest.mark.parametrize("bits", range(1, 9))
def test_latents_of_all_widths_fill_their_bits(bits: int) -> None:
    assert packed_bytes(8, bits) == bits
    assert packed_bytes(80, bits) == 10 * bits
    coding = Coding(torch.full((16,), bits, dtype=torch.uint8), torch.ones(1, 16))
    store = MixedWidthStore(coding, torch.float32, CPU)
    half = 2 ** (bits - 1)
    codes = torch.arange(-half, half).repeat(16 * 16)[: 16 * 2**bits].float()
    latents = codes.view(1, 1, -1, 16) + 0.25
    store.append(latents)
    ((_, _, found),) = store.tiles(0, 10**6)
    torch.testing.assert_close(found, latents + 0.25)
    assert store.nbytes == latents.shape[2] * 2 * bits


def test_what_is_no_number_of_a_coordinate_is_clamped() -> None:
    coding = Coding(torch.tensor([2, 0], dtype=torch.uint8), torch.full((1, 2), 0.5))
    store = MixedWidthStore(coding, torch.float32, CPU)
    store.append(torch.tensor([[[[1e9, 1.0], [-1e9, 2.0]]]]))
    ((_, _, found),) = store.tiles(0, 8)
    assert found[0, 0].tolist() == [[0.75, 0.0], [-0.75, 0.0]]


def test_a_token_of_zeros_keeps_its_place() -> None:
    coding = Coding(
        torch.tensor([4, 4], dtype=torch.uint8), torch.full((1, 2), 0.1), None, torch.ones(1, 2)
    )
    store = MixedWidthStore(coding, torch.float32, CPU)
    store.append(torch.zeros(1, 1, 3, 2))
    ((_, _, found),) = store.tiles(0, 8)
    assert (found == 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": torch.tensor([2, 4], dtype=torch.uint8)}, "fall: 16, or at most 8"),
        ({"bits": torch.tensor([9, 4], dtype=torch.uint8)}, "fall: 16, or at most 8"),
        ({"bits": torch.tensor([17, 4], dtype=torch.uint8)}, "fall: 16, or at most 8"),
        ({"bits": torch.tensor([4, 2])}, "in uint8"),
        ({"step": torch.zeros(1, 2)}, "a step of a quantiser is not positive"),
        ({"step": torch.ones(1, 3)}, "steps of latents are"),
        ({"step": torch.full((1, 2), torch.nan)}, "not all finite"),
        ({"mean": torch.ones(2, 8)}, "means of latents are"),
        ({"deviation": -torch.ones(1, 2)}, "a deviation of a latent is not positive"),
    ],
)
def test_codings_that_are_none(changes: dict[str, Tensor], message: str) -> None:
    fields = {"bits": torch.tensor([4, 2], dtype=torch.uint8), "step": torch.ones(1, 2)}
    with pytest.raises(PlanError, match=message):
        Coding(**fields | changes)
