"""Caches that hold the first and the newest tokens uncompressed, and code all others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

from manifoldkv.core.errors import ArgumentError
from manifoldkv.evaluate import Perplexity
from manifoldkv.evaluate.retrieval import Prompts
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.interface import AttentionSettings, attend, intercepted
from manifoldkv.models.rotary import Angles, rotation_of_keys
from methods.base import Baseline, Setting

SINKS, RECENT = 4, 128
"""First and newest tokens that AQUA-KV, KVTC and AATC hold uncompressed."""


class WindowMethod(Baseline):
    """First and newest tokens in 16 bits, all others reconstructed from codes.

    Every token of a text attends to the uncompressed keys and values of the first `sinks` tokens
    and of the `recent` newest ones, itself among them, and to reconstructions of all others, as in
    decoding token by token. A prompt is compressed once, after it was read. Simulated: memory holds
    reconstructions, and the bytes are those of the codes.
    """

    sinks: ClassVar[int] = SINKS
    recent: ClassVar[int] = RECENT

    @abstractmethod
    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values from their codes, (layers, B, n, F), keys before rotation."""

    @abstractmethod
    def coded_bytes(self, tokens: int) -> int:
        """Return the bytes of the codes of tokens that are not held in 16 bits."""

    def adapt(self, keys: Tensor, values: Tensor) -> None:
        """Fit the codes to a text, if they are fitted to each; arguments as of `reconstruct`."""

    adapts: ClassVar[bool] = False
    """Whether `adapt` does anything."""

    def exact_bytes(self, tokens: int) -> int:
        """Return the bytes of the tokens that are held in 16 bits."""
        return self.setting.stock_bytes(min(tokens, self.sinks + self.recent))

    def nbytes(self, tokens: int) -> int:
        coded = max(0, tokens - self.sinks - self.recent)
        return self.exact_bytes(tokens) + (self.coded_bytes(coded) if coded else 0)

    def budget(self) -> tuple[int, int]:
        """Return tokens to code and the bytes that the ratio leaves for them.

        Raises
        ------
        ArgumentError
            If there are none.
        """
        window = self.setting.window
        tokens = window - self.sinks - self.recent
        left = int(self.ratio * self.setting.stock_bytes(window)) - self.exact_bytes(window)
        if tokens < 1 or left < 1:
            raise ArgumentError(
                f"{self.sinks + self.recent} of {window} tokens in 16 bits leave nothing of ratio "
                f"{self.ratio:g}: ask for a larger ratio or a longer window"
            )
        return tokens, left

    def facts(self) -> dict[str, float]:
        return super().facts() | {"exact_bytes": self.exact_bytes(self.setting.window)}

    @torch.no_grad()
    def perplexity(self, tokens: Tensor) -> Perplexity:
        losses = []
        for text in tqdm(tokens.to(self.setting.model.device).split(1), disable=None, leave=False):
            if self.adapts:
                self.adapt(*uncompressed(self.setting.model, text))
            reading = Reading(self)
            logits = torch.cat([reading.read(part) for part in text.split(self.recent, 1)], dim=1)
            losses.append(cross_entropy(logits[0, :-1].float(), text[0, 1:]).item())
        return Perplexity(tuple(losses), tokens.shape[0] * (tokens.shape[1] - 1))

    @contextmanager
    def holder(self, model: PreTrainedModel, prompts: Prompts) -> Iterator[Callable[[], Cache]]:
        layers = prompts.stock.layers
        keys, values = stacked(model, prompts.stock, 0)
        self.adapt(keys, values)
        coded = heads(model, *self.reconstruct(keys, values), 0)
        slots = torch.arange(keys.shape[2]).to(keys.device)
        old = (slots >= self.sinks) & (slots < len(slots) - self.recent)

        def filled() -> Cache:
            cache = DynamicCache(config=model.config)
            for index, (layer, *mine) in enumerate(zip(layers, *coded, strict=True)):
                exact = (layer.keys, layer.values)
                mixed = [
                    torch.where(old.view(-1, 1), a, b) for a, b in zip(mine, exact, strict=True)
                ]
                cache.update(*mixed, index)
            return cache

        yield filled


