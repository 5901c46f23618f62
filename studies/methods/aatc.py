"""AATC: principal axes of a layer, bits by reverse water-filling of the attention's error."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manifoldkv.core.errors import ArgumentError
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.interface import AttentionSettings, attend, intercepted
from manifoldkv.models.support import linear_weight
from manifoldkv.plan.formats.quantizer import SCALE_BYTES
from methods.base import Setting, register_method
from methods.windows import WindowMethod, angles_of, calibration_of

MOST_BITS = 16
PROTECTED = 3
"""First layers, which have bits of their own."""
QUANTILE = 0.99
"""Of the sizes of a channel's calibration coordinates: the unit of the channel."""
TYPICAL = 0.95
"""Quantile of a layer's channels that variances and weights of keys are divided by."""


class Channels(NamedTuple):
    """The channels of keys or of values by layer.

    Axes (layers, F, F), a channel per column; units (layers, F), that coordinates are divided by;
    scores (layers, F), the cost of losing a channel.
    """

    axes: Tensor
    units: Tensor
    scores: Tensor

    @classmethod
    def of(cls, x: Tensor, sensitivity: Tensor, *, normalized: bool) -> Channels:
        """Return those of features (layers, tokens, F).

        The squared error e of a token costs ``eᵀ sensitivity e``, (layers, F, F). As in the
        released code, singular values S are split between the two factors, so that a latent's
        variance is √power and its weight has the other √power; variances, and weights if
        `normalized`, are divided by what is typical of a layer.
        """
        x = x.double()
        power, axes = torch.linalg.eigh(x.mT @ x / x.shape[1])
        units = (x @ axes).abs().quantile(QUANTILE, dim=1)
        weights = (axes * (sensitivity.double() @ axes)).sum(dim=1)
        latents = power.clamp(min=0).sqrt()
        weights = weights * latents
        weights = weights / typical(weights) if normalized else weights
        units = units.clamp(min=torch.finfo(torch.float32).tiny)
        return cls(axes.float(), units.float(), latents / typical(latents) * weights)


def typical(of_channels: Tensor) -> Tensor:
    """Return what is typical of the channels of a layer, (layers, 1)."""
    return of_channels.quantile(TYPICAL, dim=1, keepdim=True)


def water_filled(scores: Tensor, bits: int) -> Tensor:
    """Return the bits of every channel (channels,), int64, of the least sum of ``score / 4^b``.

    Every bit goes to the channel that it saves most in: three quarters of its error.
    """
    saved = scores.flatten().unsqueeze(1) * 0.25 ** torch.arange(MOST_BITS, device=scores.device)
    best = saved.flatten().topk(min(bits, saved.numel())).indices // MOST_BITS
    return best.bincount(minlength=scores.numel()).view(scores.shape)


@lru_cache(maxsize=1)
def channels_of(setting: Setting) -> tuple[Channels, Channels]:
    """Return the channels of keys before rotation and of values of the calibration text."""
    keys, values = (x.flatten(1, 2) for x in calibration_of(setting))
    of_keys = Channels.of(keys, queries_of(setting), normalized=True)
    return of_keys, Channels.of(values, outputs_of(setting), normalized=False)


