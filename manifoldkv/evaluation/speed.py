"""How fast a model decodes on this machine, with its compressed cache and without."""

from __future__ import annotations

import copy
import logging
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from manifoldkv.cache import compressed
from manifoldkv.errors import ArgumentError
from manifoldkv.evaluation.memory import peak_bytes
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.text.tokens import positions

LOG = logging.getLogger(__name__)

TOKENS_PER_CALL = 512
"""Of a prompt, while a cache is filled."""
PROMPT = 512
"""Tokens cached before decoding begins, or fewer if the model takes fewer."""


@dataclass(frozen=True)
class DecodeSpeed:
    """Medians over rounds, in each of which both caches took turns.

    Parameters
    ----------
    tokens : int
        Cached when decoding began.
    stock_seconds, compressed_seconds : float
        Per decoded token.
    time_ratio : float
        Compressed over stock, formed within rounds.
    stock_bytes, compressed_bytes : int
        Of keys and values, or of what stands for them, at the end.
    constant_bytes : int
        Of the plan's bases and predictions, held once for any number of caches.
    stock_working_bytes, compressed_working_bytes : int or None
        Peak memory of one more step beyond what was held before it (`peak_bytes`).
    """

    tokens: int
    stock_seconds: float
    compressed_seconds: float
    time_ratio: float
    stock_bytes: int
    compressed_bytes: int
    constant_bytes: int
    stock_working_bytes: int | None
    compressed_working_bytes: int | None


@torch.no_grad()
def decode_speed(
    model: PreTrainedModel,
    plan: CompressionPlan,
    *,
    tokens: int | None = None,
    new_tokens: int = 16,
    rounds: int = 3,
) -> DecodeSpeed:
    """Return the times of decoding one sequence after random tokens, with a plan and without.

    Parameters
    ----------
    model : PreTrainedModel
        The model the plan was made for.
    plan : CompressionPlan
        From `compress`.
    tokens : int, optional
        Length of the prompt: `PROMPT`, or what the model takes beside the new tokens, if omitted.
    new_tokens : int
        Decoded in every turn.
    rounds : int
        Turns of each cache.

    Raises
    ------
    ArgumentError
        If a count is not positive, or the tokens exceed the positions of the model.
    """
    longest = positions(model)
    if tokens is None:
        tokens = min(PROMPT, longest - new_tokens)
    if min(tokens, new_tokens, rounds) < 1 or tokens + new_tokens > longest:
        raise ArgumentError(
            f"cannot decode {new_tokens} tokens after {tokens} in {rounds} rounds: counts must be "
            f"positive, and the model takes {longest} tokens"
        )
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(vocabulary, (1, tokens), generator=generator).to(model.device)
    LOG.info("timing %d tokens after %d in %d rounds", new_tokens, tokens, rounds)
    filled = DynamicCache(config=model.config)
    for chunk in prompt[:, :-1].split(TOKENS_PER_CALL, dim=1) if tokens > 1 else ():
        model(input_ids=chunk, past_key_values=filled, logits_to_keep=1)
    stock, small = [], []
    for _ in tqdm(range(rounds), desc="rounds", disable=None, leave=False):
        cache = copy.deepcopy(filled)
        stock.append(_seconds_per_token(model, cache, prompt, new_tokens))
        with compressed(model, plan) as new_cache:
            compressed_cache = new_cache(filled)
            small.append(_seconds_per_token(model, compressed_cache, prompt, new_tokens))
    stock_bytes = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    compressed_bytes = compressed_cache.nbytes()
    stock_working = _working_bytes(model, cache)
    with compressed(model, plan):
        compressed_working = _working_bytes(model, compressed_cache)
    return DecodeSpeed(
        tokens,
        stock_seconds=median(stock),
        compressed_seconds=median(small),
        time_ratio=median(after / before for before, after in zip(stock, small, strict=True)),
        stock_bytes=stock_bytes,
        compressed_bytes=compressed_bytes,
        constant_bytes=plan.basis_nbytes(model.dtype),
        stock_working_bytes=stock_working,
        compressed_working_bytes=compressed_working,
    )


def _seconds_per_token(model: PreTrainedModel, cache: Any, prompt: Tensor, count: int) -> float:
    """Decode after a cache of a prompt; the first token, which warms up, is not counted."""
    logits = model(input_ids=prompt[:, -1:], past_key_values=cache).logits
    _synchronize(model.device)
    start = time.perf_counter()
    for _ in range(count):
        token = logits[:, -1:].argmax(dim=-1)
        logits = model(input_ids=token, past_key_values=cache).logits
    _synchronize(model.device)
    return (time.perf_counter() - start) / count


def _working_bytes(model: PreTrainedModel, cache: Any) -> int | None:
    """Return the peak memory of decoding one more token."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    return peak_bytes(lambda: model(input_ids=token, past_key_values=cache), model.device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
