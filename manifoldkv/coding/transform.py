"""The Fisher-weighted Karhunen-Loève transform of keys or values, and quantizers of its latents."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manifoldkv.activations.moments import SiteMoments
from manifoldkv.basis import Basis, HeadGrouping, detached
from manifoldkv.coding.costs import best_gains, coherent_costs, gaussian_costs
from manifoldkv.coding.mixed import MixedWidths
from manifoldkv.coding.predictor import Input
from manifoldkv.coding.regression import Regression, reduced_rank, square_roots
from manifoldkv.coding.trellis import (
    GAUSSIAN_DISTORTION,
    TrellisCoded,
    codebooks,
    relative_steps,
)
from manifoldkv.coding.uniform import FLOOR, fit_quantizers, floored, quantized
from manifoldkv.modes import in_own_modes

ROUNDING_ERROR = 1e-6
"""Relative rounding error of float32 activations."""
SAMPLES = 4096
"""Number of tokens of a site that quantizers are fitted to."""
TRELLIS_SAMPLES = 1024
"""Number of those that gains of a trellis code are fitted to, since each is searched."""


@dataclass(frozen=True)
class WeightedKLT:
    """Transform to latents whose squared errors cost half their sum, in nats.

    Parameters
    ----------
    down, up : Tensor
        Projections, (D, D), float64. Latents are ``(x - mean - inputs @ weights) @ down``, by
        falling variance.
    mean : Tensor
        Constant part of the prediction, (D,), float64.
    weights : Tensor or None
        Weights of the linear prediction, (inputs, D) or (inputs, rank), float64.
    expansion : Tensor or None
        Second factor of a prediction of low rank, (rank, D), float64.
    latents : Tensor
        Latents of a sample of tokens, (samples, D), float64; 0 in directions without variance.
    """

    down: Tensor
    up: Tensor
    mean: Tensor
    weights: Tensor | None
    expansion: Tensor | None
    latents: Tensor

    @property
    def varying(self) -> Tensor:
        """Return a mask (D,), False for directions that the calibration text does not span."""
        return self.latents.any(dim=0)

    @property
    def rows(self) -> Tensor:
        """Return the number of features that each latent is mapped to, (D,)."""
        return (self.up != 0).sum(dim=0)

    def basis(self, columns: Tensor, grouping: HeadGrouping, step: float = 1.0) -> Basis:
        """Return the basis of latents (int64 indices) in units of `step`, float32."""
        down, up = self.down / step, self.up * step
        return Basis(
            detached(down[:, columns].float().unsqueeze(0)),
            detached(up[:, columns].float().unsqueeze(0)),
            grouping,
        )

    def rounding_costs(self) -> NDArray[np.float64]:
        """Return the cost of uniform quantisers of `WIDTHS` in nats per token, (D, widths).

        Latents without variance cost nothing at any width, and so get no bits.
        """
        varying = self.varying
        scales = _scales(self.latents[:, varying])
        errors = fit_quantizers(self.latents, norms=scales).distortion
        return (coherent_costs(errors) / 2 * varying.unsqueeze(1)).numpy()

    def trellis_costs(self) -> NDArray[np.float64]:
        """Return the cost of trellis codes in nats per token, (D, widths).

        Widths are those of `trellis.GAUSSIAN_DISTORTION`.
        """
        variances = self.latents.square().mean(dim=0)
        return gaussian_costs(variances, GAUSSIAN_DISTORTION).numpy()


def by_token(x: Tensor) -> Tensor:
    """Concatenate the heads of keys or values, (S, H_kv, n, d) to (S·n, D), on the CPU."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1).cpu()


@dataclass(frozen=True)
class SiteDesign:
    """Structure of the transform of a site.

    Parameters
    ----------
    inputs : tuple of Input
        Sites that the keys or values are predicted from.
    blocks : tuple of Tensor
        Indices of the features of every block of the transform, int64; one block of all if empty.
    rank : int or None
        Rank of the prediction; None for full rank.
    """

    inputs: tuple[Input, ...] = ()
    blocks: tuple[Tensor, ...] = ()
    rank: int | None = None


