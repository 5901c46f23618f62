"""Choice of bands and predictors under two budgets, bytes and multiplications.

Every choice of a site has a spectrum, the variances of its latents in nats, and a number of
multiplications. At a price of a bit and a price of a multiplication each latent has a best width,
each site a best choice, and all choices together take some bytes and some work: both prices are
found by bisection (Everett 1963, Generalized Lagrange multiplier method).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from manifoldkv.coding.allocation import COHERENCE, GAUSSIAN_DISTORTION, coherent_costs
from manifoldkv.coding.predictor import Input
from manifoldkv.coding.transform import SiteDesign

BISECTIONS = 40
LARGEST_PRICE = 1e6


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
    price : float
        Of a multiplication of one cached token, in nats.
    """

    fixed: list[float]
    uses: list[float]
    cached: list[int]
    limit: float
    price: float

    @classmethod
    def of(
        cls, choices: Sequence[Choice], cached: list[int], limit: float, price: float
    ) -> StepWork:
        """Return the multiplications of some choices, one by site."""
        uses = [one.mixing for one in choices]
        for site, one in enumerate(choices):
            for (below, of), times in one.mixed:
                uses[site - site % 2 - 2 * below + (of == "value")] += times
        return cls([one.fixed for one in choices], uses, cached, limit, price)

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
    """

    sites: list[list[Choice]]
    cached: list[int]

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
        low, high = 1e-12, LARGEST_PRICE
        chosen = self._within(bits, high)
        for _ in range(BISECTIONS):
            middle = (low * high) ** 0.5
            tried = self._within(bits, middle)
            if tried.work <= work:
                chosen, high = tried, middle
            else:
                low = middle
            if high < 1.01 * low:
                break
        return chosen

    def _within(self, bits: float, work_price: float) -> Chosen:
        """Return the choices at a price of work and the lowest price of bits within a budget."""
        low, high = 1e-15, LARGEST_PRICE
        chosen, _ = self._at(high, work_price)
        for _ in range(BISECTIONS):
            middle = (low * high) ** 0.5
            tried, used = self._at(middle, work_price)
            if used <= bits:
                chosen, high = tried, middle
            else:
                low = middle
            if high < 1.001 * low:
                break
        return chosen

    def _at(self, bit_price: float, work_price: float) -> tuple[Chosen, float]:
        """Return the choices at two prices, and their bits."""
        stored = [0.0] * len(self.sites)
        indices: list[int] = []
        nats = work = bits = 0.0
        for site, (choices, t) in enumerate(zip(self.sites, self.cached, strict=True)):
            costs, per_latent = self._stacked[site]
            prices = costs + bit_price * t * torch.arange(costs.shape[2], dtype=costs.dtype)
            prices[:, :, 1:] += work_price * t * per_latent.unsqueeze(2)
            least, widths = prices.min(dim=2)  # (choices, D)
            # Multiplications beyond those of the site's own latents.
            further = [
                one.fixed
                + sum(
                    times * stored[site - site % 2 - 2 * below + (of == "value")]
                    for (below, of), times in one.mixed
                )
                for one in choices
            ]
            priced = least.sum(dim=1) + work_price * t * least.new_tensor(further)
            index = int(priced.argmin())
            kept = widths[index] > 0
            stored[site] = float(kept.sum())
            indices.append(index)
            nats += float(costs[index].gather(1, widths[index].unsqueeze(1)).sum())
            bits += float(widths[index].sum()) * t
            work += (further[index] + float(per_latent[index][kept].sum())) * t
        return Chosen(indices, work, nats, bit_price, work_price), bits

    @cached_property
    def _stacked(self) -> list[tuple[Tensor, Tensor]]:
        """Return costs (choices, D, widths) and multiplications (choices, D), by site."""
        return [
            (
                torch.stack([gaussian_costs(one.variances) for one in choices]),
                torch.stack([one.rows.double() + one.mixing for one in choices]),
            )
            for choices in self.sites
        ]


def gaussian_costs(variances: Tensor) -> Tensor:
    """Return the costs in nats of Gaussian latents (D,) of 0 to 8 bits, (D, 9)."""
    distortion = torch.tensor(GAUSSIAN_DISTORTION, dtype=variances.dtype)
    return coherent_costs(variances.unsqueeze(1) * distortion, COHERENCE) / 2


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
    head_dim = len(frequencies)
    bands = torch.tensor(frequencies).repeat(heads) // band  # (heads · d,)
    assert len(bands) == heads * head_dim
    return tuple((bands == one).nonzero().flatten() for one in range(-(-count // band)))