@register_method("aatc")
class AATC(WindowMethod):
    """AATC: whitened channels of a layer, 0 to 16 bits by reverse water-filling, a scale per token.

    Laus et al., arXiv:2608.14191. Whitening and SVD of a projection at full rank give the axes of
    the second moment of its outputs, all heads of a layer together. An error in a channel of keys
    counts by the power of the queries along it, one of values by the output projection. Bits are
    those of the least weighted error over all layers, for keys and for values apart; the first
    `PROTECTED` layers have the mean of all bits, their keys one more. A token's coordinates, in
    units of their channels, are rounded uniformly within their largest, which is stored in 16
    bits. The released code codes tokens in steps of 16; here a token is coded when it leaves the
    newest 128.
    """

    def coded_bytes(self, tokens: int) -> int:
        of_layer = [(bits.sum(dim=1) + 7) // 8 + SCALE_BYTES for bits in self.bits]
        return tokens * int(sum(x.sum() for x in of_layer))

    def facts(self) -> dict[str, float]:
        elements = sum(x.axes.numel() + x.units.numel() for x in channels_of(self.setting))
        return super().facts() | {"basis_bytes": 2 * elements}

    @cached_property
    def bits(self) -> tuple[Tensor, Tensor]:
        """The bits of the channels of keys and of values, (layers, F), int64."""
        tokens, left = self.budget()
        layers, features = self.setting.layers, self.setting.features
        # A layer's bits end in a byte of their own.
        total = int(8 * (left / (2 * tokens) - layers * (SCALE_BYTES + 1)))
        if total < 0:
            raise ArgumentError(f"ratio {self.ratio:g} leaves no bits beside scales: ask for more")
        keys, values = (x.scores for x in channels_of(self.setting))
        return layered(keys, total, features), layered(values, total, 0)

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        of_keys, of_values = channels_of(self.setting)
        return rounded(keys, of_keys, self.bits[0]), rounded(values, of_values, self.bits[1])


def layered(scores: Tensor, total: int, extra: int) -> Tensor:
    """Return the bits of channels (layers, F): those of the first layers apart, with some extra."""
    of_layer = min(total // len(scores) + extra, total // min(PROTECTED, len(scores)))
    first = [water_filled(layer, of_layer) for layer in scores[:PROTECTED]]
    left = total - of_layer * len(first)
    return torch.cat([torch.stack(first), water_filled(scores[PROTECTED:], left)])


def rounded(x: Tensor, channels: Channels, bits: Tensor) -> Tensor:
    """Return x (layers, B, n, F) from the codes of its channels."""
    axes, units = channels.axes.unsqueeze(1), channels.units[:, None, None]
    coordinates = x.float() @ axes / units
    largest = coordinates.abs().amax(dim=-1, keepdim=True).half().float()
    steps = largest.clamp(min=torch.finfo(torch.float32).tiny) * 2.0 ** (1 - bits[:, None, None])
    half = 2.0 ** (bits[:, None, None] - 1)
    codes = torch.minimum(torch.maximum((coordinates / steps).floor(), -half), half - 1)
    held = torch.where(bits[:, None, None] > 0, (codes + 0.5) * steps, 0)
    return (held * units @ axes.mT).to(x.dtype)


def outputs_of(setting: Setting) -> Tensor:
    """Return W_Oᵀ W_O of the query heads of every KV head, (layers, F, F), without mixed heads."""
    blocks = []
    for attention in Decoder.of(setting.model).attentions:
        weight = linear_weight(attention.o_proj).float()
        by_head = weight.unflatten(1, (setting.features // setting.head_dim, -1, setting.head_dim))
        blocks.append(torch.block_diag(*torch.einsum("ohsd,ohse->hde", by_head, by_head)))
    return torch.stack(blocks)


@torch.no_grad()
def queries_of(setting: Setting) -> Tensor:
    """Return E[q qᵀ] of the queries of every KV head before rotation, (layers, F, F)."""
    kv_heads = setting.features // setting.head_dim
    sums = [torch.zeros(0)] * setting.layers

    def record(
        module: nn.Module,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        arguments: dict[str, Any],
    ) -> Tensor:
        unrotated = (
            angles_of(setting.model, 0, queries).inverse().tile(queries, 0, queries.shape[2])
        )
        by_head = unrotated.float().unflatten(1, (kv_heads, -1))
        moments = torch.block_diag(*torch.einsum("bhsnd,bhsne->hde", by_head, by_head))
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        sums[layer] = moments if not len(sums[layer]) else sums[layer] + moments
        settings = AttentionSettings.from_arguments(module, arguments)
        return attend(queries, keys, values, mask, settings).transpose(1, 2)

    with intercepted(setting.model.config):
        for ids in setting.calibration.split(1):
            setting.model(
                input_ids=ids, use_cache=False, logits_to_keep=1, manifoldkv_attend=record
            )
    return torch.stack(sums) / setting.calibration.numel()
