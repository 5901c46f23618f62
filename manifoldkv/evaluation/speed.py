"""Speed on this machine, with the compressed cache and without."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from manifoldkv.cache import compressed
from manifoldkv.errors import ArgumentError
from manifoldkv.evaluation.memory import constant_bytes, peak_bytes
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.text.tokens import positions

LOG = logging.getLogger(__name__)

TOKENS_PER_CALL = 512
"""Tokens of a prompt per forward pass."""
PROMPT = 512
"""Default length of the prompt, or less if the model takes less."""


@dataclass(frozen=True)
class DecodeSpeed:
    """Medians over rounds; in each, both caches decode.

    Parameters
    ----------
    tokens : int
        Length of the prompt.
    stock_seconds, compressed_seconds : float
        Time of a step with the uncompressed and with the compressed cache.
    time_ratio : float
        Compressed over uncompressed time, median of the ratios of the rounds.
    stock_bytes, compressed_bytes : int
        Sizes of the caches at the end.
    constant_bytes : int
        Size of what attention holds beside caches, independent of their number; the plan itself is
        not counted.
    stock_working_bytes, compressed_working_bytes : int or None
        Working memory of one more step (`peak_bytes`).
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


@dataclass(frozen=True)
class PrefillSpeed:
    """Medians over rounds; in each, the prompt is read into both caches.

    Parameters
    ----------
    tokens : int
        Length of the prompt.
    stock_seconds, compressed_seconds : float
        Time of a prompt with the uncompressed and with the compressed cache.
    time_ratio : float
        Compressed over uncompressed time, median of the ratios of the rounds.
    """

    tokens: int
    stock_seconds: float
    compressed_seconds: float
    time_ratio: float


@torch.no_grad()
def decode_speed(
    model: PreTrainedModel,
    plan: CompressionPlan,
    *,
    tokens: int | None = None,
    new_tokens: int = 16,
    rounds: int = 3,
    batch: int = 1,
) -> DecodeSpeed:
    """Return times of decode steps after random tokens, with a plan and without.

    Parameters
    ----------
    model : PreTrainedModel
        The model the plan was made for.
    plan : CompressionPlan
        From `compress`.
    tokens : int, optional
        Length of the prompt; `PROMPT`, or the room that the new tokens leave, if omitted.
    new_tokens : int
        Number of decoded tokens per round.
    rounds : int
        Number of rounds.
    batch : int
        Number of sequences.

    Raises
    ------
    ArgumentError
        If a count is not positive, or the tokens exceed the positions of the model.
    """
    longest = positions(model)
    if tokens is None:
        tokens = min(PROMPT, longest - new_tokens)
    if min(tokens, new_tokens, rounds, batch) < 1 or tokens + new_tokens > longest:
        raise ArgumentError(
            f"cannot decode {new_tokens} tokens after {tokens} of {batch} sequences in {rounds} "
            f"rounds: counts must be positive, and the model takes {longest} tokens"
        )
    prompt = _random_tokens(model, batch, tokens)
    LOG.info("timing %d tokens after %d in %d rounds", new_tokens, tokens, rounds)
    filled = DynamicCache(config=model.config)
    for chunk in prompt[:, :-1].split(TOKENS_PER_CALL, dim=1) if tokens > 1 else ():
        model(input_ids=chunk, past_key_values=filled, logits_to_keep=1)
    before, after = [], []
    for _ in tqdm(range(rounds), desc="rounds", disable=None, leave=False):
        cache = copy.deepcopy(filled)
        before.append(_seconds_per_token(model, cache, prompt, new_tokens))
        with compressed(model, plan) as new_cache:
            compressed_cache = new_cache(filled)
            after.append(_seconds_per_token(model, compressed_cache, prompt, new_tokens))
    stock_bytes = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    compressed_bytes = compressed_cache.nbytes()
    stock_working = _working_bytes(model, cache, batch)
    with compressed(model, plan):
        compressed_working = _working_bytes(model, compressed_cache, batch)
    return DecodeSpeed(
        tokens,
        stock_seconds=median(before),
        compressed_seconds=median(after),
        time_ratio=median(x / y for x, y in zip(after, before, strict=True)),
        stock_bytes=stock_bytes,
        compressed_bytes=compressed_bytes,
        constant_bytes=constant_bytes(model, plan, prompt),
        stock_working_bytes=stock_working,
        compressed_working_bytes=compressed_working,
    )


@torch.no_grad()
def prefill_speed(
    model: PreTrainedModel, plan: CompressionPlan, *, tokens: int, rounds: int = 3
) -> PrefillSpeed:
    """Return times of reading a random prompt at once, with a plan and without.

    Parameters
    ----------
    model : PreTrainedModel
        The model the plan was made for.
    plan : CompressionPlan
        From `compress`.
    tokens : int
        Length of the prompt.
    rounds : int
        Number of rounds.

    Raises
    ------
    ArgumentError
        If a count is not positive, or the tokens exceed the positions of the model.
    """
    longest = positions(model)
    if min(tokens, rounds) < 1 or tokens > longest:
        raise ArgumentError(
            f"cannot read {tokens} tokens in {rounds} rounds: counts must be positive, and the "
            f"model takes {longest} tokens"
        )
    prompt = _random_tokens(model, 1, tokens)

    def read(cache: Any, ids: Tensor) -> float:
        return elapsed(
            lambda: model(input_ids=ids, past_key_values=cache, logits_to_keep=1), model.device
        )

    before, after = [], []
    for ids in (prompt[:, :1], *[prompt] * rounds):  # the first warms up
        before.append(read(DynamicCache(config=model.config), ids))
        with compressed(model, plan) as new_cache:
            after.append(read(new_cache(), ids))
    ratios = [x / y for x, y in zip(after[1:], before[1:], strict=True)]
    return PrefillSpeed(tokens, median(before[1:]), median(after[1:]), median(ratios))


def elapsed(step: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a step, with all that it queued on a GPU.

    Parameters
    ----------
    step : callable
        Called once, without arguments.
    device : torch.device
        Device of the step.
    """
    _synchronize(device)
    start = time.perf_counter()
    step()
    _synchronize(device)
    return time.perf_counter() - start


def _random_tokens(model: PreTrainedModel, batch: int, tokens: int) -> Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (batch, tokens), generator=generator).to(model.device)


def _seconds_per_token(model: PreTrainedModel, cache: Any, prompt: Tensor, count: int) -> float:
    """Return the time of a step after a prompt; the first step warms up and is not timed."""
    first = model(input_ids=prompt[:, -1:], past_key_values=cache).logits

    def decode() -> None:
        logits = first
        for _ in range(count):
            token = logits[:, -1:].argmax(dim=-1)
            logits = model(input_ids=token, past_key_values=cache).logits

    return elapsed(decode, model.device) / count


def _working_bytes(model: PreTrainedModel, cache: Any, batch: int) -> int | None:
    """Return the working memory of one more step, after another one.

    The first step inside a block prepares constants and angles, which the block then holds.
    """
    token = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
    model(input_ids=token, past_key_values=cache)
    return peak_bytes(lambda: model(input_ids=token, past_key_values=cache), model.device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
