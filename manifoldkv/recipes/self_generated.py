"""Calibration text sampled from the model itself, where no other text is available.

Samples of a language model are distributed like its training data (Liu et al. 2023, LLM-QAT:
Data-free quantization aware training for large language models, arXiv 2305.17888).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from manifoldkv.core.errors import ModelError
from manifoldkv.core.modes import in_own_modes
from manifoldkv.core.seeds import check_seed
from manifoldkv.models.fingerprint import digest_of_model
from manifoldkv.models.support import unwrapped
from manifoldkv.models.tokens import check_length, positions
from manifoldkv.models.weights import check_finite
from manifoldkv.runs.checkpoints import Checkpoints
from manifoldkv.text.tokens import LENGTH, check_size

LOG = logging.getLogger(__name__)
OWN_SEQUENCES = 16
BATCH_SIZE = 16
"""Number of sequences sampled together."""


@in_own_modes
@torch.no_grad()
def own_text(
    model: PreTrainedModel,
    sequences: int = OWN_SEQUENCES,
    length: int | None = None,
    *,
    seed: int = 0,
    folder: Path | None = None,
) -> Tensor:
    """Return token ids sampled from a model, (sequences, length), int64, each from a start token.

    Parameters
    ----------
    model : PreTrainedModel
        Causal language model, as from `load_model`.
    sequences : int
        Number of sequences.
    length : int, optional
        Number of tokens of each; 512, or the positions of the model if fewer, if omitted.
    seed : int
        Seed of the samples.
    folder : Path, optional
        Folder of checkpoints, from which the text is read if an earlier run has written it.

    Raises
    ------
    ArgumentError
        If a count is not positive, the length exceeds the positions of the model, or the seed is
        not an integer of 64 bits.
    ModelError
        If a weight or the logits of the model are not finite.
    """
    model = unwrapped(model)
    check_seed(seed)
    if length is None:
        length = min(LENGTH, positions(model))
    check_size(sequences, length)
    check_length(model, length)
    check_finite(model)
    checkpoints = Checkpoints()
    if folder is not None:
        settings = {"model": digest_of_model(model), "shape": [sequences, length], "seed": seed}
        checkpoints = Checkpoints(folder, settings).made_by(own_text)
    text = checkpoints.tensors(
        "own-text", lambda: {"tokens": _text(model, sequences, length, seed)}
    )
    return text["tokens"]


def _text(model: PreTrainedModel, sequences: int, length: int, seed: int) -> Tensor:
    LOG.info("writing %d texts to calibrate on", sequences)
    generator = torch.Generator(model.device).manual_seed(seed)
    counts = [len(batch) for batch in torch.arange(sequences).split(BATCH_SIZE)]
    with tqdm(total=length * len(counts), desc="own text", disable=None, leave=False) as bar:
        return torch.cat([_sampled(model, count, length, generator, bar) for count in counts])


def _sampled(
    model: PreTrainedModel,
    sequences: int,
    length: int,
    generator: torch.Generator,
    bar: tqdm[NoReturn],
) -> Tensor:
    """Return a batch of sequences; sampling continues after an end token."""
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
    """Return start tokens (sequences, 1), random ones if the model has no start or end token."""
    config = model.config.get_text_config()
    shape, device = (sequences, 1), model.device
    for token in (config.bos_token_id, config.eos_token_id):
        if token is not None:
            return torch.full(shape, token[0] if isinstance(token, list) else token, device=device)
    return torch.randint(config.vocab_size, shape, device=device, generator=generator)
