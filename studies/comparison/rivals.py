"""What people would use instead of a plan: eight-bit floats, and caches that drop tokens.

Integers of every width are plans of full rank (`full_rank_plan`, `quantize`). Each cache here holds
the small tensors it says it holds.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, cross_entropy
from tqdm import tqdm
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from manifoldkv.errors import ModelError
from manifoldkv.evaluation import Perplexity
from manifoldkv.evaluation.retrieval import Prompts
from manifoldkv.models.support import sliding_windows

SINKS = 4
"""First tokens that StreamingLLM keeps (Xiao et al., 2024)."""
OBSERVED, POOLED = 32, 5
"""Last tokens of a prompt whose attention decides, and places over which it is averaged (SnapKV, Li
et al., 2024)."""
FLOAT8 = torch.float8_e4m3fn


def check_without_windows(model: PreTrainedModel) -> None:
    """Refuse a model that drops tokens by itself, which the caches here would hold.

    Raises
    ------
    ModelError
        If a layer has a sliding window.
    """
    for index, window in enumerate(sliding_windows(model.config)):
        if window is not None:
            raise ModelError(
                f"layer {index} has a sliding window of {window} tokens, and this cache is made "
                "for layers without one"
            )


class Float8Layer(DynamicLayer):
    """Keys and values in the format e4m3, without a scale: what engines call an fp8 cache."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states.to(FLOAT8), value_states.to(FLOAT8))
        return keys.to(key_states.dtype), values.to(value_states.dtype)


