"""Uniform quantizers fitted to samples of latents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manifoldkv.modes import in_own_modes

WIDTHS = tuple(range(9))
"""Bits that a rounded latent may have."""
GAUSSIAN_STEPS = {
    1: 1.596,
    2: 0.9957,
    3: 0.5860,
    4: 0.3352,
    5: 0.1881,
    6: 0.1041,
    7: 0.0569,
    8: 0.0308,
}
"""Best step of a uniform quantizer of b bits for a Gaussian of variance one (Max, 1960)."""
GAUSSIAN_DISTORTION: dict[float, float] = {
    0: 1,
    1: 0.3634,
    2: 0.1188,
    3: 0.03744,
    4: 0.01154,
    5: 3.495e-3,
    6: 1.04e-3,
    7: 3.043e-4,
    8: 8.769e-5,
}
"""Mean squared errors of these quantizers, by bits."""
TINY = torch.finfo(torch.float32).tiny
"""Smallest scale of a latent; steps are larger."""
FLOOR = 1e-5
"""Deviation of a latent, relative to the largest of its site, up to which it counts as rounding
error of float32 activations that do not span its direction."""
FACTORS = 0.6, 3.0, 13
"""Least, largest and number of the steps that are tried, relative to the Gaussian one: heavy tails
want wider steps."""


@dataclass(frozen=True)
class FittedQuantizers:
    """Best steps and errors of quantizers of several widths, fitted to samples of latents.

    Parameters
    ----------
    step : Tensor
        Best step of every latent and width, (coordinates, widths), float64; 0 at 0 bits.
    distortion : Tensor
        Mean squared error, (coordinates, widths), float64; the mean square at 0 bits.
    """

    step: Tensor
    distortion: Tensor


def quantized(x: Tensor, step: Tensor, bits: int) -> Tensor:
    """Return the reconstruction of x by a uniform mid-rise quantizer.

    Codes are ``floor(x / step)`` within ``[-2^(bits - 1), 2^(bits - 1) - 1]`` and are reconstructed
    as the middles of their intervals. Shapes of x and of the positive steps broadcast.
    """
    half = 2 ** (bits - 1)
    return ((x / step).floor().clamp(-half, half - 1) + 0.5) * step


@in_own_modes
def fit_quantizers(
    samples: Tensor, widths: Sequence[int] = WIDTHS, norms: Tensor | None = None
) -> FittedQuantizers:
    """Return the steps of least mean squared error for every width.

    Parameters
    ----------
    samples : Tensor
        Samples of centred latents, (tokens, coordinates).
    widths : sequence of int
        Widths in bits, increasing from 0 to at most 8.
    norms : Tensor, optional
        Scale of every token, (tokens, 1), by which latents are divided before rounding. Steps are
        in units of the scaled latents, errors in units of the samples.
    """
    samples = samples.double()
    norms = torch.ones(1, 1, dtype=torch.float64) if norms is None else norms.double()
    factors = torch.linspace(*FACTORS, dtype=torch.float64).unsqueeze(1)
    scaled = samples / norms
    scale = floored(scaled.square().mean(dim=0).sqrt())
    steps = torch.zeros(samples.shape[1], len(widths), dtype=torch.float64)
    distortion = samples.square().mean(dim=0).unsqueeze(1).repeat(1, len(widths))
    weights = norms.square() / norms.square().mean()
    # The best step of one bit. More bits of the same step only add codes: no width is worse.
    previous = (2 * (weights * scaled.abs()).mean(dim=0)).clamp(min=TINY)
    for index, bits in enumerate(widths):
        if not bits:
            continue
        steps_tried = scale.unsqueeze(0) * GAUSSIAN_STEPS[bits] * factors  # (F, f)
        steps_tried = torch.cat([steps_tried, previous.unsqueeze(0)])
        errors = torch.stack(
            [
                (norms * (scaled - quantized(scaled, step, bits))).square().mean(dim=0)
                for step in steps_tried
            ]
        )
        best = errors.min(dim=0)
        previous = steps_tried.gather(0, best.indices.unsqueeze(0)).squeeze(0)
        steps[:, index] = previous
        distortion[:, index] = best.values
    return FittedQuantizers(steps, distortion)


def floored(deviations: Tensor) -> Tensor:
    """Return root mean squares (coordinates,) of latents, at least `FLOOR` of the largest."""
    largest = max(deviations.tolist(), default=0.0)
    return deviations.clamp(min=max(TINY, FLOOR * largest))
