"""Latents of mixed widths: what is read is what a quantiser in floating point gives."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manifoldkv.basis import Basis, HeadGrouping
from manifoldkv.cache.mixed import MixedWidthStore
from manifoldkv.coding.allocation import quantized
from manifoldkv.coding.integers import packed_bytes
from manifoldkv.coding.mixed import Coding, reconstructed
from manifoldkv.errors import PlanError

CPU = torch.device("cpu")


def coding_of(bits: list[int], **tensors: Tensor) -> Coding:
    """Steps, deviations and gains of 1 and no mean, where there are no others."""
    fields = {name: torch.ones(len(bits)) for name in ("step", "deviation", "gain")}
    fields["mean"] = torch.zeros(len(bits))
    return Coding(torch.tensor(bits, dtype=torch.uint8), **fields | tensors)


@st.composite
def codings(draw: st.DrawFn) -> tuple[Coding, Tensor]:
    """A coding with latents (2, 1, tokens, features)."""
    bits = sorted(draw(st.lists(st.integers(0, 8), min_size=1, max_size=40)), reverse=True)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    step, deviation, gain = torch.rand(3, len(bits), generator=generator)
    latents = 3 * torch.randn(2, 1, draw(st.integers(1, 20)), len(bits), generator=generator)
    coding = coding_of(bits, step=step + 0.1, deviation=deviation + 0.5, gain=gain + 0.5)
    return coding, latents


def stored(coding: Coding, latents: Tensor) -> Tensor:
    """By the quantiser of a coordinate, one after the other."""
    coded = coding.bits > 0
    whitened = latents[..., coded] / coding.deviation[coded]
    scale = whitened.square().mean(dim=-1).sqrt().half().float()
    columns = [
        quantized(latents[..., i] / scale, coding.step[i], int(bits)) * scale * coding.gain[i]
        if bits
        else torch.zeros_like(latents[..., i])
        for i, bits in enumerate(coding.bits)
    ]
    return torch.stack(columns, dim=-1)


@given(codings(), st.integers(1, 20), st.integers(1, 7))
def test_it_is_the_quantisers_of_all_coordinates(
    drawn: tuple[Coding, Tensor], piece: int, tile: int
) -> None:
    coding, latents = drawn
    store = MixedWidthStore(coding, torch.float32, CPU)
    for part in latents.split(piece, dim=2):
        store.append(part)
    tiles = list(store.tiles(0, tile))
    assert [start for start, _, _ in tiles] == list(range(0, latents.shape[2], tile))
    found = torch.cat([tile for _, _, tile in tiles], dim=2)
    assert found.shape == latents.shape
    torch.testing.assert_close(found, stored(coding, latents), rtol=1e-5, atol=1e-6)
    assert store.nbytes == 2 * latents.shape[2] * coding.token_bytes


@given(codings(), st.booleans(), st.integers(0, 2**32 - 1))
def test_a_reconstruction_is_what_the_store_gives(
    drawn: tuple[Coding, Tensor], predicted: bool, seed: int
) -> None:
    coding, latents = drawn
    tokens, columns = latents.shape[0] * latents.shape[2], len(coding.bits)
    size = columns + 3
    generator = torch.Generator().manual_seed(seed)
    down, up = (torch.randn(1, size, columns, generator=generator) for _ in range(2))
    x, inputs = (torch.randn(tokens, n, generator=generator) for n in (size, 5))
    prediction = torch.randn(5, size, generator=generator) if predicted else None
    mean = torch.randn(size, generator=generator)
    coding = replace(coding, mean=mean, prediction=prediction)
    basis = Basis(down, up, HeadGrouping("all", 1))
    found = reconstructed(basis, coding, x, inputs if predicted else None)
    expected = mean if prediction is None else mean + inputs @ prediction
    store = MixedWidthStore(coding, torch.float32, CPU)
    given_latents = (x - expected) @ down[0]
    store.append(given_latents[None, None])
    ((_, _, held),) = store.tiles(0, tokens)
    torch.testing.assert_close(found, held[0, 0] @ up[0].T + expected, rtol=1e-4, atol=1e-4)
    by_hand = stored(coding, given_latents) @ up[0].T + expected
    torch.testing.assert_close(found, by_hand, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", range(1, 9))
def test_latents_of_all_widths_fill_their_bits(bits: int) -> None:
    assert packed_bytes(8, bits) == bits
    assert packed_bytes(80, bits) == 10 * bits
    half = 2 ** (bits - 1)
    codes = torch.arange(-half, half).repeat(256 // (2 * half)) + 0.25
    latents = torch.stack([codes.roll(token) for token in range(3)]).view(1, 1, 3, 256)
    # Tokens hold every code, and are of scale 1.
    deviation = codes.square().mean().sqrt().expand(256)
    store = MixedWidthStore(coding_of([bits] * 256, deviation=deviation), torch.float32, CPU)
    store.append(latents)
    ((_, _, found),) = store.tiles(0, 8)
    torch.testing.assert_close(found, latents + 0.25)
    assert store.nbytes == 3 * (32 * bits + 2)


def test_what_is_no_number_of_a_coordinate_is_clamped() -> None:
    """A scale is at most the largest number of float16, and a code the last of its coordinate."""
    coding = coding_of([2, 0], step=torch.full((2,), 0.5))
    store = MixedWidthStore(coding, torch.float32, CPU)
    store.append(torch.tensor([[[[1e9, 1.0], [-1e9, 2.0]]]]))
    ((_, _, found),) = store.tiles(0, 8)
    most = 0.75 * torch.finfo(torch.float16).max
    assert found[0, 0].tolist() == [[most, 0.0], [-most, 0.0]]


def test_a_token_of_zeros_keeps_its_place() -> None:
    store = MixedWidthStore(coding_of([4, 4], step=torch.full((2,), 0.1)), torch.float32, CPU)
    store.append(torch.zeros(1, 1, 3, 2))
    ((_, _, found),) = store.tiles(0, 8)
    assert len(store) == 3
    assert (found == 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": torch.tensor([2, 4], dtype=torch.uint8)}, "must not increase, and be at most 8"),
        ({"bits": torch.tensor([9, 4], dtype=torch.uint8)}, "must not increase, and be at most 8"),
        ({"bits": torch.tensor([16, 4], dtype=torch.uint8)}, "must not increase, and be at most 8"),
        ({"bits": torch.tensor([4, 2])}, r"in uint8, got \(2,\) in torch.int64"),
        ({"bits": torch.tensor([[4, 2]], dtype=torch.uint8)}, "must be .features,. in uint8"),
        ({"bits": torch.tensor([], dtype=torch.uint8)}, "must be .features,. in uint8"),
        ({"step": torch.zeros(2)}, "the step of every latent must be positive"),
        ({"step": torch.ones(3)}, r"step of latents must be \(2,\) in float32, got \(3,\)"),
        ({"step": torch.ones(1, 2)}, r"step of latents must be \(2,\) in float32, got \(1, 2\)"),
        ({"step": torch.full((2,), torch.nan)}, "step of latents must be finite"),
        ({"mean": torch.ones(1, 8)}, r"mean of latents must be \(8,\) in float32"),
        ({"mean": torch.full((2,), torch.inf)}, "mean of latents must be finite"),
        ({"deviation": -torch.ones(2)}, "the deviation of every latent must be positive"),
        ({"gain": torch.ones(2).double()}, "gain of latents must be .* in torch.float64"),
        ({"gain": torch.full((2,), torch.nan)}, "gain of latents must be finite"),
        ({"prediction": torch.ones(4, 3)}, r"prediction of latents must be \(4, 2\) in float32"),
        ({"prediction": torch.full((4, 2), torch.nan)}, "prediction of latents must be finite"),
    ],
)
def test_codings_that_are_none(changes: dict[str, Tensor], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(coding_of([4, 2]), **changes)
