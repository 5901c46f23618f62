"""Continuations of a text, on the uncompressed cache and on compressed ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv.cache import compressed
from manifoldkv.errors import ArgumentError
from manifoldkv.modes import in_own_modes
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.text.tokens import checked_tokens, positions

LOG = logging.getLogger(__name__)

SHOWN = 400
"""Largest number of characters of a prompt in a report, its last ones."""


@in_own_modes
def continuation(
    model: PreTrainedModel,
    prompt: Tensor,
    plan: CompressionPlan | None = None,
    *,
    new_tokens: int = 60,
) -> Tensor:
    """Return a greedy continuation of a text.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model.
    prompt : Tensor
        Token ids, (1, length).
    plan : CompressionPlan, optional
        Prompt and continuation use its compressed cache; the uncompressed one if omitted.
    new_tokens : int
        Largest number of tokens; a model may end its text before.

    Returns
    -------
    Tensor
        Token ids, (tokens,), without those of the prompt.

    Raises
    ------
    ArgumentError
        If the prompt has another shape, or is longer than the model takes.
    """
    prompt = checked_tokens(model, prompt).to(model.device)
    with nullcontext() if plan is None else compressed(model, plan), torch.no_grad():
        ids = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=False,
        )
    return ids[0, prompt.shape[1] :]


def beginning(model: PreTrainedModel, tokens: Tensor, new_tokens: int) -> Tensor:
    """Return the first sequence, (1, length), cut to leave room for new tokens.

    Raises
    ------
    ArgumentError
        If new tokens alone exceed the positions of the model.
    """
    room = positions(model) - new_tokens
    if room < 1:
        raise ArgumentError(
            f"{new_tokens} new tokens leave no room for a prompt: the model takes "
            f"{positions(model)}"
        )
    return tokens[:1, :room]


class Continuations(NamedTuple):
    """Continuations of one prompt, the first by the uncompressed model and then one per plan."""

    prompt: str
    prompt_tokens: int
    continued: list[str]

    @property
    def shown(self) -> str:
        """Return the end of the prompt."""
        return f"…{self.prompt[-SHOWN:]}" if len(self.prompt) > SHOWN else self.prompt


def continuations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Tensor,
    plans: Sequence[CompressionPlan],
    new_tokens: int,
) -> Continuations:
    """Return the likeliest continuations of a prompt, token ids (1, length)."""
    LOG.info("continuing a text of %d tokens", prompt.shape[1])
    written = [continuation(model, prompt, p, new_tokens=new_tokens) for p in (None, *plans)]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt[0], *written)]
    return Continuations(texts[0], prompt.shape[1], texts[1:])
