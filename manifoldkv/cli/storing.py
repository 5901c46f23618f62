"""The cache of a prompt in a file, which is read instead of the prompt the next time."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from manifoldkv.codec.blob import read_blob
from manifoldkv.codec.codec import Codec
from manifoldkv.errors import ArgumentError, CacheError
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.runs.files import write_whole

LOG = logging.getLogger(__name__)


@torch.no_grad()
def cache_of_prompt(
    model: PreTrainedModel, plan: CompressionPlan, prompt: Tensor, path: Path
) -> tuple[DynamicCache, int]:
    """Return the cache of a prompt without its last token, and how many tokens the file had of it.

    What is returned is what the file holds in the end: the same prompt is gone on with from the
    same cache, the first time and every other. Tokens that the file lacks are appended to it; the
    cache of another prompt is replaced.

    Parameters
    ----------
    model : PreTrainedModel
        Which reads the tokens that the file lacks.
    plan : CompressionPlan
        Of recipe stored.
    prompt : Tensor
        Token ids, (1, n), int64.
    path : Path
        A file of `Codec.save`, or one that is not there yet.

    Raises
    ------
    ArgumentError
        If the prompt has no token before its last.
    CacheError
        If the file is something else, or of another plan or model: it is left as it is.
    PlanError
        As `Codec`.
    RunError
        If the file cannot be written.
    """
    codec, wanted = Codec(model, plan), prompt[:, :-1]
    if not wanted.numel():
        raise ArgumentError(
            "the cache of a prompt of one token is empty: write more after --prompt"
        )
    blob = _stored(codec, path, wanted)
    known = 0 if blob is None else min(codec.tokens(blob), wanted.shape[1])
    if blob is None or known < wanted.shape[1]:
        LOG.info("reading %d tokens, %d are stored", wanted.shape[1], known)
        cache = DynamicCache(config=model.config) if blob is None else codec.decode(blob)
        model(input_ids=wanted[:, known:], past_key_values=cache, logits_to_keep=1)
        blob = codec.encode(cache, wanted) if blob is None else codec.append(blob, cache, wanted)
        write_whole(path, blob)
    return codec.decode(blob, wanted.shape[1]), known


def _stored(codec: Codec, path: Path, wanted: Tensor) -> bytes | None:
    """Return the blob in a file if one of its tokens and those wanted begins with the other."""
    if not path.exists():
        return None
    blob = read_blob(path)
    try:
        held = codec.input_ids(blob)
    except CacheError as error:
        raise CacheError(f"{path}: {error}; take another file as --cache") from error
    if held is None:
        raise CacheError(f"{path} holds no token ids; take another file as --cache")
    both = min(held.shape[1], wanted.shape[1])
    same = len(held) == 1 and torch.equal(held[:, :both], wanted[:, :both].cpu())
    return blob if same else None
