"""Selection of transforms and predictors under two budgets, bytes and multiplications.

Every candidate of a tensor has a spectrum, the variances of its latents in nats, and a number of
multiplications. At a price of a bit and a price of a multiplication each latent has a best width,
each tensor a best candidate, and all of these together take some bits and some multiplications:
both prices are found by bisection (Everett 1963, Generalized Lagrange multiplier method).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from manifoldkv.coding.costs import gaussian_costs
from manifoldkv.coding.transform import TransformConfig
from manifoldkv.core.basis import SITES, Site
from manifoldkv.plan.predictor import Input

LEAST_PRICE, LARGEST_PRICE = 1e-15, 1e6
"""Range of both prices, in nats."""
BIT_TOLERANCE, COMPUTE_TOLERANCE = 1e-3, 1e-2
"""Relative tolerances of the prices."""

T = TypeVar("T")


@dataclass(frozen=True)
class Candidate:
    """A possible transform of the keys or values of a layer.

    Parameters
    ----------
    config : TransformConfig
        Inputs, blocks and rank.
    variances : Tensor
        Of the latents, falling, (D,), float64: half of a squared error is a cost in nats.
    rows : Tensor
        Features that each latent is mapped to for every cached token, (D,); 0 for values.
    mixing : float
        Further multiplications of a stored latent at its own tensor.
    fixed : float
        Multiplications per cached token that do not depend on the stored latents.
    mixed : tuple of (Input, float)
        Tensors of which each stored latent is multiplied further, and how often.
    """

    config: TransformConfig
    variances: Tensor
    rows: Tensor
    mixing: float
    fixed: float
    mixed: tuple[tuple[Input, float], ...] = ()


@dataclass(frozen=True)
class StepCompute:
    """Multiplications of a decode step whose stored latents are not known yet.

    Parameters
    ----------
    fixed : list of float
        Per cached token, those that do not depend on the stored latents, by tensor.
    uses : list of float
        Of every stored latent by predictions and mixtures, at its own tensor and at others.
    cached : list of int
        Cached tokens, by tensor.
    limit : float
        Largest number of multiplications.
    """

    fixed: list[float]
    uses: list[float]
    cached: list[int]
    limit: float

    @classmethod
    def of(cls, candidates: Sequence[Candidate], cached: list[int], limit: float) -> StepCompute:
        """Return the multiplications of some candidates, one of every tensor."""
        uses = [one.mixing for one in candidates]
        for index, one in enumerate(candidates):
            for (below, of), times in one.mixed:
                uses[_index_of(index, below, of)] += times
        return cls([one.fixed for one in candidates], uses, cached, limit)

    def total(self, stored: Sequence[Tensor], rows: Sequence[Tensor]) -> float:
        """Return the multiplications of all cached tokens.

        Parameters
        ----------
        stored : sequence of Tensor
            Whether each latent is stored, by tensor, bool (D,).
        rows : sequence of Tensor
            Features that each latent is mapped to, by tensor, (D,); 0 for values.
        """
        total = 0.0
        for index, (kept, mapped) in enumerate(zip(stored, rows, strict=True)):
            per_latent = (mapped + self.uses[index]) * kept
            total += self.cached[index] * (self.fixed[index] + float(per_latent.sum()))
        return total


@dataclass(frozen=True)
class Selection:
    """Candidates of all tensors at two prices.

    Parameters
    ----------
    indices : list of int
        Of the candidate, by tensor.
    compute : float
        Multiplications of a decode step of all cached tokens.
    nats : float
        Cost of rounding per token.
    bit_price, compute_price : float
        In nats per bit and per multiplication, of one cached token.
    """

    indices: list[int]
    compute: float
    nats: float
    bit_price: float
    compute_price: float


@dataclass(frozen=True)
class Candidates:
    """Candidates of the keys and values of all layers, one tensor after the other.

    Parameters
    ----------
    tensors : list of list of Candidate
        Candidates by tensor.
    cached : list of int
        Cached tokens by tensor.
    distortion : dict of float to float
        Mean squared errors of a Gaussian latent of variance one, by bits.
    """

    tensors: list[list[Candidate]]
    cached: list[int]
    distortion: dict[float, float]

    def best(self, bits: float, compute: float) -> Selection:
        """Return the candidates that cost least within two budgets.

        Parameters
        ----------
        bits : float
            Of the latents of all cached tokens.
        compute : float
            Multiplications of all cached tokens; infinite for no limit.
        """
        free = self._within(bits, 0.0)
        if free.compute <= compute:
            return free
        return lowest(
            lambda price: self._within(bits, price),
            lambda selected: selected.compute <= compute,
            COMPUTE_TOLERANCE,
        )

    def _within(self, bits: float, compute_price: float) -> Selection:
        """Return the candidates at a price of compute and the lowest price of bits that fits."""
        chosen, _ = lowest(
            lambda price: self._at(price, compute_price),
            lambda tried: tried[1] <= bits,
            BIT_TOLERANCE,
        )
        return chosen

    def _at(self, bit_price: float, compute_price: float) -> tuple[Selection, float]:
        """Return the candidates at two prices, and their bits."""
        stored = [0.0] * len(self.tensors)
        indices: list[int] = []
        nats = compute = bits = 0.0
        of_widths = torch.tensor(list(self.distortion), dtype=torch.float64)
        for tensor, (candidates, t) in enumerate(zip(self.tensors, self.cached, strict=True)):
            costs, per_latent = self._stacked[tensor]
            prices = costs + bit_price * t * of_widths
            prices[:, :, 1:] += compute_price * t * per_latent.unsqueeze(2)
            least, widths = prices.min(dim=2)  # (candidates, D)
            # Multiplications beyond those of the tensor's own latents.
            further = [
                one.fixed
                + sum(
                    times * stored[_index_of(tensor, below, of)] for (below, of), times in one.mixed
                )
                for one in candidates
            ]
            priced = least.sum(dim=1) + compute_price * t * least.new_tensor(further)
            index = int(priced.argmin())
            kept = widths[index] > 0
            stored[tensor] = float(kept.sum())
            indices.append(index)
            nats += float(costs[index].gather(1, widths[index].unsqueeze(1)).sum())
            bits += float(of_widths[widths[index]].sum()) * t
            compute += (further[index] + float(per_latent[index][kept].sum())) * t
        return Selection(indices, compute, nats, bit_price, compute_price), bits

    @cached_property
    def _stacked(self) -> list[tuple[Tensor, Tensor]]:
        """Return costs (candidates, D, widths) and multiplications (candidates, D), by tensor."""
        return [
            (
                torch.stack([gaussian_costs(one.variances, self.distortion) for one in candidates]),
                torch.stack([one.rows.double() + one.mixing for one in candidates]),
            )
            for candidates in self.tensors
        ]


def lowest(at: Callable[[float], T], fits: Callable[[T], bool], tolerance: float) -> T:
    """Return the selection at the lowest price that fits a budget, or at the largest price."""
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


def _index_of(tensor: int, below: int, of: Site) -> int:
    """Return the index of an input of a tensor, keys and values of all layers counted."""
    return tensor - tensor % 2 - 2 * below + SITES.index(of)


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