class DroppingLayer(DynamicLayer):
    """A layer that holds fewer tokens than it has seen.

    Parameters
    ----------
    seen : int
        Tokens that the model has read.
    keys, values : Tensor
        What is left of them, (B, H_kv, kept, d).
    """

    def __init__(self, seen: int, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self._seen = seen
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys.contiguous(), values.contiguous()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._seen += key_states.shape[2]
        return super().update(key_states, value_states)

    def get_seq_length(self) -> int:
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # As if those held were the newest: all of them are seen by whatever comes.
        kept = self.keys.shape[2]
        return kept + query_length, self._seen - kept


@contextmanager
def in_float8(model: PreTrainedModel, prompts: Prompts) -> Iterator[Callable[[], Cache]]:
    """Hold prompts in eight-bit floats."""

    def new_cache() -> Cache:
        cache = float8_cache(model)
        for index, layer in enumerate(prompts.stock.layers):
            cache.update(layer.keys, layer.values, index)
        return cache

    yield new_cache


def float8_cache(model: PreTrainedModel) -> Cache:
    """Return an empty cache of eight-bit floats."""
    count = model.config.get_text_config().num_hidden_layers
    return Cache(layers=[Float8Layer() for _ in range(count)])


@dataclass(frozen=True)
class DroppingHolder(ABC):
    """Holds some tokens of a prompt as they are, as many in every head, and drops the others.

    Parameters
    ----------
    ratio : float
        Share of the tokens that is kept.
    """

    ratio: float
    least: ClassVar[int]
    """Tokens that are kept however small the share is."""

    def kept_tokens(self, tokens: int) -> int:
        """Return how many of so many tokens are kept."""
        return min(tokens, max(self.least, int(self.ratio * tokens)))

    @contextmanager
    def __call__(self, model: PreTrainedModel, prompts: Prompts) -> Iterator[Callable[[], Cache]]:
        layers = []
        for layer, places in zip(prompts.stock.layers, self.places(model, prompts), strict=True):
            texts, heads, _, features = layer.keys.shape
            kept = places.to(layer.keys.device).unsqueeze(-1).expand(texts, heads, -1, features)
            layers.append((layer.keys.gather(2, kept), layer.values.gather(2, kept)))
        tokens = prompts.stock.get_seq_length()
        yield lambda: Cache(layers=[DroppingLayer(tokens, *kept) for kept in layers])

    @abstractmethod
    def places(self, model: PreTrainedModel, prompts: Prompts) -> list[Tensor]:
        """Return which tokens every layer keeps, by rising place, (B or 1, H_kv or 1, kept)."""

    @abstractmethod
    def perplexity(self, model: PreTrainedModel, tokens: Tensor) -> Perplexity | None:
        """Return the loss on texts read token by token, or None where that means nothing."""


class SinksAndRecent(DroppingHolder):
    """Holds the first tokens of a prompt and its newest (StreamingLLM)."""

    least = SINKS + 1

    def places(self, model: PreTrainedModel, prompts: Prompts) -> list[Tensor]:
        tokens = prompts.stock.get_seq_length()
        slots = torch.arange(tokens)
        kept = slots[(slots < SINKS) | (slots >= tokens - self._recent(tokens))]
        return [kept.view(1, 1, -1)] * len(prompts.stock.layers)

    def perplexity(self, model: PreTrainedModel, tokens: Tensor) -> Perplexity:
        length = tokens.shape[1]
        seen = seen_beside_sinks(length, self._recent(length))
        return losses(model, tokens, lambda: {"attention_mask": seen})

    def _recent(self, tokens: int) -> int:
        return self.kept_tokens(tokens) - SINKS


class SnapKV(DroppingHolder):
    """Holds the tokens of a prompt that its last ones attend to, of every head its own.

    Attention of the last `OBSERVED` tokens is summed over them and over the query heads of a KV
    head, averaged over `POOLED` places, and the largest are kept, beside those last tokens. That is
    done once, after a prompt: a text that is read token by token has no loss.
    """

    least = OBSERVED + 1

    def places(self, model: PreTrainedModel, prompts: Prompts) -> list[Tensor]:
        tokens = prompts.stock.get_seq_length()
        if self.kept_tokens(tokens) == tokens:  # there may be fewer than those observed
            return [torch.arange(tokens).view(1, 1, -1)] * len(prompts.stock.layers)
        count = self.kept_tokens(tokens) - OBSERVED
        found = []
        for layer, weights in zip(prompts.stock.layers, _observed(model, prompts), strict=True):
            by_head = weights.unflatten(1, (layer.keys.shape[1], -1)).sum(dim=(2, 3))
            past = avg_pool1d(
                by_head[..., :-OBSERVED], POOLED, stride=1, padding=POOLED // 2
            )  # (B, H_kv, n - OBSERVED)
            best = past.topk(count, dim=-1).indices.sort(dim=-1).values
            last = torch.arange(tokens - OBSERVED, tokens, device=best.device)
            found.append(torch.cat([best, last.expand(*best.shape[:2], -1)], dim=-1))
        return found

    def perplexity(self, model: PreTrainedModel, tokens: Tensor) -> None:
        return None


def _observed(model: PreTrainedModel, prompts: Prompts) -> list[Tensor]:
    """Return the attention weights of the last tokens in the cache: (B, H_q, OBSERVED, n)."""
    cache = copy.deepcopy(prompts.stock)
    cache.crop(-OBSERVED)
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the only one that gives weights
    try:
        output = model(
            input_ids=prompts.ids[:, -1 - OBSERVED : -1],
            past_key_values=cache,
            output_attentions=True,
            logits_to_keep=1,
        )
    finally:
        model.set_attn_implementation(usual)
    return list(output.attentions)


@torch.no_grad()
def losses(
    model: PreTrainedModel, tokens: Tensor, keywords: Callable[[], dict[str, Any]]
) -> Perplexity:
    """Return how well a model predicts windows of tokens when it is called with some keywords."""
    found = []
    for sequence in tqdm(tokens.to(model.device).split(1), disable=None, leave=False):
        logits = model(input_ids=sequence, **keywords()).logits[0, :-1]
        found.append(cross_entropy(logits.float(), sequence[0, 1:]).item())
    return Perplexity(tuple(found), tokens.shape[0] * (tokens.shape[1] - 1))


def seen_beside_sinks(tokens: int, recent: int, sinks: int = SINKS) -> Tensor:
    """Return which tokens every query sees of the first ones and the newest, (1, 1, n, n).

    The newest are those before it and itself.
    """
    slots = torch.arange(tokens)
    distance = slots.unsqueeze(1) - slots
    seen = (distance >= 0) & ((distance < recent) | (slots < sinks))
    return seen.view(1, 1, tokens, tokens)
