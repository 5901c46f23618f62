"""Keys and values in blocks whose order of elements only the attention layer knows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from manifoldkv.core.errors import ModelError
from manifoldkv.serve.engines.blocks import Blocks

BLOCKS, HEADS, SIZE, DIM = 5, 3, 16, 24


class Layer:
    """Writes a block's elements of a head in an order of its own, as vLLM's layers do."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.order = torch.randperm(2 * SIZE * DIM, generator=generator)
        self.impl = self

    def do_kv_cache_update(
        self, layer: Layer, keys: Tensor, values: Tensor, pages: Tensor, slots: Tensor
    ) -> None:
        assert layer is self
        for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
            block, place = divmod(slot, SIZE)
            inside = torch.empty(HEADS, 2 * SIZE * DIM, dtype=pages.dtype)
            inside[:, self.order] = pages[block].flatten(1)
            inside.view(HEADS, 2, SIZE, DIM)[:, 0, place] = key
            inside.view(HEADS, 2, SIZE, DIM)[:, 1, place] = value
            pages[block] = inside[:, self.order].view(HEADS, SIZE, 2 * DIM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_read_and_written_as_the_layers_write_them(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, blocks = Layer(1), [3, 0, 4]
    slots = (torch.tensor(blocks)[:, None] * SIZE + torch.arange(SIZE)).flatten()
    written = []
    expected = [torch.zeros(BLOCKS, HEADS, SIZE, 2 * DIM, dtype=dtype) for _ in range(2)]
    for pages in expected:
        keys, values = torch.randn(2, len(slots), HEADS, DIM).to(dtype)
        layer.do_kv_cache_update(layer, keys, values, pages, slots)
        written.append([x.transpose(0, 1).unsqueeze(0) for x in (keys, values)])
    own = [torch.zeros_like(pages) for pages in expected]
    found = Blocks([(layer, pages) for pages in expected]).read(blocks)
    Blocks([(layer, pages) for pages in own]).write(blocks, found)
    for pair, known in zip(found, written, strict=True):
        assert all(map(torch.equal, pair, known))
    assert all(map(torch.equal, own, expected))


def test_layers_of_different_shapes_are_refused() -> None:
    pages = [torch.zeros(BLOCKS, heads, SIZE, 2 * DIM) for heads in (HEADS, 1)]
    with pytest.raises(ModelError, match="reads equal layers on a CPU"):
        Blocks([(Layer(1), x) for x in pages])
