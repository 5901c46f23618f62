"""Choice of bands and predictors under two budgets, bytes and multiplications.

Every choice of a site has a spectrum, the variances of its latents in nats, and a number of
multiplications. At a price of a bit and a price of a multiplication each latent has a best width,
each site a best choice, and all choices together take some bytes and some work: both prices are
found by bisection (Everett 1963, Generalized Lagrange multiplier method).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from manifoldkv.basis import SITES, Site
from manifoldkv.coding.costs import gaussian_costs
from manifoldkv.coding.predictor import Input
from manifoldkv.coding.transform import SiteDesign

LEAST_PRICE, LARGEST_PRICE = 1e-15, 1e6
"""Range of both prices, in nats."""
BIT_TOLERANCE, WORK_TOLERANCE = 1e-3, 1e-2
"""Relative tolerances of the prices."""

T = TypeVar("T")


@dataclass(frozen=True)
class Choice:
    """A possible transform of a site.

    Parameters
    ----------
    design : SiteDesign
        Inputs, blocks and rank.
    variances : Tensor
        Of the latents, falling, (D,), float64: half of a squared error is a cost in nats.
    rows : Tensor
        Features that each latent is mapped to for every cached token, (D,); 0 for values.
    mixing : float
        Further multiplications of a stored latent at its own site.
    fixed : float
        Multiplications per cached token that do not depend on the stored latents.
    mixed : tuple of (Input, float)
        Sites of which each stored latent is multiplied further, and how often.
    """

    design: SiteDesign
    variances: Tensor
    rows: Tensor
    mixing: float
    fixed: float
    mixed: tuple[tuple[Input, float], ...] = ()


@dataclass(frozen=True)
class StepWork:
    """Multiplications of a decode step whose stored latents are not known yet.

    Parameters
    ----------
    fixed : list of float
        Per cached token, those that do not depend on the stored latents, by site.
    uses : list of float
        Of every stored latent by predictions and mixtures, at its own site and at others, by site.
    cached : list of int
        Cached tokens, by site.
    limit : float
        Largest number of multiplications.
    """

    fixed: list[float]
    uses: list[float]
    cached: list[int]
    limit: float

    @classmethod
    def of(cls, choices: Sequence[Choice], cached: list[int], limit: float) -> StepWork:
        """Return the multiplications of some choices, one by site."""
        uses = [one.mixing for one in choices]
        for site, one in enumerate(choices):
            for (below, of), times in one.mixed:
                uses[_index_of(site, below, of)] += times
        return cls([one.fixed for one in choices], uses, cached, limit)

    def total(self, stored: Sequence[Tensor], rows: Sequence[Tensor]) -> float:
        """Return the multiplications of all cached tokens.

        Parameters
        ----------
        stored : sequence of Tensor
            Whether each latent is stored, by site, bool (D,).
        rows : sequence of Tensor
            Features that each latent is mapped to, by site, (D,); 0 for values.
        """
        total = 0.0
        for site, (kept, mapped) in enumerate(zip(stored, rows, strict=True)):
            per_latent = (mapped + self.uses[site]) * kept
            total += self.cached[site] * (self.fixed[site] + float(per_latent.sum()))
        return total


@dataclass(frozen=True)
class Chosen:
    """Choices of all sites at two prices.

    Parameters
    ----------
    indices : list of int
        Of the choice, by site.
    work : float
        Multiplications of a decode step of all cached tokens.
    nats : float
        Cost of rounding per token.
    bit_price, work_price : float
        In nats per bit and per multiplication, of one cached token.
    """

    indices: list[int]
    work: float
    nats: float
    bit_price: float
    work_price: float


@dataclass(frozen=True)
class Menu:
    """Choices of the keys and values of all layers, one site after the other.

    Parameters
    ----------
    sites : list of list of Choice
        Choices by site.
    cached : list of int
        Cached tokens by site.
    distortion : dict of float to float
        Mean squared errors of a Gaussian latent of variance one, by bits.
    """

    sites: list[list[Choice]]
    cached: list[int]
    distortion: dict[float, float]

    def best(self, bits: float, work: float) -> Chosen:
        """Return the choices that cost least within two budgets.

        Parameters
        ----------
        bits : float
            Of the latents of all cached tokens.
        work : float
            Multiplications of all cached tokens; infinite for no limit.
        """
        free = self._within(bits, 0.0)
        if free.work <= work:
            return free
        return lowest(
            lambda price: self._within(bits, price),
            lambda chosen: chosen.work <= work,
            WORK_TOLERANCE,
        )

    def _within(self, bits: float, work_price: float) -> Chosen:
        """Return the choices at a price of work and the lowest price of bits within a budget."""
        chosen, _ = lowest(
            lambda price: self._at(price, work_price), lambda tried: tried[1] <= bits, BIT_TOLERANCE
        )
        return chosen

    def _at(self, bit_price: float, work_price: float) -> tuple[Chosen, float]:
        """Return the choices at two prices, and their bits."""
        stored = [0.0] * len(self.sites)
        indices: list[int] = []
        nats = work = bits = 0.0
        of_widths = torch.tensor(list(self.distortion), dtype=torch.float64)
        for site, (choices, t) in enumerate(zip(self.sites, self.cached, strict=True)):
            costs, per_latent = self._stacked[site]
            prices = costs + bit_price * t * of_widths
            prices[:, :, 1:] += work_price * t * per_latent.unsqueeze(2)
            least, widths = prices.min(dim=2)  # (choices, D)
            # Multiplications beyond those of the site's own latents.
            further = [
                one.fixed
                + sum(
                    times * stored[_index_of(site, below, of)] for (below, of), times in one.mixed
                )
                for one in choices
            ]
            priced = least.sum(dim=1) + work_price * t * least.new_tensor(further)
            index = int(priced.argmin())
            kept = widths[index] > 0
            stored[site] = float(kept.sum())
            indices.append(index)
            nats += float(costs[index].gather(1, widths[index].unsqueeze(1)).sum())
            bits += float(of_widths[widths[index]].sum()) * t
            work += (further[index] + float(per_latent[index][kept].sum())) * t
        return Chosen(indices, work, nats, bit_price, work_price), bits

    @cached_property
    def _stacked(self) -> list[tuple[Tensor, Tensor]]:
        """Return costs (choices, D, widths) and multiplications (choices, D), by site."""
        return [
            (
                torch.stack([gaussian_costs(one.variances, self.distortion) for one in choices]),
                torch.stack([one.rows.double() + one.mixing for one in choices]),
            )
            for choices in self.sites
        ]


def lowest(at: Callable[[float], T], fits: Callable[[T], bool], tolerance: float) -> T:
    """Return the choice at the lowest price that fits a budget, or at the largest price."""
    low, high = LEAST_PRICE, LARGEST_PRICE
    best = at(high)
    while high > (1 + tolerance) * low:
        middle = (low * high) ** 0.5
        tried = at(middle)
        if fits(tried):
            best, high = tried, middle
        else:
            low = middle
    return best


def _index_of(site: int, below: int, of: Site) -> int:
    """Return the index of an input of a site, keys and values of all layers counted."""
    return site - site % 2 - 2 * below + SITES.index(of)


def blocks_of(frequencies: Sequence[int], heads: int, band: int | None) -> tuple[Tensor, ...]:
    """Return the features of all heads in bands of frequencies.

    Parameters
    ----------
    frequencies : sequence of int
        Index of the frequency of every feature of a head, (d,).
    heads : int
        Number of KV heads.
    band : int or None
        Frequencies per block; None for one block of all.
    """
    count = max(frequencies) + 1
    if band is None or band >= count:
        return ()
    bands = torch.tensor(frequencies).repeat(heads) // band  # (heads · d,)
    return tuple((bands == one).nonzero().flatten() for one in range(-(-count // band)))
