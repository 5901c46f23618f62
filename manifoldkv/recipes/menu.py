"""Choice of bands and predictors under two budgets, bytes and multiplications.

Every choice of a site has a spectrum, the variances of its latents in nats, and a number of
multiplications. At a price of a bit and a price of a multiplication each latent has a best width,
each site a best choice, and all choices together take some bytes and some work: both prices are
found by bisection (Everett 1963, Generalized Lagrange multiplier method).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from manifoldkv.coding.costs import gaussian_costs
from manifoldkv.coding.predictor import sources_of
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
    of_source : float
        Multiplications by each site that a prediction depends on (`sources_of`).
    mixed : float
        Multiplications of each stored latent of these sites.
    """

    design: SiteDesign
    variances: Tensor
    rows: Tensor
    mixing: float
    fixed: float
    of_source: float = 0.0
    mixed: float = 0.0

    def further(self, sources: frozenset[int], stored: Sequence[float]) -> float:
        """Return the multiplications per cached token beyond those of the site's own latents.

        Parameters
        ----------
        sources : frozenset of int
            Sites that the prediction depends on.
        stored : sequence of float
            Number of stored latents of all sites before.
        """
        of_latents = self.mixed * sum(stored[one] for one in sources)
        return self.fixed + self.of_source * len(sources) + of_latents


@dataclass(frozen=True)
class StepWork:
    """Multiplications of a decode step whose stored latents are not known yet.

    Parameters
    ----------
    choices : sequence of Choice
        Choice of every site.
    cached : list of int
        Cached tokens, by site.
    limit : float
        Largest number of multiplications.
    """

    choices: Sequence[Choice]
    cached: list[int]
    limit: float

    def of_designs(self, designs: Sequence[SiteDesign]) -> StepWork:
        """Return the work of the same choices with other inputs, by site."""
        pairs = zip(self.choices, designs, strict=True)
        return replace(self, choices=[replace(one, design=design) for one, design in pairs])

    @property
    def uses(self) -> list[float]:
        """Return the multiplications of every stored latent by predictions and mixtures, by site.

        Those at its own site and at all others.
        """
        uses = [one.mixing for one in self.choices]
        for one, sources in zip(self.choices, self._sources, strict=True):
            for source in sources:
                uses[source] += one.mixed
        return uses

    @cached_property
    def _sources(self) -> list[frozenset[int]]:
        """Return the sites that the prediction of each site depends on."""
        sources: list[frozenset[int]] = []
        with_own: list[frozenset[int]] = []
        for site, one in enumerate(self.choices):
            sources.append(sources_of(site, one.design.inputs, with_own))
            with_own.append(sources[-1] | {site})
        return sources

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
        counts = [float(kept.sum()) for kept in stored]
        for site, (one, kept, mapped) in enumerate(zip(self.choices, stored, rows, strict=True)):
            of_own = float(((mapped + one.mixing) * kept).sum())
            total += self.cached[site] * (one.further(self._sources[site], counts) + of_own)
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
        stored: list[float] = []
        sources: list[frozenset[int]] = []
        indices: list[int] = []
        nats = work = bits = 0.0
        of_widths = torch.tensor(list(self.distortion), dtype=torch.float64)
        for site, (choices, t) in enumerate(zip(self.sites, self.cached, strict=True)):
            costs, per_latent = self._stacked[site]
            prices = costs + bit_price * t * of_widths
            prices[:, :, 1:] += work_price * t * per_latent.unsqueeze(2)
            least, widths = prices.min(dim=2)  # (choices, D)
            possible = {one.design.inputs for one in choices}
            depends = {inputs: sources_of(site, inputs, sources) for inputs in possible}
            further = [one.further(depends[one.design.inputs], stored) for one in choices]
            priced = least.sum(dim=1) + work_price * t * least.new_tensor(further)
            index = int(priced.argmin())
            kept = widths[index] > 0
            stored.append(float(kept.sum()))
            sources.append(depends[choices[index].design.inputs] | {site})
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
