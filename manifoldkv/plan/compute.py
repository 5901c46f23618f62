"""Compute of a plan: multiplications of a decode step for every cached token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manifoldkv.core.basis import Rotary, Site
from manifoldkv.core.errors import PlanError
from manifoldkv.core.modes import in_own_modes
from manifoldkv.plan.composition import sources
from manifoldkv.plan.formats.quantizers import Unquantized
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.predictor import Input
from manifoldkv.plan.site import SitePlan


@dataclass(frozen=True)
class AttentionShape:
    """Shape of a model's attention beside that of its cache.

    Parameters
    ----------
    query_heads : int
        Number of query heads of a layer, H_q.
    rotary_dim : int
        Number of features of a head that are rotated.
    """

    query_heads: int
    rotary_dim: int


def check_shape(shape: AttentionShape, layers: Sequence[LayerPlan]) -> None:
    """Raise `PlanError` unless the shape of attention fits the layers of a plan."""
    for layer in layers:
        heads, head_dim = layer.key.grouping.heads, layer.key.head_dim
        if shape.query_heads < 1 or shape.query_heads % heads:
            raise PlanError(
                f"query heads must be a multiple of {heads} KV heads, got {shape.query_heads}"
            )
        if not 0 <= shape.rotary_dim <= head_dim:
            raise PlanError(
                f"rotary_dim must be between 0 and head_dim {head_dim}, got {shape.rotary_dim}"
            )


def stock_multiplications(layer: LayerPlan, shape: AttentionShape) -> int:
    """Return the multiplications of a cached token in stock attention: scores and mixture."""
    return 2 * shape.query_heads * layer.key.head_dim


@in_own_modes
def relative_compute(
    layers: Sequence[LayerPlan], shape: AttentionShape, rotary: Rotary, tokens: int
) -> float:
    """Return the multiplications of a decode step after a text over those of stock attention.

    Parameters
    ----------
    layers, shape, rotary
        As in `multiplications`.
    tokens : int
        Of the text; a layer with a sliding window holds fewer.
    """
    total = stock = 0
    for index, layer in enumerate(layers):
        cached = layer.cached_tokens(tokens)
        total += cached * multiplications(layers, index, shape, rotary)
        stock += cached * stock_multiplications(layer, shape)
    return total / stock


def multiplications(
    layers: Sequence[LayerPlan], index: int, shape: AttentionShape, rotary: Rotary
) -> int:
    """Return the multiplications of a cached token of a layer in a decode step of one sequence.

    Counted are scales of latents, maps of latents to keys, predictions, the rotation of keys,
    scores and mixtures. Products that do not grow with the number of tokens are not.

    Parameters
    ----------
    layers : sequence of LayerPlan
        All layers of the plan.
    index : int
        Of the layer.
    shape : AttentionShape
        Of the model.
    rotary : {"pre", "post"}
        Whether keys are stored before or after rotation.
    """
    layer = layers[index]
    heads = shape.query_heads
    if rotary == "post" or not (layer.key.of_all_heads and layer.value.of_all_heads):
        return sum(_by_group(site, planned, shape, rotary) for site, planned in layer.sites)

    def of(one: Input) -> SitePlan:
        below, site = one
        return layers[index - below].of(site)

    key = layer.key
    total = _scales(key) + block_entries(key.basis.up[0][:, : key.latents])
    total += 2 * shape.rotary_dim * key.grouping.heads + heads * key.head_dim
    if key.predictor is not None:
        predicted = sources(layers, index, "key") - {(0, "key")}
        rank = key.predictor.rank
        total += key.features * rank
        total += sum(_scales(of(one)) + rank * of(one).latents for one in predicted)
    for one in sources(layers, index, "value"):
        # Scales are multiplied by weights, not by latents.
        total += heads * (of(one).latents + (_scales(of(one)) > 0))
    return total


def block_entries(matrix: Tensor) -> int:
    """Return the entries of the blocks of a block-diagonal matrix, up to the order of its axes.

    Blocks are the connected components of rows and columns that share an entry other than 0.
    """
    linked = (matrix != 0).float()
    label = torch.arange(1, len(matrix) + 1, dtype=torch.float32)  # by row
    while True:
        by_column = (linked * label.unsqueeze(1)).amax(dim=0) if matrix.numel() else label[:0]
        spread = (linked * by_column).amax(dim=1).maximum(label) if matrix.numel() else label
        if torch.equal(spread, label):
            break
        label = spread
    return sum(
        int((label == one).sum()) * int((by_column == one).sum()) for one in by_column.unique()
    )


def _by_group(site: Site, planned: SitePlan, shape: AttentionShape, rotary: Rotary) -> int:
    """Return the multiplications of a site whose heads have bases of their own."""
    heads, groups = planned.grouping.heads, planned.grouping.heads // planned.grouping.width
    scales = groups * _scales(planned)
    if site == "value" or rotary == "post":
        return scales + shape.query_heads * planned.latents
    identity = torch.eye(*planned.basis.up.shape[1:], dtype=planned.basis.up.dtype)
    kept = planned.grouping.width == 1 and bool((planned.basis.up == identity).all())
    rebuilt = 0 if kept else planned.features * planned.latents
    rotated = 2 * shape.rotary_dim * heads
    return scales + rebuilt + rotated + shape.query_heads * planned.head_dim


def _scales(planned: SitePlan) -> int:
    return 0 if isinstance(planned.quantizer, Unquantized) else planned.latents
