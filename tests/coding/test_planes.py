"""Integers of mixed widths in planes of bits."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldkv.plan.formats.mixed import MixedWidths
from manifoldkv.plan.formats.planes import BitPlanes

CPU = torch.device("cpu")
WIDTHS = st.lists(st.integers(1, 8), max_size=40)


def drawn(widths: list[int], seed: int) -> torch.Tensor:
    """Integers of these widths, (2, 3, count, 5), the largest ones among them."""
    generator = torch.Generator().manual_seed(seed)
    largest = torch.tensor([2**width - 1 for width in widths], dtype=torch.uint8).view(-1, 1)
    found = torch.rand(2, 3, len(widths), 5, generator=generator) * (largest + 1.0)
    return found.to(torch.uint8).minimum(largest)


@given(WIDTHS, st.integers(0, 99))
def test_what_is_packed_comes_back(widths: list[int], seed: int) -> None:
    planes, integers = BitPlanes(widths, CPU), drawn(widths, seed)
    found = torch.full_like(integers, 255)
    planes.unpack(planes.pack(integers), found)
    assert torch.equal(found, integers)


@given(WIDTHS)
def test_mixed_widths_count_the_packed_bytes(widths: list[int]) -> None:
    widths = sorted(widths, reverse=True)
    packed = BitPlanes(widths, CPU).pack(drawn(widths, 0))
    ones = torch.ones(len(widths) + 1)
    quantizer = MixedWidths(torch.tensor([*widths, 0], dtype=torch.uint8), ones, ones, ones)
    scale = 1  # byte
    assert quantizer.nbytes(5, len(ones), 2) == 5 * (scale + (packed.shape[2] if widths else 0))


def test_tokens_side_by_side_do_not_mix() -> None:
    """A cache is cropped and grows token by token."""
    widths = [8, 7, 5, 3, 3, 2, 1]
    planes, integers = BitPlanes(widths, CPU), drawn(widths, 0)
    alone = [planes.pack(integers[..., token : token + 1]) for token in range(5)]
    assert torch.equal(torch.cat(alone, dim=-1), planes.pack(integers))


@given(WIDTHS)
def test_fields_say_where_bits_are(widths: list[int]) -> None:
    planes, integers = BitPlanes(widths, CPU), drawn(widths, 0)
    packed, found = planes.pack(integers), torch.zeros_like(integers)
    for index, fields in enumerate(planes.fields().tolist()):
        for row, right, mask, left in fields:
            if mask:
                found[:, :, index] |= (packed[:, :, row] >> right & mask) << left
    assert torch.equal(found, integers)
