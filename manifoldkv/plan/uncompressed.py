"""Checks of an uncompressed cache whose tokens a compressed one takes over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from manifoldkv.core.errors import CacheError
from manifoldkv.core.windows import cached_tokens
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan


def check_stock(
    stock: Any, plan: CompressionPlan, dtype: torch.dtype, devices: list[torch.device]
) -> None:
    """Raise `CacheError` unless a cache is the stock cache of a model, with all tokens in reach.

    Parameters
    ----------
    stock : Any
        `DynamicCache` to check; one without tokens fits every plan.
    plan : CompressionPlan
        Plan of the compressed cache.
    dtype : torch.dtype
        Of the model.
    devices : list of torch.device
        Of every layer.

    Raises
    ------
    CacheError
        If it is another kind of cache, incomplete, or of another model, dtype or device.
    """
    if not isinstance(stock, DynamicCache):
        raise CacheError(
            f"a compressed cache takes the tokens of a DynamicCache, not of {type(stock).__name__}"
            ": fill a DynamicCache(config=model.config)"
        )
    for index, layer in enumerate(stock.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise CacheError(
                f"layer {index} of the stock cache is a {type(layer).__name__}, which does not "
                "hold uncompressed keys and values: fill a DynamicCache(config=model.config)"
            )
    seen = {layer.get_seq_length() for layer in stock.layers}
    if seen <= {0}:
        return
    if len(seen) > 1:
        raise CacheError(
            f"the layers of the stock cache have seen {min(seen)} to {max(seen)} tokens, as after "
            "a call that ended in an error: fill another"
        )
    if len(stock.layers) != len(plan.layers):
        raise CacheError(
            f"the stock cache has {len(stock.layers)} layers, the plan {len(plan.layers)}"
        )
    (tokens,), batch = seen, stock.layers[0].keys.shape[0]
    for index, (layer, planned) in enumerate(zip(stock.layers, plan.layers, strict=True)):
        for tensor in (layer.keys, layer.values):
            _check_tensor(tensor, index, planned, (batch, layer.keys.shape[-2]))
            # A device may be named without its number, which a tensor's never is.
            place = torch.empty(0, dtype=dtype, device=devices[index])
            if (tensor.dtype, tensor.device) != (place.dtype, place.device):
                raise CacheError(
                    f"layer {index} of the stock cache is in {tensor.dtype} on {tensor.device}, "
                    f"the model in {place.dtype} on {place.device}"
                )
        held, needed = layer.keys.shape[-2], cached_tokens(tokens, planned.window)
        if held < needed:
            raise CacheError(
                f"layer {index} of the stock cache holds {held} tokens, where later ones see "
                f"{needed}: fill a DynamicCache(config=model.config)"
            )


def _check_tensor(tensor: Tensor, index: int, plan: LayerPlan, size: tuple[int, int]) -> None:
    """Refuse keys or values that are not (B, H_kv, n, d), B and n being `size`."""
    batch, tokens = size
    expected = (batch, plan.key.grouping.heads, tokens, plan.key.head_dim)
    if tuple(tensor.shape) != expected:
        raise CacheError(
            f"layer {index} of the stock cache holds a tensor of {tuple(tensor.shape)}, the model "
            f"has {expected}"
        )


def checked_positions(position_ids: Any, stock: DynamicCache | None) -> Tensor:
    """Return where the tokens of a stock cache were placed, (1 or B, n).

    Parameters
    ----------
    position_ids : Tensor or None
        As the model was given them, integers (1 or B, n); None for 0, …, n - 1.
    stock : DynamicCache or None
        After `check_stock`; None holds no tokens.

    Raises
    ------
    CacheError
        If they are not the positions of these tokens.
    """
    tokens = 0 if stock is None else stock.get_seq_length()
    if position_ids is None:
        return torch.arange(tokens).unsqueeze(0)
    if stock is None or not tokens:
        raise CacheError("position_ids need an uncompressed cache with tokens")
    if not isinstance(position_ids, Tensor) or position_ids.dtype not in (torch.int64, torch.int32):
        found = getattr(position_ids, "dtype", type(position_ids).__name__)
        raise CacheError(f"position_ids are a tensor of int64 or int32, not {found}")
    batch = stock.layers[0].keys.shape[0]
    if tuple(position_ids.shape) not in {(1, tokens), (batch, tokens)}:
        raise CacheError(
            f"position_ids are {tuple(position_ids.shape)}, must be (1, {tokens}) or "
            f"({batch}, {tokens}): one for every token that the stock cache has seen"
        )
    return position_ids


def unpadded(positions: Tensor) -> Tensor:
    """Return the mask of unpadded tokens, bool (1 or B, n), of positions (1 or B, n).

    The positions of a text rise from 0. Those that `generate` gives to the padding before it do not
    rise. A text has at least one token.
    """
    rises = positions.diff(dim=1) > 0
    return torch.cat([rises, torch.ones_like(rises[:, :1])], dim=1).long().cumsum(dim=1) > 0
