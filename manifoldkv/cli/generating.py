"""The command that writes text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv.cli.answers import Answer
from manifoldkv.cli.app import Generate
from manifoldkv.cli.inputs import load, load_plan
from manifoldkv.cli.storing import cache_of_prompt
from manifoldkv.core.errors import ArgumentError, CacheError
from manifoldkv.core.seeds import check_seed
from manifoldkv.models.tokens import checked_tokens, positions
from manifoldkv.serve.cache import compressed

NEW_TOKENS = 100
COLDEST = 1e-6
"""Below this temperature nothing but the likeliest token is drawn, or logits overflow."""


def generate(options: Generate) -> Answer:
    """Write text on the stock cache, a plan's compressed cache, or the prompt's stored cache."""
    sampling, cache = _sampling(options), options.cache
    if cache is not None and options.plan is None:
        raise CacheError(f"--cache {cache} goes with the --plan of recipe stored that made it")
    model, tokenizer = load(options)
    plan = None
    if options.plan is not None:
        other, attended = options.other_weights, cache is None
        plan = load_plan(options.plan, model, other_weights=other, attended=attended)
    inputs = _tokenized(tokenizer, options.prompt, options.chat).to(model.device)
    ids = inputs["input_ids"]
    sampling["max_new_tokens"] = new_tokens_after(model, ids, options.max_new_tokens)
    torch.manual_seed(options.seed)
    facts: dict[str, Any] = {}
    if plan is None:
        output = model.generate(**inputs, **sampling)
    elif cache is not None:
        held, facts["cached_tokens"] = cache_of_prompt(model, plan, ids, cache)
        facts["cache_bytes"] = cache.stat().st_size
        output = model.generate(**inputs, **sampling, past_key_values=held)
    else:
        with compressed(model, plan) as new_cache:
            latents = new_cache()
            output = model.generate(**inputs, **sampling, past_key_values=latents)
        facts["cache_bytes"] = latents.nbytes()
    shown = output[0, ids.shape[1] :] if options.chat else output[0]
    written = tokenizer.decode(shown, skip_special_tokens=True)
    facts |= {"text": written, "tokens": output.shape[1]}
    return Answer(facts, [written])


def new_tokens_after(model: PreTrainedModel, prompt: Tensor, wanted: int | None) -> int:
    """Return the largest number of new tokens after a prompt (1, length), `wanted` by default.

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


def _sampling(options: Generate) -> dict[str, Any]:
    """Return the sampling arguments of `generate` of transformers.

    Raises
    ------
    ArgumentError
        If the seed or the probability mass is out of range, or nothing is drawn.
    """
    check_seed(options.seed)
    drawn = options.temperature > COLDEST
    if not 0 < options.top_p <= 1:
        raise ArgumentError(f"--top-p {options.top_p:g} is not in (0, 1]")
    if options.top_p < 1 and not drawn:
        raise ArgumentError(
            f"--top-p {options.top_p:g} draws tokens: give a --temperature above 0 too, 1 say"
        )
    if not drawn:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p}


def _tokenized(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool) -> Any:
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
