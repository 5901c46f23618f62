"""Costs of the errors of quantized latents, and the gains that minimise them."""

from __future__ import annotations

import torch
from torch import Tensor

from manifoldkv.plan.formats.uniform import TINY

COHERENCE = 3.0
"""Cost of an error proportional to the latent, relative to that of noise of equal power.

Attention averages noise over many tokens, but not a common shrinkage. Of 1, 2, 4 and 16 the two in
the middle diverged least on a language model of 135 million parameters. At a thirty-second of the
cache, trellis-coded, it diverges by 0.195 and 0.211 nats (two texts) with 1.7, by 0.167 and 0.182
with 3, and by 0.164 and 0.191 with 5.
"""


def coherent_costs(distortion: Tensor, coherence: float = COHERENCE) -> Tensor:
    """Return the cost of distortions whose coherent part costs more than their noise.

    The best quantizer of a latent y of power one with a mean squared error D returns
    ``(1 - D) y`` and noise of power ``D (1 - D)``. Multiplied by a gain g, the coherent error is
    ``1 - g (1 - D)``, whose square counts `coherence` times. With the best g the cost is
    ``coherence D / (coherence (1 - D) + D)``: D itself if coherence is 1, and coherence at 0 bits.

    Parameters
    ----------
    distortion : Tensor
        Mean squared errors, (coordinates, widths); the first column is the power of a latent.
    coherence : float
        Cost of a coherent error relative to that of noise, at least 1.
    """
    power = distortion[:, :1]
    missed = (distortion / power.clamp(min=TINY)).clamp(max=1)
    return power * coherence * missed / (coherence * (1 - missed) + missed)


def gaussian_costs(variances: Tensor, distortion: dict[float, float]) -> Tensor:
    """Return the costs in nats of Gaussian latents (D,), (D, widths).

    `distortion` is the mean squared errors of a latent of variance one, by bits.
    """
    relative = torch.tensor(list(distortion.values()), dtype=variances.dtype)
    return coherent_costs(variances.unsqueeze(1) * relative) / 2


def best_gains(samples: Tensor, reconstructed: Tensor, coherence: float = COHERENCE) -> Tensor:
    """Return the gains (coordinates,) that minimise the cost of quantized latents, positive.

    Parameters
    ----------
    samples, reconstructed : Tensor
        Latents and their reconstructions by a quantizer, (tokens, coordinates).
    coherence : float
        Cost of a coherent error relative to that of noise, at least 1.
    """
    power = samples.square().mean(dim=0).clamp(min=TINY)
    kept = (samples * reconstructed).mean(dim=0) / power
    noise = reconstructed.square().mean(dim=0) / power - kept.square()
    gains = coherence * kept / (coherence * kept.square() + noise).clamp(min=TINY)
    return torch.where(kept > 0, gains, torch.ones_like(gains))
