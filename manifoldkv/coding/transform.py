"""The Fisher-weighted Karhunen-Loève transform of keys or values, and quantizers of its latents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manifoldkv.activations.moments import SiteMoments
from manifoldkv.basis import Basis, HeadGrouping, detached
from manifoldkv.coding.allocation import (
    FLOOR,
    TINY,
    best_gains,
    coherent_costs,
    fit_quantizers,
    floored,
    pack_size,
    quantized,
)
from manifoldkv.coding.mixed import MixedWidths

RIDGE = 1e-2
"""Ridge of a Fisher matrix, relative to the mean of its diagonal: few tokens leave it singular."""
PREDICTION_RIDGE = 3e-3
"""Ridge of a linear prediction, relative to the power of each input."""
ROUNDING_ERROR = 1e-6
"""Relative rounding error of float32 activations."""
SAMPLES = 4096
"""Number of tokens of a site that quantizers are fitted to."""


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
        Weights of the linear prediction, (inputs, D), float64.
    latents : Tensor
        Latents of a sample of tokens, (samples, D), float64; 0 in directions without variance.
    """

    down: Tensor
    up: Tensor
    mean: Tensor
    weights: Tensor | None
    latents: Tensor

    @property
    def varying(self) -> Tensor:
        """Return a mask (D,), False for directions that the calibration text does not span."""
        return self.latents.any(dim=0)

    def basis(self, columns: Tensor, grouping: HeadGrouping, step: float = 1.0) -> Basis:
        """Return the basis of latents (int64 indices) in units of `step`, float32."""
        down, up = self.down / step, self.up * step
        return Basis(
            detached(down[:, columns].float().unsqueeze(0)),
            detached(up[:, columns].float().unsqueeze(0)),
            grouping,
        )

    def costs(self, widths: tuple[int, ...]) -> NDArray[np.float64]:
        """Return the cost of rounding in nats per token, by pack and width, (packs, widths).

        Latents without variance cost nothing at any width, and so get no bits.
        """
        varying = self.varying
        fitted = fit_quantizers(self.latents, widths, _scales(self.latents[:, varying]))
        costs = coherent_costs(fitted.distortion) / 2 * varying.unsqueeze(1)
        return costs.unflatten(0, (-1, pack_size(widths))).sum(dim=1).numpy()


