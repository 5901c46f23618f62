"""Fisher coordinates of the keys or values of one layer, and the codes of their latents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manifoldkv.basis import Basis, HeadGrouping
from manifoldkv.plan.coding import Coding
from manifoldkv.plan.layer import detached
from manifoldkv.ranks.bits import (
    best_gains,
    coherent_costs,
    fit_quantizers,
    pack_size,
    quantized,
)
from manifoldkv.ranks.fisher import SiteMoments

RIDGE = 1e-2
"""Of the mean of a Fisher matrix's diagonal, added to all of it: few tokens leave it singular."""
PREDICTION_RIDGE = 3e-3
"""Of the power of every number that predicts, added to it."""
SAMPLES = 4096
"""Tokens that quantisers are fitted to, of each site."""


@dataclass(frozen=True)
class Coordinates:
    """Fisher coordinates of a site, and what quantisers leave of them.

    Parameters
    ----------
    down, up : Tensor
        (D, D), float64: latents are ``(x - mean - given @ prediction) @ down``, by falling
        variance.
    mean : Tensor or None
        (D,), float64.
    prediction : Tensor or None
        (inputs, D), float64.
    latents : Tensor
        Of some tokens, (samples, D), float64.
    """

    down: Tensor
    up: Tensor
    mean: Tensor | None
    prediction: Tensor | None
    latents: Tensor

    def costs(self, widths: tuple[int, ...], *, norms: bool) -> NDArray[np.float64]:
        """Return the nats that a token's errors cost by pack and width, (packs, widths).

        Parameters
        ----------
        widths : tuple of int
            Bits that a latent may have.
        norms : bool
            Whether latents are divided by the norm of their token.
        """
        fitted = fit_quantizers(self.latents, widths, _norms(self.latents) if norms else None)
        costs = coherent_costs(fitted.distortion) / 2
        return costs.unflatten(0, (-1, pack_size(widths))).sum(dim=1).numpy()


def by_token(x: Tensor) -> Tensor:
    """Return keys or values (S, H_kv, n, d) with all heads side by side, (S·n, D), on the CPU."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1).cpu()


def find_coordinates(
    moments: SiteMoments,
    x: Tensor,
    given: Tensor | None = None,
    *,
    centred: bool = True,
    samples: int = SAMPLES,
) -> Coordinates:
    """Return the Fisher coordinates of a site, or of what a prediction leaves of it.

    Parameters
    ----------
    moments : SiteMoments
        Of its keys or values.
    x : Tensor
        Keys or values, all heads side by side, (tokens, D).
    given : Tensor, optional
        What the same tokens are predicted from, (tokens, inputs); nothing if omitted.
    centred : bool
        Whether a mean is taken away; it is where there is a prediction.
    samples : int
        Tokens of which latents are returned, at most.
    """
    prediction, mean = None, moments.mean if centred else None
    if given is not None:
        prediction = _prediction(x, given)
        mean = x.mean(dim=0).double() - given.mean(dim=0).double() @ prediction
        x = x - (mean + given.double() @ prediction).to(x)
        second = (x.mT @ x).double() / len(x)
    else:
        second = moments.covariance
        if not centred:
            second = second + torch.outer(moments.mean, moments.mean)
    root, inverse = _square_roots(moments.fisher)
    directions = torch.linalg.eigh(root @ second @ root).eigenvectors.flip(-1)
    down, up = root @ directions, inverse @ directions
    left = x[torch.linspace(0, len(x) - 1, min(len(x), samples)).long()].double()
    if given is None and mean is not None:
        left = left - mean
    return Coordinates(down, up, mean, prediction, left @ down)


def coded(
    site: Coordinates,
    bits: NDArray[np.int64],
    widths: tuple[int, ...],
    grouping: HeadGrouping,
    *,
    norms: bool,
) -> tuple[Basis, Coding]:
    """Return basis and coding of the latents that have bits, widest first.

    `bits` are those of the latents of each pack, (packs,).
    """
    of_latents = torch.from_numpy(bits).repeat_interleave(pack_size(widths))
    order = of_latents.argsort(descending=True, stable=True)
    stored = int((of_latents > 0).sum())
    # Every head has as many latents: some of 0 bits may be among them.
    columns = order[: max(1, -(-stored // grouping.width)) * grouping.width]
    chosen = of_latents[columns]
    latents = site.latents[:, columns[:stored]]
    norm = _norms(latents) if norms and stored else torch.ones(1, 1, dtype=torch.float64)
    steps, gains = (torch.ones(len(columns), dtype=torch.float64) for _ in range(2))
    for width in set(chosen[:stored].tolist()):
        own = chosen == width
        x = latents[:, own[:stored]]
        steps[own] = fit_quantizers(x, (0, width), norm).step[:, 1]
        gains[own] = best_gains(x, norm * quantized(x / norm, steps[own], width))
    deviation = None
    if norms:
        deviation = torch.ones(len(columns), dtype=torch.float64)
        deviation[:stored] = _deviations(latents)
    down, up = (detached(x[:, columns].float().unsqueeze(0)) for x in (site.down, site.up))
    coding = Coding(
        chosen.to(torch.uint8),
        steps.float().unsqueeze(0),
        None if site.mean is None else site.mean.float().unsqueeze(0),
        None if deviation is None else deviation.float().unsqueeze(0),
        gains.float().unsqueeze(0),
        None if site.prediction is None else detached(site.prediction.float()),
    )
    return Basis(down, up, grouping), coding


def _prediction(x: Tensor, given: Tensor) -> Tensor:
    """Return the ridge regression of x (tokens, D) on what is given, (inputs, D), float64."""
    x, given = x - x.mean(dim=0), given - given.mean(dim=0)
    powers = given.square().sum(dim=0).double().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    gram = (given.mT @ given).double() / powers / powers.unsqueeze(1)
    gram += PREDICTION_RIDGE * torch.eye(len(gram), dtype=gram.dtype)
    crossed = (given.mT @ x).double() / powers.unsqueeze(1)
    return torch.linalg.solve(gram, crossed) / powers.unsqueeze(1)


def _square_roots(fisher: Tensor) -> tuple[Tensor, Tensor]:
    """Return the square root of a regularised Fisher matrix, and the inverse of that."""
    values, vectors = torch.linalg.eigh(fisher)
    ridge = RIDGE * values.clamp(min=0).mean().clamp(min=torch.finfo(torch.float32).tiny)
    roots = (values.clamp(min=0) + ridge).sqrt()
    return (vectors * roots) @ vectors.mT, (vectors / roots) @ vectors.mT


def _norms(latents: Tensor) -> Tensor:
    """Return the norm of every token in whitened coordinates, (tokens, 1)."""
    whitened = latents / _deviations(latents)
    return whitened.square().mean(dim=1, keepdim=True).sqrt()


def _deviations(latents: Tensor) -> Tensor:
    return latents.square().mean(dim=0).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
