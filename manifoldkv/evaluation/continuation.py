"""Continuations of a text, with the compressed cache or without."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.cache import compressed
from manifoldkv.errors import ArgumentError
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.text.tokens import checked_tokens, positions


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
