"""The command that shows two plans side by side."""

from __future__ import annotations

import textwrap
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.cli.answers import Answer, size
from manifoldkv.cli.app import Compare
from manifoldkv.cli.generating import new_tokens_after
from manifoldkv.cli.inputs import Inputs, open_inputs
from manifoldkv.evaluation.continuation import Continuations, beginning, continuations
from manifoldkv.evaluation.memory import constant_bytes
from manifoldkv.evaluation.perplexity import Comparison, Perplexity, perplexity, with_error
from manifoldkv.plan.plan import CompressionPlan

COLUMN = 26


def compare(options: Compare) -> Answer:
    """Measure two plans on the same held-out text, and let each continue the same text."""
    folders = (options.first, options.second)
    inputs = open_inputs(options, *folders)
    tokens = inputs.held_out_tokens(options)
    prompt = _prompt(inputs, tokens, options)
    stock = perplexity(inputs.model, tokens)
    measured = [_measured(inputs.model, plan, tokens, stock) for plan in inputs.plans]
    texts = continuations(
        inputs.model, inputs.tokenizer, prompt, inputs.plans, options.max_new_tokens
    )
    uncompressed, *continued = texts.continued
    facts: dict[str, Any] = {
        "length": tokens.shape[1],
        "sequences": len(tokens),
        "uncompressed_perplexity": stock.perplexity,
        "plans": [
            {"plan": str(folder)} | of_plan | {"text": written}
            for folder, of_plan, written in zip(folders, measured, continued, strict=True)
        ],
        "prompt": texts.prompt,
        "uncompressed_text": uncompressed,
    }
    return Answer(facts, [*_table(facts), "", *_text_lines(facts["plans"], texts)])


def _prompt(inputs: Inputs, tokens: Tensor, options: Compare) -> Tensor:
    """Return token ids, (1, length), of a prompt, or of held-out text with room after it.

    Raises
    ------
    ArgumentError
        If the prompt is empty, or leaves no room for new tokens.
    """
    if options.prompt is None:
        return beginning(inputs.model, tokens, options.max_new_tokens)
    ids: Tensor = inputs.tokenizer(options.prompt, return_tensors="pt")["input_ids"]
    new_tokens_after(inputs.model, ids, options.max_new_tokens)
    return ids


def _measured(
    model: PreTrainedModel, plan: CompressionPlan, tokens: Tensor, stock: Perplexity
) -> dict[str, Any]:
    length = tokens.shape[1]
    comparison = Comparison(stock, perplexity(model, tokens, plan))
    # The ratio of mixed widths is one to a cache in 16 bits, whatever the model runs in.
    dtype = torch.bfloat16 if plan.variable_width else model.dtype
    return {
        "ratio": plan.ratio_at(length),
        "cache_bytes": plan.nbytes(length, dtype=dtype),
        "cache_dtype": str(dtype).removeprefix("torch."),
        "basis_bytes": plan.basis_nbytes(),
        "constant_bytes": constant_bytes(model, plan, tokens),
        "perplexity": comparison.compressed.perplexity,
        "added_nll": comparison.added_nll,
        "standard_error": comparison.standard_error,
    }


def _table(facts: dict[str, Any]) -> list[str]:
    rows: dict[str, list[str]] = {
        "": ["uncompressed"],
        f"ratio at {facts['length']} tokens": ["1"],
        "  bytes": [""],
        "bytes of constants, once": [""],
        "perplexity": [f"{facts['uncompressed_perplexity']:.3f}"],
        "added nats per token": [""],
    }
    for plan in facts["plans"]:
        cells = [
            plan["plan"][1 - COLUMN :],
            f"{plan['ratio']:.4g}",
            f"{size(plan['cache_bytes'])} ({plan['cache_dtype']})",
            size(plan["constant_bytes"]),
            f"{plan['perplexity']:.3f}",
            with_error(plan["added_nll"], plan["standard_error"]),
        ]
        for row, cell in zip(rows.values(), cells, strict=True):
            row.append(cell)
    return [
        *(f"{name:24}" + "".join(f"{c:>{COLUMN}}" for c in row) for name, row in rows.items()),
        f"on {facts['sequences']} × {facts['length']} held-out tokens",
    ]


def _text_lines(plans: list[dict[str, Any]], texts: Continuations) -> list[str]:
    writers = ["the uncompressed model", *(plan["plan"] for plan in plans)]
    lines = ["a text:", textwrap.indent(texts.shown, "  ")]
    for writer, written in zip(writers, texts.continued, strict=True):
        lines += ["", f"continued by {writer}:", textwrap.indent(written, "  ")]
    return lines