def by_token(x: Tensor) -> Tensor:
    """Concatenate the heads of keys or values, (S, H_kv, n, d) to (S·n, D), on the CPU."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1).cpu()


def weighted_klt(
    moments: SiteMoments,
    x: Tensor,
    inputs: Tensor | None = None,
    *,
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
    samples : int
        Largest number of tokens whose latents are returned.
    folds : int
        Number of folds of a cross-validation, which predicts each fold by a regression on the
        others, so that residuals of other text are not underestimated. 1 is one regression on all
        tokens.
    """
    weights, mean = None, moments.mean
    keys_or_values = x
    if inputs is not None:
        fit = _Regression.of(x, inputs, folds)
        mean, weights = fit.on_all()
        residuals = x - (mean + inputs.double() @ weights).to(x)
        x = residuals if folds == 1 else fit.residuals_by_fold()
        second = (x.mT @ x).double() / len(x)
    else:
        second = moments.covariance
    root, inverse = _square_roots(moments.fisher)
    directions = torch.linalg.eigh(root @ second @ root).eigenvectors.flip(-1)
    down = root @ directions
    size = float(_deviations(sampled(keys_or_values, samples).double() @ down).max())
    residuals = sampled(x, samples).double()
    if inputs is None:
        residuals = residuals - mean
    latents = without_noise(residuals @ down, size)
    return WeightedKLT(down, inverse @ directions, mean, weights, latents)


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
    site: WeightedKLT, bits: NDArray[np.int64], widths: tuple[int, ...], grouping: HeadGrouping
) -> tuple[Basis, MixedWidths]:
    """Return basis and quantizer of the latents that have bits, widest first.

    Parameters
    ----------
    site : WeightedKLT
        Transform of keys or values.
    bits : ndarray
        Bits of each pack of latents, (packs,).
    widths : tuple of int
        Possible widths of a latent in bits.
    grouping : HeadGrouping
        Single group of all heads.
    """
    of_latents = torch.from_numpy(bits).repeat_interleave(pack_size(widths)) * site.varying
    order = of_latents.argsort(descending=True, stable=True)
    stored = int((of_latents > 0).sum())
    # Every head has as many latents: some of 0 bits may be among them.
    columns = order[: max(1, -(-stored // grouping.width)) * grouping.width]
    chosen = of_latents[columns].to(torch.uint8)
    step, deviation, gain = _quantizers(site.latents[:, columns], chosen)
    return site.basis(columns, grouping), MixedWidths(chosen, step, deviation, gain)


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


@dataclass(frozen=True)
class _Regression:
    """Ridge regression of x (tokens, D) on inputs (tokens, inputs), and its sums by fold.

    Parameters
    ----------
    x, inputs : tuple of Tensor
        Centred outputs and inputs of every fold.
    means : tuple of Tensor
        Means over all tokens, (D,) and (inputs,), float64.
    grams, crossed : tuple of Tensor
        ``inputsᵀ inputs`` and ``inputsᵀ x`` of every fold, float64.
    """

    x: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    means: tuple[Tensor, Tensor]
    grams: tuple[Tensor, ...]
    crossed: tuple[Tensor, ...]

    @classmethod
    def of(cls, x: Tensor, inputs: Tensor, folds: int) -> _Regression:
        """Cut the tokens into neighbouring folds of about one size."""
        x_mean, input_mean = x.mean(dim=0), inputs.mean(dim=0)
        xs = (x - x_mean).tensor_split(folds)
        parts = (inputs - input_mean).tensor_split(folds)
        return cls(
            xs,
            parts,
            (x_mean.double(), input_mean.double()),
            tuple((part.mT @ part).double() for part in parts),
            tuple((part.mT @ y).double() for part, y in zip(parts, xs, strict=True)),
        )

    def on_all(self) -> tuple[Tensor, Tensor]:
        """Return mean and weights, (D,) and (inputs, D), float64."""
        gram, crossed = self._sums()
        weights = _ridge(gram, crossed, self._smallest_power)
        return self.means[0] - self.means[1] @ weights, weights

    def _sums(self) -> tuple[Tensor, Tensor]:
        return torch.stack(self.grams).sum(dim=0), torch.stack(self.crossed).sum(dim=0)

    @property
    def _smallest_power(self) -> float:
        """Return the root of the least power that an input is scaled by: others carry nothing."""
        return FLOOR * float(self._sums()[0].diagonal().max()) ** 0.5 + TINY

    def residuals_by_fold(self) -> Tensor:
        """Return the residuals of every fold by a regression on all others, (tokens, D)."""
        tokens = sum(len(x) for x in self.x)
        gram, crossed = self._sums()
        residuals = []
        for fold, (x, inputs) in enumerate(zip(self.x, self.inputs, strict=True)):
            # All tokens together have means of 0, so that the others' are those of this fold.
            others = max(1, tokens - len(x))  # a single token has no others
            x_mean = -x.sum(dim=0).double() / others
            input_mean = -inputs.sum(dim=0).double() / others
            fold_gram = gram - self.grams[fold] - others * torch.outer(input_mean, input_mean)
            fold_crossed = crossed - self.crossed[fold] - others * torch.outer(input_mean, x_mean)
            weights = _ridge(fold_gram, fold_crossed, self._smallest_power)
            expected = x_mean - input_mean @ weights + inputs.double() @ weights
            residuals.append(x - expected.to(x))
        return torch.cat(residuals)


def _ridge(gram: Tensor, crossed: Tensor, smallest_power: float) -> Tensor:
    """Return the weights of a ridge regression, (inputs, D)."""
    powers = gram.diagonal().clamp(min=0).sqrt().clamp(min=smallest_power)
    scaled = gram / powers / powers.unsqueeze(1)
    scaled += PREDICTION_RIDGE * torch.eye(len(gram), dtype=gram.dtype)
    return torch.linalg.solve(scaled, crossed / powers.unsqueeze(1)) / powers.unsqueeze(1)


def _square_roots(fisher: Tensor) -> tuple[Tensor, Tensor]:
    """Return the square root of a regularised Fisher matrix, and the inverse of that."""
    values, vectors = torch.linalg.eigh(fisher)
    ridge = RIDGE * values.clamp(min=0).mean().clamp(min=torch.finfo(torch.float32).tiny)
    roots = (values.clamp(min=0) + ridge).sqrt()
    return (vectors * roots) @ vectors.mT, (vectors / roots) @ vectors.mT


def _scales(latents: Tensor) -> Tensor:
    """Return the scale of every token, (tokens, 1), positive: rms of whitened latents."""
    if not latents.shape[1]:
        return latents.new_ones(len(latents), 1)
    whitened = latents / floored(_deviations(latents))
    smallest = torch.finfo(torch.float16).tiny  # as it is stored
    return whitened.square().mean(dim=1, keepdim=True).sqrt().clamp(min=smallest)


def _deviations(latents: Tensor) -> Tensor:
    return latents.square().mean(dim=0).sqrt()
