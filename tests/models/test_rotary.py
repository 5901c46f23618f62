"""Pairs of rotated features, and the bands of frequencies that they fall into."""

import pytest
import torch

from manifoldkv.coding.candidates import blocks_of
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.interface import rotation_of
from manifoldkv.models.rotation import Rotation
from tests.families import FAMILIES, MORE_FAMILIES, tiny_model

TOKENS, HEADS = 7, 2


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_pairs_are_those_that_the_model_rotates(family: str) -> None:
    decoder = Decoder.of(tiny_model(family))
    rotate, size = rotation_of(decoder.layers[0]), decoder.head_dim
    x = torch.randn(1, HEADS, TOKENS, size, generator=torch.Generator().manual_seed(0)).double()
    cos, sin = decoder.angles(0, torch.arange(TOKENS)[None], x)
    found = Rotation.of(rotate, size, cos.shape[-1])
    assert found is not None
    partner, sign = found.partner, found.sign
    zeros, ones = torch.zeros_like(cos), torch.ones_like(x[:, :1])
    of_feature = rotate(ones, cos, zeros)  # 1 where nothing is rotated
    crossed = rotate(ones, zeros, sin) * (sign != 0)  # with the sign
    torch.testing.assert_close(
        rotate(x, cos, sin), x * of_feature + x[..., partner] * crossed, atol=1e-6, rtol=0
    )
    angle = sign * crossed[0, 0]
    assert (angle[1:, sign != 0] != 0).all()
    assert int((sign != 0).sum()) == decoder.rotary_dim
    # One frequency, one angle; a feature without one is with one other at the end.
    frequencies = torch.tensor(decoder.frequencies())
    for one in frequencies.unique():
        features = (frequencies == one).nonzero().flatten()
        assert len(features) == 2
        alike = torch.stack([of_feature[0, 0, :, features], angle[:, features]])
        assert torch.equal(alike[..., 0], alike[..., 1])
        rotated = sign[features] != 0
        assert rotated.all() or (not rotated.any() and one >= decoder.rotary_dim // 2)
        assert not rotated.all() or set(partner[features].tolist()) == set(features.tolist())
    if family == "phi3-partial":
        assert decoder.rotary_dim < size
    check_blocks(decoder.frequencies())


def check_blocks(frequencies: list[int]) -> None:
    """Every feature is in one block, with all of its band in all heads."""
    assert blocks_of(frequencies, HEADS, None) == ()
    count = max(frequencies) + 1
    assert blocks_of(frequencies, HEADS, count) == ()
    for band in range(1, count):
        blocks = blocks_of(frequencies, HEADS, band)
        assert len(blocks) == -(-count // band)
        assert torch.cat(blocks).sort().values.tolist() == list(range(HEADS * len(frequencies)))
        for index, block in enumerate(blocks):
            assert {frequencies[one % len(frequencies)] // band for one in block.tolist()} == {
                index
            }


def test_rotations_of_other_kinds_are_refused() -> None:
    for rotate in (
        lambda x, cos, sin: x @ torch.ones(4, 4),  # of all features
        lambda x, cos, sin: x * cos,  # of none
        lambda x, cos, sin: x[..., :3] * cos,  # of a part that is cut out before
    ):
        assert Rotation.of(rotate, 4, 4) is None
