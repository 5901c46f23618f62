"""Continuations of a text, on the compressed cache and on the uncompressed one."""

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
    """Return the likeliest tokens after a text, one by one.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model.
    prompt : Tensor
        Token ids, (1, length).
    plan : CompressionPlan, optional
        The prompt is read and the text written on the compressed cache; on the stock cache without
        one.
    new_tokens : int
        Largest number; a model may end its text before.

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
        written = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=False,
        )
    return written[0, prompt.shape[1] :]


def beginning(model: PreTrainedModel, tokens: Tensor, new_tokens: int) -> Tensor:
    """Return the first of some sequences, (1, length), as long as there is room behind it.

    Raises
    ------
    ArgumentError
        If new tokens alone are more than the model takes.
    """
    room = positions(model) - new_tokens
    if room < 1:
        raise ArgumentError(
            f"{new_tokens} new tokens leave no room for a prompt: the model takes "
            f"{positions(model)}"
        )
    return tokens[:1, :room]