class Reading:
    """A text that is read in parts of at most `recent` tokens.

    Tokens are coded when their part was read by all layers, so that codes may depend on all of
    them.
    """

    def __init__(self, method: WindowMethod) -> None:
        self._method = method
        self._model = method.setting.model
        self._cache = DynamicCache(config=self._model.config)
        self._coded: tuple[Tensor, Tensor] | None = None  # (layers, B, H_kv, n, d), keys rotated

    def read(self, ids: Tensor) -> Tensor:
        """Return the logits of further tokens (1, m), (1, m, vocabulary)."""
        start = self._cache.get_seq_length()
        with intercepted(self._model.config):
            logits = self._model(
                input_ids=ids, past_key_values=self._cache, manifoldkv_attend=self._attend
            ).logits
        coded = self._method.reconstruct(*stacked(self._model, self._cache, start))
        new = heads(self._model, *coded, start)
        before = self._coded or tuple(x[..., :0, :] for x in new)
        both = zip(before, new, strict=True)
        self._coded = tuple(torch.cat(pair, dim=-2) for pair in both)  # type: ignore[assignment]
        return logits

    def _attend(
        self,
        module: nn.Module,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        arguments: dict[str, Any],
    ) -> Tensor:
        """Return attention over uncompressed tokens, and over the codes of all others."""
        settings = AttentionSettings.from_arguments(module, arguments)
        if self._coded is not None:
            old_keys, old_values = (x[module.layer_idx] for x in self._coded)  # type: ignore[index]
            slots = torch.arange(keys.shape[2], device=keys.device)
            newest = slots[-queries.shape[2] :].unsqueeze(1) - self._method.recent
            coded = mask & (slots >= self._method.sinks) & (slots <= newest)
            mask = torch.cat([mask & ~coded, coded[..., : old_keys.shape[2]]], dim=-1)
            keys, values = torch.cat([keys, old_keys], 2), torch.cat([values, old_values], 2)
        return attend(queries, keys, values, mask, settings).transpose(1, 2)


def stacked(model: PreTrainedModel, cache: Cache, start: int) -> tuple[Tensor, Tensor]:
    """Return keys before rotation and values of tokens from a slot on, (layers, B, n, F)."""
    keys, values = (
        torch.stack([getattr(layer, site)[..., start:, :] for layer in cache.layers])
        for site in ("keys", "values")
    )
    angles = angles_of(model, start, keys).inverse()
    unrotated = angles.tile(keys.flatten(0, 1), 0, keys.shape[-2]).view_as(keys)
    return unrotated.transpose(2, 3).flatten(3), values.transpose(2, 3).flatten(3)


def heads(
    model: PreTrainedModel, keys: Tensor, values: Tensor, start: int
) -> tuple[Tensor, Tensor]:
    """Return rotated keys and values (layers, B, H_kv, n, d) from those of `stacked`."""
    size = Decoder.of(model).head_dim
    keys, values = (x.unflatten(3, (-1, size)).transpose(2, 3) for x in (keys, values))
    angles = angles_of(model, start, keys)
    return angles.tile(keys.flatten(0, 1), 0, keys.shape[-2]).view_as(keys), values


def angles_of(model: PreTrainedModel, start: int, keys: Tensor) -> Angles:
    """Return the angles of the tokens of keys (..., n, d) from a slot on; layers have the same."""
    decoder = Decoder.of(model)
    positions = torch.arange(start, start + keys.shape[-2], device=keys.device).unsqueeze(0)
    cos, sin = decoder.angles(0, positions, keys)
    return Angles(cos, sin, rotation_of_keys(decoder.layers[0], cos.shape[-1]))


@torch.no_grad()
def uncompressed(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys before rotation and values of a text (B, n), (layers, B, n, F)."""
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    return stacked(model, cache, 0)


@lru_cache(maxsize=1)
def calibration_of(setting: Setting) -> tuple[Tensor, Tensor]:
    """Return keys before rotation and values of the calibration text without its sink tokens.

    Shapes are (layers, sequences, tokens, F).
    """
    parts = [uncompressed(setting.model, ids) for ids in setting.calibration.split(1)]
    keys, values = (torch.cat(site, dim=1)[:, :, SINKS:] for site in zip(*parts, strict=True))
    return keys, values