@in_own_modes
def weighted_klt(
    moments: SiteMoments,
    x: Tensor,
    inputs: Tensor | None = None,
    *,
    design: SiteDesign = SiteDesign(),
    samples: int = SAMPLES,
    folds: int = 1,
) -> WeightedKLT:
    """Return the transform of keys or values, or of the residuals of a linear prediction.

    Parameters
    ----------
    moments : SiteMoments
        Moments of the keys or values.
    x : Tensor
        Keys or values with concatenated heads, (tokens, D).
    inputs : Tensor, optional
        Inputs of a linear prediction of the same tokens, (tokens, inputs).
    design : SiteDesign
        Blocks of the transform and rank of the prediction.
    samples : int
        Largest number of tokens whose latents are returned.
    folds : int
        Number of folds of a cross-validation, which predicts each fold by a regression on the
        others, so that residuals of other text are not underestimated. 1 is one regression on all
        tokens, the only one of low rank.
    """
    weights, expansion, mean = None, None, moments.mean
    keys_or_values = x
    if inputs is not None:
        fit = Regression.of(x, inputs, folds)
        mean, weights = fit.on_all()
        whole = weights
        if design.rank is not None:
            weights, expansion = reduced_rank(weights, fit.gram, moments.fisher, design.rank)
            whole = weights @ expansion
            mean = fit.means[0] - fit.means[1] @ whole
        residuals = x - (mean + inputs.double() @ whole).to(x)
        x = residuals if folds == 1 else fit.residuals_by_fold()
        second = (x.mT @ x).double() / len(x)
    else:
        second = moments.covariance
    down, up = _block_transform(moments.fisher, second, design.blocks)
    size = float(_deviations(sampled(keys_or_values, samples).double() @ down).max())
    residuals = sampled(x, samples).double()
    if inputs is None:
        residuals = residuals - mean
    latents = without_noise(residuals @ down, size)
    return WeightedKLT(down, up, mean, weights, expansion, latents)


