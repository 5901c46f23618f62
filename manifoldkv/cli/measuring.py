"""Commands that measure a plan: evaluate, bench, report."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict

import torch

from manifoldkv.cli.answers import Answer, size
from manifoldkv.cli.app import Bench, Evaluate, Report
from manifoldkv.cli.inputs import Inputs, load, load_plan, open_inputs
from manifoldkv.core.errors import ArgumentError, RunError
from manifoldkv.core.files import check_writable
from manifoldkv.evaluate.diagnostics import diagnose_plan
from manifoldkv.evaluate.perplexity import compare, with_error
from manifoldkv.evaluate.questions import Question, questions
from manifoldkv.evaluate.reports.plan import template, write_report
from manifoldkv.evaluate.retrieval import retrieval, summarize
from manifoldkv.evaluate.speed import decode_speed
from manifoldkv.models.tokens import check_length, positions

LOG = logging.getLogger(__name__)

TASK_LENGTH = 1024
"""Tokens of a prompt, if half the model's positions are more."""


def evaluate(options: Evaluate) -> Answer:
    """Measure perplexity, errors of layers or answers, with the compressed cache and without."""
    if options.layers:
        return _layers(options)
    inputs = open_inputs(options, options.plan)
    if options.tasks is not None:
        return _answers(inputs, options, options.tasks.split(","))
    (plan,), tokens = inputs.plans, inputs.held_out_tokens(options)
    measured = compare(inputs.model, tokens, plan)
    length = tokens.shape[1]
    facts = {
        "uncompressed_perplexity": measured.uncompressed.perplexity,
        "compressed_perplexity": measured.compressed.perplexity,
        "added_nll": measured.added_nll,
        "standard_error": measured.standard_error,
        "ratio": plan.ratio_at(length),
        "cache_bytes": plan.nbytes(length, dtype=inputs.model.dtype),
    }
    lines = [
        f"perplexity of {len(tokens)} × {length} held-out tokens",
        f"  uncompressed  {measured.uncompressed.perplexity:.3f}",
        f"  compressed    {measured.compressed.perplexity:.3f}  (ratio {facts['ratio']:.3f})",
        f"  added         {with_error(measured.added_nll, measured.standard_error)} nats per token",
    ]
    return Answer(facts, lines)


def _layers(options: Evaluate) -> Answer:
    """Measure the error of each layer, on the inputs of the uncompressed model."""
    if options.tasks is not None:
        raise ArgumentError("--layers and --tasks exclude each other: give one")
    inputs = open_inputs(options, options.plan, attended=False)
    (plan,), tokens = inputs.plans, inputs.held_out_tokens(options)
    LOG.info("measuring %d layers on %d × %d tokens", len(plan.layers), *tokens.shape)
    table = diagnose_plan(inputs.model, plan, tokens)
    lines = table.to_string(index=False, float_format="{:.4f}".format).splitlines()
    return Answer({"layers": table.to_dict("records")}, lines)


def _answers(inputs: Inputs, options: Evaluate, tasks: list[str]) -> Answer:
    """Ask questions that look back after prompts of a length, half of the positions by default."""
    model, tokenizer, (plan,), source = inputs
    length = options.length
    if length is None:
        length = min(TASK_LENGTH, positions(model) // 2)
    check_length(model, length)
    asked: list[Question] = []
    for task in tasks:
        counts = {"length": length, "items": options.items, "seed": options.seed}
        asked += questions(task, tokenizer, source, **counts)
    LOG.info("asking %d questions after %d tokens", len(asked), length)
    stock = retrieval(model, tokenizer, asked)
    compressed = retrieval(model, tokenizer, asked, plan, prefill=options.prefill)
    table = summarize(compressed, stock)
    facts = {
        "tasks": table.to_dict("records"),
        "length": length,
        "prefill": options.prefill,
        "ratio": plan.ratio_at(length),
    }
    lines = [
        f"answers found after {length} tokens, {options.items} questions of each task, prompts "
        f"read {'uncompressed' if options.prefill == 'exact' else 'through the cache'}",
        f"  {'task':16} {'uncompressed':>12} {'compressed':>16} {'added nats':>18}",
    ]
    for _, row in table.iterrows():
        scores = f"{row['stock_score']:12.2f} {row['score']:8.2f}{_error(row['score_error'], 2)}"
        losses = f"{row['added_nll']:10.3f}{_error(row['nll_error'], 3)}"
        fails = "" if row["counted"] else "  (the uncompressed model fails it)"
        lines.append(f"  {row['task']:16} {scores} {losses}{fails}")
    return Answer(facts, lines)


def _error(error: float, digits: int) -> str:
    """Return a standard error as a column, blank for a single item."""
    return " " * (digits + 5) if math.isnan(error) else f" ± {error:{digits + 2}.{digits}f}"


def bench(options: Bench) -> Answer:
    """Time decoding with the compressed cache and without."""
    model, _ = load(options)
    plan = load_plan(options.plan, model, other_weights=options.other_weights)
    counts = {"new_tokens": options.new_tokens, "rounds": options.rounds}
    speed = decode_speed(model, plan, tokens=options.tokens, **counts)
    lines = [
        f"one token after {speed.tokens}, {torch.get_num_threads()} threads, "
        f"{options.rounds} rounds",
        f"  stock       {1e3 * speed.stock_seconds:8.2f} ms  {size(speed.stock_bytes)}",
        f"  compressed  {1e3 * speed.compressed_seconds:8.2f} ms  {size(speed.compressed_bytes)}",
        f"  compressed / stock: {speed.time_ratio:.2f} of the time, "
        f"{speed.compressed_bytes / speed.stock_bytes:.3f} of the bytes",
        f"  bases, predictions and tables, held once: {size(speed.constant_bytes)}, and the plan: "
        f"{size(plan.basis_nbytes(torch.float32))}",
    ]
    stock, small = speed.stock_working_bytes, speed.compressed_working_bytes
    if stock is not None and small is not None:  # Linux measures it
        lines.append(
            "  working memory of one step (peak, resident, beyond the cache): stock "
            f"{size(stock)}, compressed {size(small)}"
        )
    return Answer(asdict(speed), lines)


def report(options: Report) -> Answer:
    """Write an HTML report of a plan."""
    out = options.out
    if out.suffix != ".html" or out.is_dir():
        raise RunError(f"--out must name a file that ends in .html, got {out}")
    template()  # an absent library is named before the model is loaded
    check_writable(out.parent)
    inputs = open_inputs(options, options.plan)
    tokens = inputs.held_out_tokens(options)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_report(
        out,
        inputs.model,
        inputs.plans[0],
        tokens,
        folder=options.plan,
        tokenizer=inputs.tokenizer,
        self_contained=options.self_contained,
    )
    return Answer({"report": str(out)}, [f"report: {out}"])
