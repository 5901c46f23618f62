"""Quantization of a plan's latents: transforms within each subspace, and static ranges."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Literal, get_args

import torch
from scipy.linalg import hadamard
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.activations.capture import capture
from manifoldkv.basis import Basis, detached, fix_signs
from manifoldkv.coding.integers import Quantization, group_ranges
from manifoldkv.errors import ArgumentError, PlanError
from manifoldkv.models.decoder import Decoder
from manifoldkv.modes import in_own_modes
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.site import SitePlan
from manifoldkv.runs.progress import follow
from manifoldkv.text.sources import TextSource
from manifoldkv.text.tokens import calibration_tokens

LOG = logging.getLogger(__name__)

Rotation = Literal["none", "pca", "hadamard"]
ROTATIONS = get_args(Rotation)


@in_own_modes
def quantize(
    plan: CompressionPlan,
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    quantization: Quantization,
    rotation: Rotation = "hadamard",
) -> CompressionPlan:
    """Return a plan with integer latents.

    An orthogonal transform of the latents does not change their span, and matters only once they
    are rounded, where its effect is large.

    Parameters
    ----------
    plan : CompressionPlan
        Plan with 16-bit latents.
    model, tokens
        As in `compress`. The tokens calibrate the transform and the static ranges, without the sink
        tokens of the plan.
    quantization : Quantization
        Bits and layout.
    rotation : {"hadamard", "pca", "none"}
        Transform of the latents. ``"hadamard"`` spreads every direction evenly over all latents (a
        random orthogonal matrix where the rank is not a power of two), ``"pca"`` sorts directions
        by variance, ``"none"`` keeps the solver's. With the same ranks in every layer, the default
        has the lowest added NLL at 4 bits of the static layout, on both reference models with bases
        of EigenAttention and of the paper's objective, and at 3 bits on three of these four; at 2
        bits ``"none"`` is best throughout, and at 8 bits the differences are small
        (``docs/not-worth-it.md``). On the paper's plan of sequential ranks for reference-llama,
        ``"none"`` has the lowest perplexity (``figures/quantization_llama.png``).

    Raises
    ------
    ArgumentError
        If the transform is unknown.
    PlanError
        If the plan is quantized or of another model, or the calibration sequences have no tokens
        but sink tokens.
    """
    if not plan.rank_only:
        raise PlanError(f"the plan is quantised already: its latents are {plan.formats}")
    decoder = Decoder.of(model)
    plan.check_model(decoder)
    if rotation not in ROTATIONS:
        raise ArgumentError(f"unknown rotation {rotation!r}; known: hadamard, pca, none")
    _, tokens = calibration_tokens(decoder.model, tokens)
    most = max(layer.sink_tokens(plan.sinks) for layer in plan.layers)
    if tokens.shape[1] <= most:
        raise PlanError(
            f"the plan keeps the first {most} tokens uncompressed, and calibration sequences of "
            f"{tokens.shape[1]} have no others to be rounded: take longer ones"
        )
    LOG.info("rounding the latents of %d layers to %d bits", len(plan.layers), quantization.bits)
    layers = []
    for activations in follow(capture(decoder.model, tokens), len(plan.layers)):
        layer = plan.layers[activations.layer]
        sinks = layer.sink_tokens(plan.sinks)  # stored uncompressed: no query reads their latents
        keys = activations.keys_in(plan.rotary)[:, :, sinks:]
        values = activations.values_of()[:, :, sinks:]
        key = _rotated(layer.key.basis, keys, rotation)
        ranges = None
        if quantization.layout == "static":
            latents = key.grouping.split(keys) @ key.down.to(keys)  # (S, G, n, w·r)
            ranges = detached(group_ranges(latents, quantization.group_size, dims=(0, 2)))
        value = _rotated(layer.value.basis, values, rotation)
        rounded_keys = SitePlan(key, quantization.keys(ranges))
        rounded_values = SitePlan(value, quantization.values())
        layers.append(LayerPlan(rounded_keys, rounded_values, layer.window))
    return replace(plan, layers=tuple(layers))


def _rotated(basis: Basis, x: Tensor, rotation: Rotation) -> Basis:
    """Return the basis with transformed latents; x are the keys or values (S, H_kv, n, d)."""
    if rotation == "none":
        return basis
    size = basis.down.shape[2]
    transform = _pca(basis, x) if rotation == "pca" else _hadamard(size).to(basis.down)
    down = detached(basis.down @ transform)
    if not basis.orthonormal:
        return Basis(down, detached(basis.up @ transform), basis.grouping)
    return Basis(down, down, basis.grouping)


def _pca(basis: Basis, x: Tensor) -> Tensor:
    """Return the principal directions of latents, (groups, w·r, w·r), by falling variance."""
    latents = basis.grouping.split(x).double() @ basis.down.to(x.device, torch.float64)
    flat = latents.transpose(0, 1).flatten(1, 2)  # (head groups, S·n, w·r)
    if basis.grouping.groups == 1:
        flat = flat.flatten(0, 1).unsqueeze(0)
    centred = flat - flat.mean(dim=1, keepdim=True)
    directions = torch.linalg.eigh(centred.mT @ centred).eigenvectors.flip(-1)
    return fix_signs(directions).to(basis.down)


def _hadamard(size: int) -> Tensor:
    """Return an orthogonal matrix (size, size) of entries of nearly equal magnitude."""
    generator = torch.Generator().manual_seed(size)
    if size & (size - 1) == 0:
        signs = torch.randint(0, 2, (size, 1), generator=generator) * 2.0 - 1
        return signs * torch.from_numpy(hadamard(size)).float() / size**0.5
    normal = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(normal).Q
