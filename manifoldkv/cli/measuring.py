"""Commands that run a model: generate, evaluate, bench, diagnose, report."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from manifoldkv.cache import compressed
from manifoldkv.cli.answers import Answer, size
from manifoldkv.cli.inputs import held_out_tokens, load, plan_for, text_to_measure
from manifoldkv.cli.options import GivenModel, GivenPlan, GivenTasks, GivenText, Sampling
from manifoldkv.cli.storing import cache_of_prompt
from manifoldkv.diagnostics import diagnose_plan
from manifoldkv.errors import ArgumentError, CacheError, RunError
from manifoldkv.evaluation.perplexity import compare, with_error
from manifoldkv.evaluation.questions import questions
from manifoldkv.evaluation.retrieval import retrieval, summarize
from manifoldkv.evaluation.speed import DecodeSpeed, decode_speed
from manifoldkv.reports.plan import template, write_report
from manifoldkv.runs.files import check_writable
from manifoldkv.seeds import check_seed
from manifoldkv.text.tokens import check_length, checked_tokens, positions

LOG = logging.getLogger(__name__)

NEW_TOKENS = 100
TASK_LENGTH = 1024
"""Tokens of a prompt, if half the model's positions are more."""
COLDEST = 1e-6
"""Below this temperature nothing but the likeliest token is drawn, or logits overflow."""


def generate(
    model: GivenModel,
    plan: GivenPlan | None,
    prompt: str,
    sampling: Sampling,
    cache: Path | None = None,
    *,
    chat: bool,
) -> Answer:
    """Write text, on the compressed cache if there is a plan, or from a prompt's stored one.

    Of a chat it is the answer alone.
    """
    options = _sampling_options(sampling)
    if cache is not None and plan is None:
        raise CacheError(f"--cache {cache} goes with the --plan of recipe stored that made it")
    loaded, tokenizer = load(model)
    known = None if plan is None else plan_for(plan, loaded, attended=cache is None)
    inputs = _inputs(tokenizer, prompt, chat).to(loaded.device)
    asked = inputs["input_ids"]
    options["max_new_tokens"] = _new_tokens(loaded, asked, sampling.max_new_tokens)
    torch.manual_seed(sampling.seed)
    facts: dict[str, Any] = {}
    if known is None:
        output = loaded.generate(**inputs, **options)
    elif cache is not None:
        held, facts["cached_tokens"] = cache_of_prompt(loaded, known, asked, cache)
        facts["cache_bytes"] = cache.stat().st_size
        output = loaded.generate(**inputs, **options, past_key_values=held)
    else:
        with compressed(loaded, known) as new_cache:
            latents = new_cache()
            output = loaded.generate(**inputs, **options, past_key_values=latents)
        facts["cache_bytes"] = latents.nbytes()
    shown = output[0, asked.shape[1] :] if chat else output[0]
    written = tokenizer.decode(shown, skip_special_tokens=True)
    facts |= {"text": written, "tokens": output.shape[1]}
    return Answer(facts, [written])


def _sampling_options(sampling: Sampling) -> dict[str, Any]:
    """Return how `generate` of transformers is to choose tokens.

    Raises
    ------
    ArgumentError
        If the seed is none.
        If there is nothing to draw among, or nothing is drawn.
    """
    check_seed(sampling.seed)
    drawn = sampling.temperature > COLDEST
    if not 0 < sampling.top_p <= 1:
        raise ArgumentError(f"--top-p {sampling.top_p:g} is not in (0, 1]")
    if sampling.top_p < 1 and not drawn:
        raise ArgumentError(
            f"--top-p {sampling.top_p:g} draws tokens: give a --temperature above 0 too, 1 say"
        )
    if not drawn:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}


def _inputs(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool) -> Any:
    """Return a prompt as token ids and their mask, in the model's chat template if it is a chat."""
    if not chat:
        return tokenizer(prompt, return_tensors="pt")
    if tokenizer.chat_template is None:
        raise ArgumentError("the tokenizer of the model has no chat template: leave --chat out")
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )


def evaluate(model: GivenModel, plan: GivenPlan, text: GivenText) -> Answer:
    """Measure perplexity with the compressed cache and without."""
    source = text_to_measure(text.name, model.name)
    loaded, tokenizer = load(model)
    known = plan_for(plan, loaded)
    tokens = held_out_tokens(source, text, loaded, tokenizer)
    found = compare(loaded, tokens, known)
    length = tokens.shape[1]
    facts = {
        "uncompressed_perplexity": found.uncompressed.perplexity,
        "compressed_perplexity": found.compressed.perplexity,
        "added_nll": found.added_nll,
        "standard_error": found.standard_error,
        "ratio": known.ratio_at(length),
        "cache_bytes": known.nbytes(length, dtype=loaded.dtype),
    }
    lines = [
        f"perplexity of {len(tokens)} × {length} held-out tokens",
        f"  uncompressed  {found.uncompressed.perplexity:.3f}",
        f"  compressed    {found.compressed.perplexity:.3f}  (ratio {facts['ratio']:.3f})",
        f"  added         {with_error(found.added_nll, found.standard_error)} nats per token",
    ]
    return Answer(facts, lines)


