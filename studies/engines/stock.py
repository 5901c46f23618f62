"""transformers, in the process of the study."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cached_property

import pandas as pd
import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from engines.base import Asked, Engine, text_rows


class Transformers(Engine):
    """Both models with the stock cache."""

    name = "transformers"
    install = "pip install transformers"

    def version(self) -> str:
        return f"transformers {transformers.__version__}"

    @cached_property
    def models(self) -> dict[str, PreTrainedModel]:
        return {
            name: AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, self.asked.dtype)
            ).eval()
            for name, folder in self.asked.folders.items()
        }

    def caches(self) -> pd.DataFrame:
        ids = torch.tensor([self.asked.prompts[0]])
        rows = []
        for name, model in self.models.items():
            cache = filled(model, ids)
            nbytes = sum(x.nbytes for x in tensors_of(cache))
            rows.append(
                {
                    "checkpoint": name,
                    "cache": self.asked.dtype,
                    "bytes_per_token": nbytes / cache.get_seq_length(),
                    "tokens_held": None,
                }
            )
        return pd.DataFrame(rows)

    def texts(self) -> pd.DataFrame:
        rows = []
        for name, model in self.models.items():
            prompts = tqdm(self.asked.prompts, f"texts, {name}", leave=False, disable=None)
            found = (greedy(model, torch.tensor([p]), self.asked.new_tokens) for p in prompts)
            rows += list(text_rows(name, found))
        return pd.DataFrame(rows)

    def speeds(self, tokens: int) -> pd.DataFrame:
        rows = turns(self.models, self.asked, tokens)
        return pd.DataFrame(rows).assign(cache=self.asked.dtype)

    def close(self) -> None:
        self.__dict__.pop("models", None)


def turns(
    models: dict[str, PreTrainedModel], asked: Asked, tokens: int
) -> Iterator[dict[str, object]]:
    """Yield the speed of every model in every round, over a cache of so many tokens."""
    ids = torch.tensor([asked.long_text[:tokens]])
    caches = {name: filled(model, ids) for name, model in models.items()}
    for turn in range(asked.rounds + 1):
        for name, model in models.items():
            start = time.perf_counter()
            greedy(model, ids, asked.steps, caches[name])
            seconds = time.perf_counter() - start
            caches[name].crop(-asked.steps)
            if turn:  # the first one warms up
                yield {
                    "checkpoint": name,
                    "round": turn,
                    "tokens_per_second": asked.steps / seconds,
                }


@torch.no_grad()
def filled(model: PreTrainedModel, ids: Tensor) -> DynamicCache:
    """Return the cache of a text (1, n) less its last token, which is read when it goes on."""
    cache = DynamicCache(config=model.config)
    model(input_ids=ids[:, :-1], past_key_values=cache, logits_to_keep=1)
    return cache


@torch.no_grad()
def greedy(
    model: PreTrainedModel, ids: Tensor, count: int, cache: DynamicCache | None = None
) -> list[int]:
    """Return so many tokens that follow a text (1, n), past any end of text.

    What `cache` holds of the text is not read again, and it grows by what is.
    """
    if cache is None:
        cache = DynamicCache(config=model.config)
    unread, found = ids[:, cache.get_seq_length() :], []
    for _ in range(count):
        logits = model(input_ids=unread, past_key_values=cache, logits_to_keep=1).logits
        unread = logits[:, -1:].argmax(dim=-1)
        found.append(int(unread))
    return found


def tensors_of(cache: DynamicCache) -> list[Tensor]:
    """Return keys and values of all layers."""
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]  # noqa: PD011
