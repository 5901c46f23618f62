"""Answers to questions about a prompt, decoded from a cache of the prompt."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import (
    Cache,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from manifoldkv.cache import compressed
from manifoldkv.cache.compressed import Prefill
from manifoldkv.errors import ArgumentError
from manifoldkv.evaluation.perplexity import standard_error
from manifoldkv.evaluation.questions import Question
from manifoldkv.modes import in_own_modes
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.text.tokens import positions

UNANSWERED = 0.5
"""Smallest score of the uncompressed model at which a task tells something about compression."""


@dataclass(frozen=True)
class Prompts:
    """A batch of prompts of one length.

    Parameters
    ----------
    ids : Tensor
        Token ids, (B, n), int64.
    stock : DynamicCache
        Uncompressed cache of all tokens but the last of each prompt. It is shared: copy it before
        changing it.
    """

    ids: Tensor
    stock: DynamicCache


Holder = Callable[[PreTrainedModel, Prompts], AbstractContextManager[Callable[[], Cache]]]
"""A context manager of a kind of cache: it yields a function that returns a new cache of all tokens
of the prompts but the last of each, for the model to extend inside the block."""


def retrieval(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    plan: CompressionPlan | None = None,
    *,
    prefill: Prefill = "exact",
    batch_size: int = 8,
) -> pd.DataFrame:
    """Return scores of the answers to questions, from the compressed cache if there is a plan.

    Parameters
    ----------
    model, tokenizer
        From `load_model`.
    questions : sequence of Question
        From `questions`.
    plan : CompressionPlan, optional
        The uncompressed model answers without one.
    prefill : {"exact", "compressed"}
        Whether the tokens of a prompt see each other uncompressed, and only the answer reads the
        compressed cache, or all tokens read it. As in `compressed`.
    batch_size : int
        Largest number of prompts in a batch, all of one length: there is no padding.

    Returns
    -------
    DataFrame
        ``task, length, depth, score, nll``, one row per question in their order: the share of the
        answers in the greedily decoded text, and the mean negative log-likelihood of the
        continuation, nats per token. An answer that has to follow at once counts if each of its
        tokens is the most probable one after those before it.

    Raises
    ------
    ArgumentError
        If there is no question, or one is longer than the model takes.
    """
    holder = uncompressed if plan is None else partial(through_plan, plan=plan, prefill=prefill)
    table = retrieval_through(model, tokenizer, questions, {"": holder}, batch_size=batch_size)
    return table.drop(columns="cache")


@in_own_modes
@torch.no_grad()
def retrieval_through(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    caches: Mapping[str, Holder],
    *,
    batch_size: int = 8,
) -> pd.DataFrame:
    """Return scores of the answers from several caches, with one prefill per prompt.

    Parameters
    ----------
    model, tokenizer, questions, batch_size
        As in `retrieval`.
    caches : mapping of str to Holder
        Kinds of caches by name.

    Returns
    -------
    DataFrame
        As that of `retrieval`, with a column ``cache``.

    Raises
    ------
    ArgumentError
        As `retrieval`.
    """
    check_questions(model, questions)
    rows: list[dict[str, Any]] = []
    with tqdm(total=len(questions), desc="questions", disable=None, leave=False) as bar:
        for chosen in _batches(questions, batch_size):
            batch = [questions[i] for i in chosen]
            ids = torch.tensor([question.prompt for question in batch], device=model.device)
            prompts = prefilled(model, ids)
            for order, (name, hold) in enumerate(caches.items()):
                with hold(model, prompts) as new_cache:
                    losses, scores = _read(model, batch, prompts, new_cache())
                    if not all(map(_follows_at_once, batch)):
                        scores = _scores(model, tokenizer, batch, prompts, new_cache())
                rows += [
                    {
                        "order": order,
                        "item": item,
                        "cache": name,
                        "task": question.task,
                        "length": len(question.prompt),
                        "depth": question.depth,
                        "score": score,
                        "nll": nll,
                    }
                    for item, question, score, nll in zip(
                        chosen, batch, scores, losses, strict=True
                    )
                ]
            bar.update(len(batch))
    table = pd.DataFrame(rows).sort_values(["order", "item"])
    return table.drop(columns=["order", "item"]).reset_index(drop=True)


def check_questions(model: PreTrainedModel, questions: Sequence[Question]) -> None:
    """Raise `ArgumentError` if there is no question, or one is longer than the model takes."""
    if not questions:
        raise ArgumentError("there is no question to ask")
    longest = max(len(q.prompt) + max(q.new_tokens, len(q.continuation)) for q in questions)
    if longest > positions(model):
        raise ArgumentError(
            f"a question with its answer takes {longest:,} tokens, the model "
            f"{positions(model):,}: ask for shorter prompts"
        )


@contextmanager
def uncompressed(model: PreTrainedModel, prompts: Prompts) -> Iterator[Callable[[], Cache]]:
    """Yield a function that returns copies of the uncompressed cache."""
    yield lambda: copy.deepcopy(prompts.stock)


@contextmanager
def through_plan(
    model: PreTrainedModel, prompts: Prompts, plan: CompressionPlan, prefill: Prefill = "exact"
) -> Iterator[Callable[[], Cache]]:
    """Yield a function that returns compressed caches.

    With ``prefill="exact"`` the uncompressed cache is compressed; otherwise there is another
    prefill, in which tokens see each other compressed.
    """
    with compressed(model, plan) as new_cache:
        if prefill == "exact":
            yield lambda: new_cache(prompts.stock)
        else:
            filled = new_cache()
            model(input_ids=prompts.ids[:, :-1], past_key_values=filled, logits_to_keep=1)
            yield lambda: copy.deepcopy(filled)


def summarize(table: pd.DataFrame, uncompressed: pd.DataFrame) -> pd.DataFrame:
    """Return means by task, beside those of the uncompressed model on the same questions.

    Parameters
    ----------
    table, uncompressed : DataFrame
        From `retrieval`, with a plan and without.

    Returns
    -------
    DataFrame
        ``task, items, stock_score, score, score_error, stock_nll, added_nll, nll_error, counted``:
        errors are standard errors over questions, of the score and of the added NLL. A task is
        counted if the score of the uncompressed model is at least `UNANSWERED`.
    """
    both = table.assign(stock_score=uncompressed["score"], stock_nll=uncompressed["nll"])
    both["added_nll"] = both["nll"] - both["stock_nll"]
    rows = [
        {
            "task": task,
            "items": len(part),
            "stock_score": part["stock_score"].mean(),
            "score": part["score"].mean(),
            "score_error": standard_error(part["score"].tolist()),
            "stock_nll": part["stock_nll"].mean(),
            "added_nll": part["added_nll"].mean(),
            "nll_error": standard_error(part["added_nll"].tolist()),
            "counted": bool(part["stock_score"].mean() >= UNANSWERED),
        }
        for task, part in both.groupby("task", sort=False)
    ]
    return pd.DataFrame(rows)


def _batches(questions: Sequence[Question], batch_size: int) -> Iterator[list[int]]:
    """Yield indices of questions whose prompts have one length."""
    by_length = sorted(range(len(questions)), key=lambda i: len(questions[i].prompt))
    for _, group in groupby(by_length, key=lambda i: len(questions[i].prompt)):
        indices = list(group)
        for start in range(0, len(indices), batch_size):
            yield indices[start : start + batch_size]


def prefilled(model: PreTrainedModel, ids: Tensor) -> Prompts:
    """Return prompts (B, n) after a prefill by the uncompressed model."""
    stock = DynamicCache(config=model.config)
    model(input_ids=ids[:, :-1], past_key_values=stock, logits_to_keep=1)
    return Prompts(ids, stock)


def _scores(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: Sequence[Question],
    prompts: Prompts,
    cache: Cache,
) -> list[float]:
    """Return, by question, the share of its answers in the text that the model generates."""
    answered = _Answered(tokenizer, batch, prompts.ids.shape[1])
    output = model.generate(
        input_ids=prompts.ids,
        attention_mask=torch.ones_like(prompts.ids),
        past_key_values=cache,
        max_new_tokens=max(question.new_tokens for question in batch),
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id or 0,  # for the rows that have ended
        stopping_criteria=StoppingCriteriaList([answered]),
    )
    return answered.shares(output)


class _Answered(StoppingCriteria):
    """Ends the rows that contain all answers, or the largest number of tokens."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, batch: Sequence[Question], prompt: int
    ) -> None:
        self._tokenizer = tokenizer
        self._batch = batch
        self._prompt = prompt

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        count = input_ids.shape[1] - self._prompt
        done = [
            share == 1 or count >= question.new_tokens
            for share, question in zip(self.shares(input_ids), self._batch, strict=True)
        ]
        return torch.tensor(done, device=input_ids.device)

    def shares(self, ids: Tensor) -> list[float]:
        """Return the share of the answers that each row contains, in any case of letters."""
        shares = []
        for row, question in zip(ids.tolist(), self._batch, strict=True):
            generated = row[self._prompt : self._prompt + question.new_tokens]
            text = self._tokenizer.decode(generated, skip_special_tokens=True).lower()
            hits = sum(answer.lower() in text for answer in question.answers)
            shares.append(hits / len(question.answers))
        return shares


