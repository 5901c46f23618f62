"""Smaller plans of the leading columns of the bases of a plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from manifoldkv.basis import Basis
from manifoldkv.errors import ArgumentError
from manifoldkv.modes import in_own_modes
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.site import SitePlan

HALVINGS = 40
"""Steps of the bisection for the scale of all ranks."""


@in_own_modes
def truncated_layers(
    layers: Sequence[LayerPlan], sinks: int, tokens: int, ratio: float
) -> tuple[LayerPlan, ...]:
    """Return layers with all ranks scaled by one factor, the largest whose ratio fits.

    Parameters
    ----------
    layers : sequence of LayerPlan
        Layers whose bases are all of the plan.
    sinks, tokens : int
        Uncompressed first tokens and length of the text that the ratio holds for.
    ratio : float
        Largest ratio.

    Raises
    ------
    ArgumentError
        If the ratio is not positive, larger than that of the layers or smaller than that of ranks
        of 1.
    """
    full = sum(layer.full_elements(tokens) for layer in layers)

    def scaled(factor: float) -> tuple[tuple[LayerPlan, ...], float]:
        smaller = tuple(
            LayerPlan(_leading(layer.key, factor), _leading(layer.value, factor), layer.window)
            for layer in layers
        )
        return smaller, sum(layer.elements(tokens, sinks) for layer in smaller) / full

    most, least = scaled(1)[1], scaled(0)[1]
    if not least <= ratio <= most:
        raise ArgumentError(
            f"ratio must be >= {least:.4g} and <= {most:.4g}, that of the plan, got {ratio:g}"
        )
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if scaled(middle)[1] <= ratio else (low, middle)
    return scaled(high if scaled(high)[1] <= ratio else low)[0]


def _leading(planned: SitePlan, factor: float) -> SitePlan:
    """Return the leading columns of a site, one per head at least; all of an identity."""
    basis = planned.basis
    identity = torch.eye(basis.down.shape[1]).to(basis.down)
    if basis.rank == basis.head_dim and bool((basis.down == identity).all()):
        return planned
    columns = max(1, int(factor * basis.rank)) * basis.grouping.width
    down = basis.down[..., :columns].contiguous()
    up = down if basis.orthonormal else basis.up[..., :columns].contiguous()
    return SitePlan(Basis(down, up, basis.grouping))
