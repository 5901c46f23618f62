"""Perplexity through the cache."""

from __future__ import annotations

import logging
import math
import statistics
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from manifoldkv.cache import compressed
from manifoldkv.modes import in_own_modes
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.text.tokens import checked_tokens

LOG = logging.getLogger(__name__)

SEQUENCES_PER_FORWARD = 8
FEWEST = 4
"""Fewest values of whose mean a standard error is computed."""
LARGEST_NLL = math.log(sys.float_info.max)


@dataclass(frozen=True)
class Perplexity:
    """Loss of a model on a text.

    Parameters
    ----------
    by_sequence : tuple of float
        Mean negative log-likelihood of each sequence, nats per token: plans measured on the same
        tokens are best compared one by one.
    tokens_scored : int
        Number of tokens in these means: all but the first of every sequence.
    """

    by_sequence: tuple[float, ...]
    tokens_scored: int

    @property
    def nll(self) -> float:
        """Return the mean negative log-likelihood, nats per token."""
        return statistics.fmean(self.by_sequence)

    @property
    def perplexity(self) -> float:
        """Return ``exp(nll)``, infinite where that overflows."""
        return math.inf if self.nll > LARGEST_NLL else math.exp(self.nll)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean; NaN of fewer than `FEWEST` values, too few for one."""
    if len(values) < FEWEST:
        return math.nan
    # Not statistics.stdev, which fails on losses that are not finite.
    return float(torch.tensor(values, dtype=torch.float64).std()) / math.sqrt(len(values))


def with_error(mean: float, error: float, digits: int = 4) -> str:
    """Return a mean as printed, followed by its standard error unless that is NaN."""
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


@in_own_modes
@torch.no_grad()
def perplexity(
    model: PreTrainedModel, tokens: Tensor, plan: CompressionPlan | None = None
) -> Perplexity:
    """Return the loss of a model on token ids, with its compressed cache if there is a plan.

    Every token is scored given the cache of the tokens before it and of itself, as in decoding
    token by token.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model.
    tokens : Tensor
        Token ids, (sequences, length), from `sample_tokens`, say; at least two tokens long.
    plan : CompressionPlan, optional
        The uncompressed model is measured without one.

    Raises
    ------
    ArgumentError
        If the tokens have another shape, or are not ids and lengths that the model takes.
    """
    tokens = checked_tokens(model, tokens, shortest=2)
    cache = "uncompressed" if plan is None else "compressed"
    LOG.info("measuring perplexity on %d × %d tokens, %s", *tokens.shape, cache)
    losses = []
    with nullcontext() if plan is None else compressed(model, plan):
        batches = tokens.to(model.device).split(SEQUENCES_PER_FORWARD)
        for batch in tqdm(batches, desc="perplexity", disable=None, leave=False):
            logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="none"
            )
            losses.append(loss.view(len(batch), -1).double().mean(dim=1))
    by_sequence = tuple(torch.cat(losses).tolist())
    return Perplexity(by_sequence, tokens.shape[0] * (tokens.shape[1] - 1))


@dataclass(frozen=True)
class Comparison:
    """Losses of a model on the same text, with its compressed cache and without."""

    uncompressed: Perplexity
    compressed: Perplexity

    @property
    def added_nll(self) -> float:
        """Return the NLL that compression adds, nats per token."""
        return self.compressed.nll - self.uncompressed.nll

    @property
    def standard_error(self) -> float:
        """Return the `standard_error` of `added_nll` over sequences."""
        pairs = zip(self.compressed.by_sequence, self.uncompressed.by_sequence, strict=True)
        return standard_error([after - before for after, before in pairs])


def compare(model: PreTrainedModel, tokens: Tensor, plan: CompressionPlan) -> Comparison:
    """Return the losses of a model with a plan and without; parameters as in `perplexity`."""
    return Comparison(perplexity(model, tokens), perplexity(model, tokens, plan))
