"""Keys and values in the blocks of vLLM's cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from manifoldkv.core.errors import ModelError

DIGIT = 256
"""Integers below it are exact in every dtype of a cache."""


class Blocks:
    """Blocks of all layers, (blocks, H_kv, size, 2 d) each.

    The order of the elements within a head of a block belongs to the attention kernel: on a CPU
    keys lie as its vector unit needs them. It is found by a block of numbers that the attention
    layer itself writes.

    Parameters
    ----------
    layers : sequence of (Any, Tensor)
        Attention layers of vLLM, in the order of the model, and their blocks.

    Raises
    ------
    ModelError
        If the layers have blocks of several shapes, or not on a CPU.
    """

    def __init__(self, layers: Sequence[tuple[Any, Tensor]]) -> None:
        layer, pages = layers[0]
        shapes = {tuple(blocks.shape) for _, blocks in layers}
        if len(shapes) > 1 or pages.device.type != "cpu":
            raise ModelError(
                f"the layers have blocks of {sorted(shapes)} on {pages.device.type}: the connector "
                "reads equal layers on a CPU"
            )
        self._blocks = [blocks for _, blocks in layers]
        self._numbers = _numbers(layer, pages)
        self._places = self._numbers.argsort()

    def read(self, blocks: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of all layers, (1, H_kv, n, d) each, of the tokens in blocks."""
        found = []
        for pages in self._blocks:
            heads, size, width = pages.shape[1:]
            inside = pages[torch.tensor(blocks)].flatten(2)[..., self._places]
            apart = inside.view(-1, heads, 2, size, width // 2).permute(2, 1, 0, 3, 4)
            keys, values = apart.flatten(2, 3).unsqueeze(1)  # (2, 1, H_kv, n, d)
            found.append((keys, values))
        return found

    def write(self, blocks: Sequence[int], layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Write keys and values of all layers, as `read` returns them, into blocks."""
        for pages, pair in zip(self._blocks, layers, strict=True):
            heads, size, _ = pages.shape[1:]
            apart = torch.stack(pair)[:, 0].unflatten(2, (-1, size))  # (2, H_kv, blocks, size, d)
            inside = apart.permute(2, 1, 0, 3, 4).reshape(len(blocks), heads, -1)
            pages[torch.tensor(blocks)] = inside[..., self._numbers].view(-1, *pages.shape[1:])


def _numbers(layer: Any, pages: Tensor) -> Tensor:
    """Return for each place within a head of a block the element there, counted over (2, size, d).

    The numbers are written digit by digit.
    """
    _, heads, size, width = pages.shape
    numbers = torch.arange(size * width).view(2, size, 1, width // 2)
    found = torch.zeros(size * width, dtype=torch.int64)
    for power in (1, DIGIT, DIGIT**2):
        digits = (numbers // power % DIGIT).to(pages.dtype)
        keys, values = digits.expand(-1, -1, heads, -1)
        block = torch.zeros_like(pages[:1])
        layer.impl.do_kv_cache_update(
            layer, keys.contiguous(), values.contiguous(), block, torch.arange(size)
        )
        found += block[0, 0].flatten().long() * power
    return found
