"""A text and its continuations, on the uncompressed cache and on compressed ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv.evaluation.continuation import continuation
from manifoldkv.plan.plan import CompressionPlan

LOG = logging.getLogger(__name__)

SHOWN = 400
"""Largest number of characters of a prompt in a report, its last ones."""


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
