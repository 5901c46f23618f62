"""The stored cache of a prompt, read in place of the prompt by later runs."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from manifoldkv.core.errors import ArgumentError, CacheError
from manifoldkv.core.files import write_whole
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.serve.codec.blob import read_blob
from manifoldkv.serve.codec.codec import Codec

LOG = logging.getLogger(__name__)


@torch.no_grad()
def cache_of_prompt(
    model: PreTrainedModel, plan: CompressionPlan, prompt: Tensor, path: Path
) -> tuple[DynamicCache, int]:
    """Return the cache of a prompt, (1, n), without its last token, and its tokens in the file.

    The cache is decoded from the file in every run, the first included, so that all runs continue a
    prompt alike. Tokens that the file lacks are appended; the cache of another prompt is replaced.

    Raises
    ------
    ArgumentError
        If the prompt has no token before its last.
    CacheError
        If the file is something else, or of another plan or model; it is not changed.
    RunError
        If the file cannot be written.
    """
    codec, wanted = Codec(model, plan), prompt[:, :-1]
    if not wanted.numel():
        raise ArgumentError(
            "the cache of a prompt of one token is empty: write more after --prompt"
        )
    blob = _stored(codec, path, wanted)
    resumed = 0 if blob is None else min(codec.tokens(blob), wanted.shape[1])
    if blob is None or resumed < wanted.shape[1]:
        LOG.info("reading %d tokens, %d are stored", wanted.shape[1], resumed)
        cache = DynamicCache(config=model.config) if blob is None else codec.decode(blob)
        model(input_ids=wanted[:, resumed:], past_key_values=cache, logits_to_keep=1)
        blob = codec.encode(cache, wanted) if blob is None else codec.append(blob, cache, wanted)
        write_whole(path, blob)
    return codec.decode(blob, wanted.shape[1]), resumed


def _stored(codec: Codec, path: Path, wanted: Tensor) -> bytes | None:
    """Return the blob in a file if its tokens and those wanted agree as far as both reach."""
    if not path.exists():
        return None
    blob = read_blob(path)
    try:
        ids = codec.input_ids(blob)
    except CacheError as error:
        raise CacheError(f"{path}: {error}; take another file as --cache") from error
    if ids is None:
        raise CacheError(f"{path} holds no token ids; take another file as --cache")
    both = min(ids.shape[1], wanted.shape[1])
    same = len(ids) == 1 and torch.equal(ids[:, :both], wanted[:, :both].cpu())
    return blob if same else None
