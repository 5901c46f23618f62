"""A calibration text that a model writes itself: general, and needed by nobody to be found.

What a language model samples is spread like what it was trained on (Liu et al. 2023, LLM-QAT:
Data-free quantization aware training for large language models, arXiv 2305.17888).
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from manifoldkv.errors import ArgumentError, ModelError
from manifoldkv.models.support import unwrapped
from manifoldkv.models.weights import check_finite
from manifoldkv.seeds import check_seed
from manifoldkv.text.tokens import LENGTH, check_length, positions

OWN_SEQUENCES = 16
SEQUENCES_AT_A_TIME = 16
"""Written side by side."""


@torch.no_grad()
def own_text(
    model: PreTrainedModel,
    sequences: int = OWN_SEQUENCES,
    length: int | None = None,
    *,
    seed: int = 0,
) -> Tensor:
    """Return a text that a model writes from its start token on, drawn by its probabilities.

    Parameters
    ----------
    model : PreTrainedModel
        From `load_model`.
    sequences : int
        How many texts.
    length : int, optional
        Tokens in each; 512, or what the model takes, if omitted.
    seed : int
        Of the draws.

    Returns
    -------
    Tensor
        (sequences, length), int64.

    Raises
    ------
    ArgumentError
        If a count is not positive, or a text is longer than the model takes.
        If the seed is none.
    ModelError
        If a weight of the model is not finite, or its predictions are not.
    """
    model = unwrapped(model)
    check_seed(seed)
    if length is None:
        length = min(LENGTH, positions(model))
    if min(sequences, length) < 1:
        raise ArgumentError(
            f"cannot write {sequences} sequences of {length} tokens: both must be at least 1"
        )
    check_length(model, length)
    check_finite(model)
    generator = torch.Generator(model.device).manual_seed(seed)
    counts = [
        min(SEQUENCES_AT_A_TIME, sequences - done)
        for done in range(0, sequences, SEQUENCES_AT_A_TIME)
    ]
    with tqdm(total=length * len(counts), desc="own text", disable=None, leave=False) as bar:
        return torch.cat([_written(model, count, length, generator, bar) for count in counts])


def _written(
    model: PreTrainedModel,
    sequences: int,
    length: int,
    generator: torch.Generator,
    bar: tqdm[NoReturn],
) -> Tensor:
    """Write some texts side by side; behind one that has ended the model goes on with another."""
    ids = [_first_tokens(model, sequences, generator)]
    cache = DynamicCache(config=model.config)
    bar.update()
    while len(ids) < length:
        logits = model(input_ids=ids[-1], past_key_values=cache).logits[:, -1].float()
        probabilities = logits.softmax(dim=-1)
        if not probabilities.isfinite().all():
            raise ModelError(
                f"the predictions of the model are not finite in {model.dtype}: load it in "
                "bfloat16 or float32"
            )
        ids.append(probabilities.multinomial(1, generator=generator))
        bar.update()
    return torch.cat(ids, dim=1).cpu()


def _first_tokens(model: PreTrainedModel, sequences: int, generator: torch.Generator) -> Tensor:
    """Return what texts begin with, (sequences, 1): any token where the model names none."""
    config = model.config.get_text_config()
    shape, device = (sequences, 1), model.device
    for named in (config.bos_token_id, config.eos_token_id):
        if named is not None:
            return torch.full(shape, named[0] if isinstance(named, list) else named, device=device)
    return torch.randint(config.vocab_size, shape, device=device, generator=generator)