def _follows_at_once(question: Question) -> bool:
    """Return whether the one answer has to be the next tokens, so that no text is generated."""
    return len(question.answers) == 1 and question.new_tokens == len(question.continuation)


def _read(
    model: PreTrainedModel, batch: Sequence[Question], prompts: Prompts, cache: Cache
) -> tuple[list[float], list[float]]:
    """Return, by question, the NLL of the continuation and whether greedy decoding yields it.

    The first is the mean in nats per token; the second is 1 if every token is the most probable one
    after those before it, else 0.
    """
    longest = max(len(question.continuation) for question in batch)
    wanted = torch.full((len(batch), longest), -100)  # ignored by cross_entropy
    for row, question in enumerate(batch):
        wanted[row, : len(question.continuation)] = torch.tensor(question.continuation)
    wanted = wanted.to(prompts.ids.device)
    ids = torch.cat([prompts.ids[:, -1:], wanted[:, :-1].clamp(min=0)], dim=1)
    logits = model(input_ids=ids, past_key_values=cache).logits
    losses = cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="none")
    by_question = losses.view_as(wanted).double().sum(dim=1) / (wanted >= 0).sum(dim=1)
    greedy = ((logits.argmax(dim=-1) == wanted) | (wanted < 0)).all(dim=1)
    nll = [value if math.isfinite(value) else math.inf for value in by_question.tolist()]
    return nll, greedy.double().tolist()