def answer(model: GivenModel, plan: GivenPlan, text: GivenText, asked: GivenTasks) -> Answer:
    """Ask questions that look back, with the compressed cache and without."""
    source = text_to_measure(text.name, model.name)
    loaded, tokenizer = load(model)
    known = plan_for(plan, loaded)
    length = min(TASK_LENGTH, positions(loaded) // 2) if text.length is None else text.length
    check_length(loaded, length)
    posed = [
        question
        for name in asked.names
        for question in questions(
            name, tokenizer, source, length=length, items=asked.items, seed=asked.seed
        )
    ]
    LOG.info("asking %d questions after %d tokens", len(posed), length)
    stock = retrieval(loaded, tokenizer, posed)
    table = summarize(retrieval(loaded, tokenizer, posed, known, prefill=asked.prefill), stock)
    facts = {
        "tasks": table.to_dict("records"),
        "length": length,
        "prefill": asked.prefill,
        "ratio": known.ratio_at(length),
    }
    lines = [
        f"answers found after {length} tokens, {asked.items} questions of each task, prompts read "
        f"{'uncompressed' if asked.prefill == 'exact' else 'through the cache'}",
        f"  {'task':16} {'uncompressed':>12} {'compressed':>16} {'added nats':>18}",
    ]
    for _, row in table.iterrows():
        scores = f"{row['stock_score']:12.2f} {row['score']:8.2f}{_error(row['score_error'], 2)}"
        losses = f"{row['added_nll']:10.3f}{_error(row['nll_error'], 3)}"
        fails = "" if row["counted"] else "  (the uncompressed model fails it)"
        lines.append(f"  {row['task']:16} {scores} {losses}{fails}")
    return Answer(facts, lines)


def bench(
    model: GivenModel, plan: GivenPlan, tokens: int | None, new_tokens: int, rounds: int
) -> Answer:
    """Time decoding with the compressed cache and without."""
    loaded, _ = load(model)
    known = plan_for(plan, loaded)
    found = decode_speed(loaded, known, tokens=tokens, new_tokens=new_tokens, rounds=rounds)
    lines = [
        f"one token after {found.tokens}, {torch.get_num_threads()} threads, {rounds} rounds",
        f"  stock       {1e3 * found.stock_seconds:8.2f} ms  {size(found.stock_bytes)}",
        f"  compressed  {1e3 * found.compressed_seconds:8.2f} ms  {size(found.compressed_bytes)}",
        f"  compressed / stock: {found.time_ratio:.2f} of the time, "
        f"{found.compressed_bytes / found.stock_bytes:.3f} of the bytes",
        f"  bases and predictions, held once: {size(found.constant_bytes)}",
        *_working_memory(found),
    ]
    return Answer(asdict(found), lines)


def _working_memory(found: DecodeSpeed) -> list[str]:
    """Return the lines on working memory, none where it cannot be measured."""
    if found.stock_working_bytes is None or found.compressed_working_bytes is None:
        return []
    return [
        "  peak memory of one step beside all that (resident): stock "
        f"{size(found.stock_working_bytes)}, compressed {size(found.compressed_working_bytes)}"
    ]


def diagnose(model: GivenModel, plan: GivenPlan, text: GivenText) -> Answer:
    """Measure what the cache does to every layer by itself."""
    source = text_to_measure(text.name, model.name)
    loaded, tokenizer = load(model)
    known = plan_for(plan, loaded, attended=False)
    tokens = held_out_tokens(source, text, loaded, tokenizer)
    LOG.info("measuring %d layers on %d × %d tokens", len(known.layers), *tokens.shape)
    table = diagnose_plan(loaded, known, tokens)
    rows = table.to_dict("records")
    lines = table.to_string(index=False, float_format="{:.4f}".format).splitlines()
    return Answer({"layers": rows}, lines)


def _error(error: float, digits: int) -> str:
    """Return a standard error as it follows a mean: nothing, where one item has none."""
    return " " * (digits + 5) if math.isnan(error) else f" ± {error:{digits + 2}.{digits}f}"


def _new_tokens(model: Any, prompt: torch.Tensor, wanted: int | None) -> int:
    """Return how many tokens to add to a prompt (1, length): as wanted, if the model takes them.

    Raises
    ------
    ArgumentError
        If the prompt is empty, or too long.
    """
    if not prompt.numel():
        raise ArgumentError("the prompt has no token: write something after --prompt")
    checked_tokens(model, prompt)
    room = positions(model) - prompt.shape[1]
    if room < (wanted or 1):
        raise ArgumentError(
            f"{wanted or 1} new tokens after a prompt of {prompt.shape[1]} are more than the "
            f"{positions(model)} positions of the model"
        )
    return min(NEW_TOKENS, room) if wanted is None else wanted


def report(
    model: GivenModel, plan: GivenPlan, text: GivenText, out: Path, *, self_contained: bool
) -> Answer:
    """Write an HTML report of a plan."""
    if out.suffix != ".html" or out.is_dir():
        raise RunError(f"--out {out} is no file that ends in .html")
    template("plan.html")  # an absent library is named before the model is loaded
    check_writable(out.parent)
    source = text_to_measure(text.name, model.name)
    loaded, tokenizer = load(model)
    known = plan_for(plan, loaded)
    held_out = held_out_tokens(source, text, loaded, tokenizer)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_report(
        out,
        loaded,
        known,
        held_out,
        folder=plan.folder,
        tokenizer=tokenizer,
        self_contained=self_contained,
    )
    return Answer({"report": str(out)}, [f"report: {out}"])
