"""Selection of transforms and predictors under two budgets, bytes and multiplications.

Every candidate of a tensor has a spectrum, the variances of its latents in nats, and a number of
multiplications. At a price of a bit and a price of a multiplication each latent has a best width,
each tensor a best candidate, and all of these together take some bits and some multiplications:
both prices are found by bisection (Everett 1963, Generalized Lagrange multiplier method).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from manifoldkv.coding.costs import gaussian_costs
from manifoldkv.coding.transform import TransformConfig
from manifoldkv.plan.predictor import sources_of

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
    of_source : float
        Multiplications by each tensor that a prediction depends on (`sources_of`).
    mixed : float
        Multiplications of each stored latent of these tensors.
    """

    config: TransformConfig
    variances: Tensor
    rows: Tensor
    mixing: float
    fixed: float
    of_source: float = 0.0
    mixed: float = 0.0

    def further(self, sources: frozenset[int], stored: Sequence[float]) -> float:
        """Return the multiplications per cached token beyond those of the tensor's own latents.

        Parameters
        ----------
        sources : frozenset of int
            Tensors that the prediction depends on.
        stored : sequence of float
            Number of stored latents of all tensors before.
        """
        of_latents = self.mixed * sum(stored[one] for one in sources)
        return self.fixed + self.of_source * len(sources) + of_latents


@dataclass(frozen=True)
class StepCompute:
    """Multiplications of a decode step whose stored latents are not known yet.

    Parameters
    ----------
    candidates : sequence of Candidate
        One of every tensor.
    cached : list of int
        Cached tokens, by tensor.
    limit : float
        Largest number of multiplications.
    """

    candidates: Sequence[Candidate]
    cached: list[int]
    limit: float

    def of_configs(self, configs: Sequence[TransformConfig]) -> StepCompute:
        """Return the compute of the same candidates with other inputs, by tensor."""
        pairs = zip(self.candidates, configs, strict=True)
        return replace(self, candidates=[replace(one, config=config) for one, config in pairs])

    @property
    def uses(self) -> list[float]:
        """Return the multiplications of every stored latent by predictions and mixtures, by tensor.

        Those at its own tensor and at all others.
        """
        uses = [one.mixing for one in self.candidates]
        for one, sources in zip(self.candidates, self._sources, strict=True):
            for source in sources:
                uses[source] += one.mixed
        return uses

    @cached_property
    def _sources(self) -> list[frozenset[int]]:
        """Return the tensors that the prediction of each tensor depends on."""
        sources: list[frozenset[int]] = []
        with_own: list[frozenset[int]] = []
        for tensor, one in enumerate(self.candidates):
            sources.append(sources_of(tensor, one.config.inputs, with_own))
            with_own.append(sources[-1] | {tensor})
        return sources

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
        counts = [float(kept.sum()) for kept in stored]
        of_tensors = zip(self.candidates, stored, rows, strict=True)
        for tensor, (one, kept, mapped) in enumerate(of_tensors):
            of_own = float(((mapped + one.mixing) * kept).sum())
            total += self.cached[tensor] * (one.further(self._sources[tensor], counts) + of_own)
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
        stored: list[float] = []
        sources: list[frozenset[int]] = []
        indices: list[int] = []
        nats = compute = bits = 0.0
        of_widths = torch.tensor(list(self.distortion), dtype=torch.float64)
        for tensor, (candidates, t) in enumerate(zip(self.tensors, self.cached, strict=True)):
            costs, per_latent = self._stacked[tensor]
            prices = costs + bit_price * t * of_widths
            prices[:, :, 1:] += compute_price * t * per_latent.unsqueeze(2)
            least, widths = prices.min(dim=2)  # (candidates, D)
            possible = {one.config.inputs for one in candidates}
            depends = {inputs: sources_of(tensor, inputs, sources) for inputs in possible}
            further = [one.further(depends[one.config.inputs], stored) for one in candidates]
            priced = least.sum(dim=1) + compute_price * t * least.new_tensor(further)
            index = int(priced.argmin())
            kept = widths[index] > 0
            stored.append(float(kept.sum()))
            sources.append(depends[candidates[index].config.inputs] | {tensor})
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
