"""The command that shows two plans side by side."""

from __future__ import annotations

import logging
import textwrap
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv.cli.answers import Answer, size
from manifoldkv.cli.inputs import held_out_tokens, load, plan_for, text_to_measure
from manifoldkv.cli.options import GivenModel, GivenPlan, GivenText
from manifoldkv.errors import ArgumentError
from manifoldkv.evaluation.continuation import beginning, continuation
from manifoldkv.evaluation.perplexity import Comparison, Perplexity, perplexity, with_error
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.text.tokens import positions

LOG = logging.getLogger(__name__)

SHOWN = 300
"""Characters of the prompt that are shown, its last ones."""
COLUMN = 26


def compare(
    model: GivenModel,
    plans: list[GivenPlan],
    text: GivenText,
    prompt: str | None,
    new_tokens: int,
) -> Answer:
    """Measure plans on the same held-out text, and let each continue the same text."""
    source = text_to_measure(text.name, model.name)
    loaded, tokenizer = load(model)
    known = [plan_for(plan, loaded) for plan in plans]
    tokens = held_out_tokens(source, text, loaded, tokenizer)
    asked = _prompt(loaded, tokenizer, tokens, prompt, new_tokens)
    stock = perplexity(loaded, tokens)
    facts = [
        {"plan": str(given.folder)} | _measured(loaded, plan, tokens, stock)
        for given, plan in zip(plans, known, strict=True)
    ]
    LOG.info("continuing a text of %d tokens", asked.shape[1])
    texts = [
        tokenizer.decode(
            continuation(loaded, asked, plan, new_tokens=new_tokens), skip_special_tokens=True
        )
        for plan in (None, *known)
    ]
    begun = tokenizer.decode(asked[0], skip_special_tokens=True)
    found = {
        "length": tokens.shape[1],
        "sequences": len(tokens),
        "uncompressed_perplexity": stock.perplexity,
        "plans": facts,
        "prompt": begun,
        "uncompressed_text": texts[0],
    }
    for fact, written in zip(facts, texts[1:], strict=True):
        fact["text"] = written
    return Answer(found, [*_table(found), "", *_texts(found)])


def _prompt(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: Tensor,
    given: str | None,
    new_tokens: int,
) -> Tensor:
    """Return the text to continue, (1, length): what is given, or held-out text with room after it.

    Raises
    ------
    ArgumentError
        If it is empty, or leaves no room for new tokens.
    """
    if given is None:
        return beginning(model, tokens, new_tokens)
    asked: Tensor = tokenizer(given, return_tensors="pt")["input_ids"]
    if not asked.numel():
        raise ArgumentError("the prompt has no token: write something after --prompt")
    room = positions(model) - new_tokens
    if asked.shape[1] > room:
        raise ArgumentError(
            f"{new_tokens} new tokens after a prompt of {asked.shape[1]} are more than the "
            f"{positions(model)} positions of the model"
        )
    return asked


def _measured(
    model: PreTrainedModel, plan: CompressionPlan, tokens: Tensor, stock: Perplexity
) -> dict[str, Any]:
    length = tokens.shape[1]
    found = Comparison(stock, perplexity(model, tokens, plan))
    # The ratio of mixed widths is one to a cache in 16 bits, whatever the model runs in.
    dtype = torch.bfloat16 if plan.variable_width else model.dtype
    return {
        "ratio": plan.ratio_at(length),
        "cache_bytes": plan.nbytes(length, dtype=dtype),
        "cache_dtype": str(dtype).removeprefix("torch."),
        "basis_bytes": plan.basis_nbytes(),
        "perplexity": found.compressed.perplexity,
        "added_nll": found.added_nll,
        "standard_error": found.standard_error,
    }


def _table(found: dict[str, Any]) -> list[str]:
    plans, length = found["plans"], found["length"]

    def row(name: str, *cells: str) -> str:
        return f"{name:24}" + "".join(f"{cell:>{COLUMN}}" for cell in cells)

    return [
        row("", "uncompressed", *(plan["plan"][1 - COLUMN :] for plan in plans)),
        row(f"ratio at {length} tokens", "1", *(f"{plan['ratio']:.4g}" for plan in plans)),
        row("  bytes", "", *(f"{size(p['cache_bytes'])} ({p['cache_dtype']})" for p in plans)),
        row("bytes of bases, once", "", *(size(plan["basis_bytes"]) for plan in plans)),
        row(
            "perplexity",
            f"{found['uncompressed_perplexity']:.3f}",
            *(f"{plan['perplexity']:.3f}" for plan in plans),
        ),
        row(
            "added nats per token",
            "",
            *(with_error(plan["added_nll"], plan["standard_error"]) for plan in plans),
        ),
        f"on {found['sequences']} × {length} held-out tokens",
    ]


def _texts(found: dict[str, Any]) -> list[str]:
    begun = found["prompt"]
    begun = f"…{begun[-SHOWN:]}" if len(begun) > SHOWN else begun
    texts = [("a text", begun), ("continued by the uncompressed model", found["uncompressed_text"])]
    texts += [(f"continued by {plan['plan']}", plan["text"]) for plan in found["plans"]]
    lines = []
    for name, written in texts:
        lines += [f"{name}:", textwrap.indent(written, "  "), ""]
    return lines[:-1]
