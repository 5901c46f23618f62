"""CQ: neighbouring channels in one codebook, learnt with Fisher's weights (2405.03917)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import DynamicCache

from manifoldkv.core.errors import ModelError
from manifoldkv.models.interface import AttentionSettings, attend, intercepted
from methods.base import Setting, register_method
from methods.grids import lloyd, nearest_word
from methods.windows import SINKS, WindowMethod, calibration_of, stacked

CODE_BITS = 8
"""Bits of a code, which is the index of a word of 2, 4 or 8 channels."""
SAMPLES, STEPS = 8192, 20
"""Calibration tokens that codebooks are learnt from, and steps of Lloyd's algorithm."""


@register_method("cq")
class CoupledQuantization(WindowMethod):
    """CQ: 2, 4 and 8 neighbouring channels in one codebook of 256 words, 4, 2 and 1 bits each.

    Zhang et al., arXiv:2405.03917. Keys are coded before rotation. The codebook of a group of
    channels is learnt by k-means on calibration tokens, each with the sum of the squares of the
    gradient of its text's loss in these channels as its weight. Differs from the paper: 4 sink
    tokens and the 128 newest are uncompressed, as in the other methods of this kind, where the
    paper codes all tokens; `SAMPLES` tokens, 20 steps from random tokens in place of 100 from
    k-means++.

    Raises
    ------
    ModelError
        If the number of features of a head is no multiple of the number of channels of a code.
    """

    def __init__(self, setting: Setting, ratio: float) -> None:
        super().__init__(setting, ratio)
        self.coupled = round(CODE_BITS / (16 * ratio))
        if setting.head_dim % self.coupled:
            raise ModelError(
                f"CQ codes {self.coupled} channels of a head at once, and the heads of this model "
                f"have {setting.head_dim} features"
            )

    @classmethod
    def ratios(cls, requested: Sequence[float]) -> Sequence[float]:
        return [bits / 16 for bits in (4, 2, 1)]

    def coded_bytes(self, tokens: int) -> int:
        return 2 * tokens * self.setting.layers * self.setting.features // self.coupled

    def facts(self) -> dict[str, float]:
        return super().facts() | {"basis_bytes": 2 * sum(x.numel() for x in self.codebooks)}

    @cached_property
    def codebooks(self) -> tuple[Tensor, Tensor]:
        """The codebooks of keys and of values, (layers, F / coupled, 256, coupled)."""
        generator = torch.Generator().manual_seed(self.setting.seed)
        books = []
        for x, gradients in samples_of(self.setting):
            layers = zip(
                tqdm(x, desc="codebooks", disable=None, leave=False), gradients, strict=True
            )
            books.append(torch.stack([self._learnt(*layer, generator) for layer in layers]))
        return books[0], books[1]

    def _learnt(self, x: Tensor, gradients: Tensor, generator: torch.Generator) -> Tensor:
        """Return the codebooks of a layer (groups, 256, coupled) from samples (tokens, F)."""
        points = self._groups(x)
        weights = self._groups(gradients).square().sum(dim=2)
        shuffled = torch.randperm(len(x), generator=generator).to(x.device)
        words = points[:, shuffled[torch.arange(1 << CODE_BITS) % len(x)]]
        return lloyd(points, weights, words, STEPS)

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        of_keys, of_values = self.codebooks
        return self._of_site(keys, of_keys), self._of_site(values, of_values)

    def _of_site(self, x: Tensor, codebooks: Tensor) -> Tensor:
        held = []
        for layer, words in zip(x, codebooks, strict=True):
            codes = nearest_word(self._groups(layer.flatten(0, 1).float()), words)
            chosen = words.gather(1, codes.unsqueeze(2).expand(-1, -1, self.coupled))
            held.append(chosen.transpose(0, 1).reshape(layer.shape))
        return torch.stack(held).to(x.dtype)

    def _groups(self, x: Tensor) -> Tensor:
        """Return neighbouring channels of x (tokens, F), (groups, tokens, coupled)."""
        return x.unflatten(1, (-1, self.coupled)).transpose(0, 1)


@lru_cache(maxsize=1)
def samples_of(setting: Setting) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return keys before rotation and values of calibration tokens, and their gradients.

    All are (layers, tokens, F), float32.
    """
    gradients = [gradients_of(setting, ids) for ids in setting.calibration.split(1)]
    sites = []
    for x, *parts in zip(calibration_of(setting), *gradients, strict=True):
        both = (x.flatten(1, 2), torch.cat(parts, dim=1)[:, :, SINKS:].flatten(1, 2))
        step = max(1, both[0].shape[1] // SAMPLES)
        sites.append((both[0][:, ::step].float(), both[1][:, ::step].float()))
    return sites[0], sites[1]


def gradients_of(setting: Setting, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of a text's loss in keys before rotation and values, as `stacked`."""
    sites: list[tuple[Tensor, Tensor]] = []

    def record(
        module: nn.Module,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        arguments: dict[str, Any],
    ) -> Tensor:
        sites.append((keys, values))
        settings = AttentionSettings.from_arguments(module, arguments)
        return attend(queries, keys, values, mask, settings).transpose(1, 2)

    model = setting.model
    with torch.enable_grad(), intercepted(model.config):
        inputs = model.get_input_embeddings()(ids).detach().requires_grad_()
        logits = model(inputs_embeds=inputs, use_cache=False, manifoldkv_attend=record).logits
        loss = cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum")
        found = torch.autograd.grad(loss, [x for pair in sites for x in pair])
    cache = DynamicCache(config=model.config)
    for layer, pair in enumerate(zip(found[::2], found[1::2], strict=True)):
        cache.update(*pair, layer)
    return stacked(model, cache, 0)
