"""Caches that drop tokens."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from manifoldkv.evaluate import Perplexity
from manifoldkv.evaluate.retrieval import Prompts
from methods.base import Baseline, losses, register_method

SINKS = 4
"""First tokens that StreamingLLM keeps (Xiao et al., 2024)."""
OBSERVED, POOLED = 32, 5
"""Last tokens of a prompt whose attention decides, and positions over which it is averaged (SnapKV,
Li et al., 2024)."""


class DroppingMethod(Baseline):
    """The same number of tokens in every head, uncompressed; the others are dropped."""

    least: ClassVar[int]
    """Tokens kept at any ratio."""

    def kept_tokens(self, tokens: int) -> int:
        """Return the number of tokens that are kept of a prompt."""
        return min(tokens, max(self.least, int(self.ratio * tokens)))

    def nbytes(self, tokens: int) -> int:
        return self.setting.stock_bytes(self.kept_tokens(tokens))

    @contextmanager
    def holder(self, model: PreTrainedModel, prompts: Prompts) -> Iterator[Callable[[], Cache]]:
        layers = []
        for layer, indices in zip(prompts.stock.layers, self.indices(model, prompts), strict=True):
            texts, heads, _, features = layer.keys.shape
            kept = indices.to(layer.keys.device).unsqueeze(-1).expand(texts, heads, -1, features)
            layers.append((layer.keys.gather(2, kept), layer.values.gather(2, kept)))
        tokens = prompts.stock.get_seq_length()
        yield lambda: Cache(layers=[DroppingLayer(tokens, *kept) for kept in layers])

    @abstractmethod
    def indices(self, model: PreTrainedModel, prompts: Prompts) -> list[Tensor]:
        """Return the ascending indices of each layer's kept tokens, (B or 1, H_kv or 1, kept)."""


@register_method("sinks-recent")
class SinksAndRecent(DroppingMethod):
    """The first 4 tokens and the newest, others dropped (StreamingLLM)."""

    least = SINKS + 1

    def indices(self, model: PreTrainedModel, prompts: Prompts) -> list[Tensor]:
        tokens = prompts.stock.get_seq_length()
        slots = torch.arange(tokens)
        kept = slots[(slots < SINKS) | (slots >= tokens - self._recent(tokens))]
        return [kept.view(1, 1, -1)] * len(prompts.stock.layers)

    def perplexity(self, tokens: Tensor) -> Perplexity:
        length = tokens.shape[1]
        mask = sinks_and_recent_mask(length, self._recent(length))
        return losses(self.setting.model, tokens, lambda: {"attention_mask": mask})

    def _recent(self, tokens: int) -> int:
        return self.kept_tokens(tokens) - SINKS


@register_method("snapkv")
class SnapKV(DroppingMethod):
    """The tokens that the end of the prompt attends to, others dropped (SnapKV).

    Attention of the last `OBSERVED` tokens is summed over them and over the query heads of a KV
    head, averaged over `POOLED` positions, and the largest are kept, beside those last tokens. This
    happens once, after a prompt: a text that is read token by token has no loss.
    """

    least = OBSERVED + 1

    def indices(self, model: PreTrainedModel, prompts: Prompts) -> list[Tensor]:
        tokens = prompts.stock.get_seq_length()
        if self.kept_tokens(tokens) == tokens:  # there may be fewer than those observed
            return [torch.arange(tokens).view(1, 1, -1)] * len(prompts.stock.layers)
        count = self.kept_tokens(tokens) - OBSERVED
        indices = []
        for layer, weights in zip(prompts.stock.layers, _observed(model, prompts), strict=True):
            by_head = weights.unflatten(1, (layer.keys.shape[1], -1)).sum(dim=(2, 3))
            past = avg_pool1d(
                by_head[..., :-OBSERVED], POOLED, stride=1, padding=POOLED // 2
            )  # (B, H_kv, n - OBSERVED)
            best = past.topk(count, dim=-1).indices.sort(dim=-1).values
            last = torch.arange(tokens - OBSERVED, tokens, device=best.device)
            indices.append(torch.cat([best, last.expand(*best.shape[:2], -1)], dim=-1))
        return indices

    def perplexity(self, tokens: Tensor) -> None:
        """Return None: tokens are dropped once, after a prompt."""


class DroppingLayer(DynamicLayer):
    """A layer that holds fewer tokens than it has read.

    Parameters
    ----------
    read : int
        Tokens that the model has read.
    keys, values : Tensor
        The kept ones of them, (B, H_kv, kept, d).
    """

    def __init__(self, read: int, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self._read = read
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys.contiguous(), values.contiguous()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._read += key_states.shape[2]
        return super().update(key_states, value_states)

    def get_seq_length(self) -> int:
        return self._read

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # As if the kept ones were the newest: every later token attends to all of them.
        kept = self.keys.shape[2]
        return kept + query_length, self._read - kept


def _observed(model: PreTrainedModel, prompts: Prompts) -> list[Tensor]:
    """Return the attention weights of the last tokens in the cache: (B, H_q, OBSERVED, n)."""
    cache = copy.deepcopy(prompts.stock)
    cache.crop(-OBSERVED)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the only one that returns weights
    try:
        output = model(
            input_ids=prompts.ids[:, -1 - OBSERVED : -1],
            past_key_values=cache,
            output_attentions=True,
            logits_to_keep=1,
        )
    finally:
        model.set_attn_implementation(implementation)
    return list(output.attentions)


def sinks_and_recent_mask(tokens: int, recent: int, sinks: int = SINKS) -> Tensor:
    """Return the attention mask (1, 1, n, n) of the first tokens and the newest.

    The newest of a query are the `recent` tokens that end in itself.
    """
    slots = torch.arange(tokens)
    distance = slots.unsqueeze(1) - slots
    mask = (distance >= 0) & ((distance < recent) | (slots < sinks))
    return mask.view(1, 1, tokens, tokens)