def spectrum(fisher: Tensor, second: Tensor, blocks: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return the variances of the latents of a transform, falling, and the rows of their blocks.

    Parameters
    ----------
    fisher, second : Tensor
        Fisher matrix and second moment of the residuals, (D, D), float64.
    blocks : tuple of Tensor
        As in `SiteDesign`.

    Returns
    -------
    tuple of Tensor
        (D,) each, float64 and int64.
    """
    variances, rows = [], []
    by_size: dict[int, list[Tensor]] = {}
    for block in blocks or (torch.arange(len(second)),):
        by_size.setdefault(len(block), []).append(block)
    for size, alike in by_size.items():
        features = torch.stack(alike)  # (blocks, size)
        pairs = features.unsqueeze(2), features.unsqueeze(1)
        root, _ = square_roots(fisher[pairs])
        values = torch.linalg.eigvalsh(root @ second[pairs] @ root)
        variances.append(values.clamp(min=0).flatten())
        rows.append(torch.full((values.numel(),), size))
    joined, order = torch.cat(variances).sort(descending=True, stable=True)
    return joined, torch.cat(rows)[order]


def _block_transform(
    fisher: Tensor, second: Tensor, blocks: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Return the projections of a transform, (D, D) each, latents by falling variance."""
    down, up = torch.zeros_like(second), torch.zeros_like(second)
    variances, start = [], 0
    for block in blocks or (torch.arange(len(second)),):
        root, inverse = square_roots(fisher[block][:, block])
        values, directions = torch.linalg.eigh(root @ second[block][:, block] @ root)
        columns = torch.arange(start, start + len(block))
        down[block.unsqueeze(1), columns] = root @ directions
        up[block.unsqueeze(1), columns] = inverse @ directions
        variances.append(values)
        start += len(block)
    order = torch.cat(variances).argsort(descending=True, stable=True)
    return down[:, order], up[:, order]


def without_noise(latents: Tensor, size: float) -> Tensor:
    """Return latents (tokens, D) with zeros in directions that vary by rounding errors alone.

    `size` is the largest root mean square of keys or values in these coordinates, mean included.
    """
    deviations = _deviations(latents)
    floor = max(FLOOR * float(deviations.max()), ROUNDING_ERROR * size)
    return latents * (deviations > floor)


def sampled(x: Tensor, samples: int) -> Tensor:
    """Return at most `samples` rows of x (tokens, D), evenly spaced."""
    if len(x) <= samples:
        return x
    return x[torch.linspace(0, len(x) - 1, samples).long()]


def mixed_widths(
    site: WeightedKLT, bits: NDArray[Any], grouping: HeadGrouping
) -> tuple[Basis, MixedWidths]:
    """Return basis and quantizer of the latents that have bits, widest first.

    Parameters
    ----------
    site : WeightedKLT
        Transform of keys or values.
    bits : ndarray
        Bits of each latent, (D,).
    grouping : HeadGrouping
        Single group of all heads.
    """
    columns, chosen = _stored(site, bits, grouping)
    chosen = chosen.to(torch.uint8)
    step, deviation, gain = _quantizers(site.latents[:, columns], chosen)
    return site.basis(columns, grouping), MixedWidths(chosen, step, deviation, gain)


def trellis_coded(
    site: WeightedKLT, bits: NDArray[Any], grouping: HeadGrouping
) -> tuple[Basis, TrellisCoded]:
    """Return basis and trellis code of the latents that have bits; parameters as above."""
    columns, chosen = _stored(site, bits, grouping)
    latents = sampled(site.latents[:, columns], TRELLIS_SAMPLES)
    stored = latents[:, chosen > 0]
    deviation = torch.ones(len(chosen))
    deviation[: stored.shape[1]] = floored(_deviations(stored)).float()
    step = deviation / float(_scales(stored).square().mean().sqrt())
    step[: stored.shape[1]] *= relative_steps(chosen[chosen > 0], codebooks())
    code = TrellisCoded(chosen, step, deviation, torch.ones(len(chosen)))
    gain = best_gains(latents, code.reconstruct(latents)).float()
    return site.basis(columns, grouping), replace(code, gain=gain)


def _stored(site: WeightedKLT, bits: NDArray[Any], grouping: HeadGrouping) -> tuple[Tensor, Tensor]:
    """Return the indices of the latents that have bits, widest first, and their bits, float32."""
    of_latents = torch.from_numpy(bits).float() * site.varying
    order = of_latents.argsort(descending=True, stable=True)
    stored = int((of_latents > 0).sum())
    # Every head has as many latents: some of 0 bits may be among them.
    columns = order[: max(1, -(-stored // grouping.width)) * grouping.width]
    return columns, of_latents[columns]


def _quantizers(latents: Tensor, bits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return steps, deviations and gains of latents (tokens, features), float32."""
    stored = int((bits > 0).sum())
    columns = latents.shape[1]
    latents = latents[:, :stored]
    scale = _scales(latents)
    steps = torch.ones(columns, dtype=torch.float64)
    gains, deviations = torch.ones_like(steps), torch.ones_like(steps)
    for width in set(bits[:stored].tolist()):
        chosen = bits == width
        x = latents[:, chosen[:stored]]
        steps[chosen] = fit_quantizers(x, (0, width), scale).step[:, 1]
        gains[chosen] = best_gains(x, scale * quantized(x / scale, steps[chosen], width))
    deviations[:stored] = floored(_deviations(latents))
    return steps.float(), deviations.float(), gains.float()


def _scales(latents: Tensor) -> Tensor:
    """Return the scale of every token, (tokens, 1), positive: rms of whitened latents."""
    if not latents.shape[1]:
        return latents.new_ones(len(latents), 1)
    whitened = latents / floored(_deviations(latents))
    smallest = torch.finfo(torch.float16).tiny  # as it is stored
    return whitened.square().mean(dim=1, keepdim=True).sqrt().clamp(min=smallest)


def _deviations(latents: Tensor) -> Tensor:
    return latents.square().mean(dim=0).sqrt()
