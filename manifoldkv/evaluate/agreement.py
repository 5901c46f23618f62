"""Agreement of compressed caches with the uncompressed model's own greedy texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Cache, PreTrainedModel

from manifoldkv.core.errors import ArgumentError
from manifoldkv.core.modes import in_own_modes
from manifoldkv.evaluate.retrieval import Holder, Prompts, prefilled, uncompressed
from manifoldkv.models.tokens import checked_tokens, positions

UNCOMPRESSED = "uncompressed"


@in_own_modes
@torch.no_grad()
def agreement(
    model: PreTrainedModel,
    tokens: Tensor,
    caches: Mapping[str, Holder],
    *,
    new_tokens: int = 512,
    batch_size: int = 8,
) -> pd.DataFrame:
    """Compare the next tokens that caches choose along greedy texts of the uncompressed model.

    The uncompressed model extends every prompt by its most probable tokens. The same tokens are
    then read from each cache of the prompt, which accepts a token if it is the most probable one
    there too: the acceptance rate of speculative decoding with the compressed cache as the draft,
    one token at a time. Up to the first difference the cache would have generated the same text.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model.
    tokens : Tensor
        Token ids of the prompts, (prompts, length), at least two tokens long.
    caches : mapping of str to Holder
        Kinds of caches by name.
    new_tokens : int
        Tokens that a prompt is extended by.
    batch_size : int
        Largest number of prompts in a batch.

    Returns
    -------
    DataFrame
        ``cache, prompt, accepted, same_tokens``, a row for each prompt and cache: the share of
        accepted tokens, and the number of tokens before the first difference. The first cache is
        the uncompressed one, read in the same way: below 1 by rounding.

    Raises
    ------
    ArgumentError
        If there are no new tokens, or a prompt with them is longer than the model takes.
    """
    tokens = checked_tokens(model, tokens, shortest=2)
    if new_tokens < 1:
        raise ArgumentError(f"new_tokens must be >= 1, got {new_tokens}")
    if tokens.shape[1] + new_tokens > positions(model):
        raise ArgumentError(
            f"{tokens.shape[1]} tokens of a prompt and {new_tokens} new ones are more than the "
            f"{positions(model):,} positions of the model: ask for fewer"
        )
    rows: list[dict[str, Any]] = []
    first = 0
    for ids in tqdm(tokens.to(model.device).split(batch_size), desc="prompts", disable=None):
        prompts = prefilled(model, ids)
        with uncompressed(model, prompts) as new_cache:
            text = _greedy(model, prompts, new_cache(), new_tokens)
        for name, hold in ({UNCOMPRESSED: uncompressed} | dict(caches)).items():
            with hold(model, prompts) as new_cache:
                read = torch.cat([prompts.ids[:, -1:], text[:, :-1]], dim=1)
                logits = model(input_ids=read, past_key_values=new_cache()).logits
            same = logits.argmax(dim=-1) == text  # (B, new tokens)
            rows += [
                {
                    "cache": name,
                    "prompt": first + index,
                    "accepted": float(one.float().mean()),
                    "same_tokens": int(one.long().cumprod(0).sum()),
                }
                for index, one in enumerate(same)
            ]
        first += len(ids)
    return pd.DataFrame(rows)


def _greedy(model: PreTrainedModel, prompts: Prompts, cache: Cache, count: int) -> Tensor:
    """Return the most probable further tokens, (B, count), beyond ends of texts too."""
    chosen = []
    new = prompts.ids[:, -1:]
    for _ in range(count):
        new = model(input_ids=new, past_key_values=cache).logits[:, -1:].argmax(dim=-1)
        chosen.append(new)
    return torch.cat(chosen, dim=1)
