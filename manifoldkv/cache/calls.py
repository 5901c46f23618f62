"""Checks of the arguments of a compressed model, before anything is stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from manifoldkv.cache.layers import CompressedCache, CompressedLayer
from manifoldkv.cache.storage import check_rows
from manifoldkv.errors import CacheError
from manifoldkv.plan.plan import CompressionPlan


def new_tokens(given: dict[str, Any]) -> tuple[int, int]:
    """Return the number of rows and of new tokens of a call."""
    ids = given.get("input_ids")
    inputs = given.get("inputs_embeds") if ids is None else ids
    return (0, 0) if inputs is None else inputs.shape[:2]  # the model itself wants one of them


def check_call(given: dict[str, Any], cache: CompressedCache) -> None:
    """Refuse tokens, positions and masks of other numbers of rows than those of a cache.

    A model would broadcast some of them.
    """
    rows, tokens = new_tokens(given)
    if rows and cache.rows is not None:
        check_rows(cache.rows, rows)
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if positions is not None and tuple(positions.shape[-2:]) not in {(1, tokens), (rows, tokens)}:
        raise CacheError(
            f"position_ids are {tuple(positions.shape)}, must be (1, {tokens}) or "
            f"({rows}, {tokens}): one for every new token"
        )
    for each in mask.values() if isinstance(mask, dict) else [mask]:
        if each is not None and each.shape[0] not in (1, rows):
            raise CacheError(
                f"the attention mask has {each.shape[0]} rows and the new tokens {rows}: pass one "
                "row for each of them"
            )


def check_one_text_a_row(positions: Tensor | None, mask: Any) -> None:
    """Refuse positions that the uncompressed model reads as several texts in a row."""
    if positions is not None and mask is None and bool((positions.diff(dim=-1) != 1).any()):
        raise CacheError(
            "position_ids that do not follow each other stand for several texts in one row, which "
            "a compressed model does not tell apart: give every text a row of its own, or an "
            "attention mask if it is one text"
        )


def check_unpadded(mask: Any) -> None:
    """Refuse a mask with padding, which KIVI's layout would quantize together with tokens."""
    for each in mask.values() if isinstance(mask, dict) else [mask]:
        if each is None:
            continue
        of_last = each if each.ndim == 2 else each[:, :, -1]
        if not bool(of_last.bool().all()):
            raise CacheError(
                "the attention mask has zeros, and what KIVI's layout rounds together would depend "
                "on the padding: call the model with texts of one length, or use the static or the "
                "token layout"
            )


def check_cache(cache: Any, plan: CompressionPlan, dtype: torch.dtype) -> None:
    """Refuse a cache that is not compressed, of another plan or dtype, or incomplete."""
    if not isinstance(cache, CompressedCache):
        raise CacheError(
            f"the model is compressed, and {type(cache).__name__} is not a compressed cache: "
            "pass new_cache(), new_cache(stock) to take a stock cache over, or no cache at all"
        )
    if cache.plan_digest != plan.digest():
        raise CacheError("the cache was made for another plan than this block's")
    if cache.dtype != dtype:
        raise CacheError(
            f"the cache was made for a model in {cache.dtype}, which is now in {dtype}: make a new "
            "one"
        )
    if not cache.is_whole:
        raise CacheError("a call that ended in an error left the cache incomplete: make a new one")


def boolean_masks(mask: Any, tokens: int, cache: CompressedCache, kinds: Sequence[str]) -> Any:
    """Return an attention mask in boolean form.

    Parameters
    ----------
    mask : Tensor, dict of Tensor or None
        Mask (B, n), which is returned unchanged, or (B or 1, 1, m, n); or a dict by kind of layer.
    tokens : int
        Number of new tokens, m.
    cache : CompressedCache
        Cache before the call.
    kinds : sequence of str
        Kind of every layer.

    Raises
    ------
    CacheError
        If the mask has another shape or type, or values other than 0 and -inf.
    """
    if not isinstance(mask, dict):
        return _boolean(mask, tokens, cache.layers)
    by_kind: dict[str, list[CompressedLayer]] = defaultdict(list)
    for kind, layer in zip(kinds, cache.layers, strict=True):
        by_kind[kind].append(layer)
    return {kind: _boolean(each, tokens, by_kind[kind]) for kind, each in mask.items()}


def _boolean(mask: Any, tokens: int, layers: Sequence[CompressedLayer]) -> Tensor | None:
    if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
        return mask
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[1] != 1:
        found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise CacheError(f"an attention mask is (B, n) or (B, 1, m, n), not {found}")
    for layer in layers:
        seen, _ = layer.get_mask_sizes(tokens)
        if mask.shape[2:] != (tokens, seen):
            raise CacheError(
                f"an attention mask of {mask.shape[2]} × {mask.shape[3]} does not fit a layer in "
                f"which {tokens} new tokens see {seen}: pass one of (B, n)"
            )
    return _seen(mask)


def _seen(mask: Tensor) -> Tensor:
    """Return a boolean mask, True for visible tokens."""
    if mask.dtype == torch.bool:
        return mask
    if mask.is_floating_point():
        # Models without -inf use the lowest number of the dtype, or of a shorter one.
        lowest = max(torch.finfo(mask.dtype).min, torch.finfo(torch.bfloat16).min)
        seen = mask == 0
        if bool((seen | (mask <= lowest)).all()):
            return seen
    raise CacheError(
        f"an attention mask in {mask.dtype} may hold 0 and -inf only: what it adds to scores "
        "besides is not supported"
    )
