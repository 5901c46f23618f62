"""What an objective promises a solver."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from manifoldkv.activations import Batch, LayerActivations, Rotary, Site
from manifoldkv.basis import Basis, HeadGrouping, check_rank
from manifoldkv.errors import UnsolvableError
from manifoldkv.objectives.linear_algebra import gram_by_run, leading_basis
from manifoldkv.registry import Registry

__all__ = ["OBJECTIVES", "Batch", "Objective", "Problem", "Rotary", "Site", "register_objective"]


SEQUENCES_AT_A_TIME = 8


class Problem(ABC):
    """Minimise a loss over the bases of one site of one layer.

    Subclasses write `loss` and may write `closed_form` and `initial`.

    Parameters
    ----------
    activations : LayerActivations
        Calibration data.
    site : {"key", "value"}
        What the basis is for.
    grouping : HeadGrouping
        Which heads share a basis.
    rotary : {"pre", "post"}
        Whether keys are projected before or after rotation; without effect on values.
    """

    full_batch_is_cheap = False
    """Whether the loss over everything costs less than over a sample (it does on Gram matrices)."""

    def __init__(
        self,
        activations: LayerActivations,
        site: Site,
        grouping: HeadGrouping,
        rotary: Rotary = "pre",
    ) -> None:
        self.activations = activations
        self.site: Site = site
        self.grouping = grouping
        self.rotary: Rotary = rotary

    @abstractmethod
    def loss(self, basis: Basis, batch: Batch | None = None) -> Tensor:
        """Scalar to minimise, differentiable in the basis; over all the data without a batch.

        The loss may depend on ``down upᵀ`` only, must not be negative, and must vanish where
        ``down upᵀ`` is the identity.
        """

    def closed_form(self, rank: int) -> Basis:
        """The exact minimiser, where one is known.

        Raises
        ------
        UnsolvableError
            If none is.
        """
        raise UnsolvableError(f"{type(self).__name__} has no closed form")

    def initial(self, rank: int) -> Basis:
        """An orthonormal basis that is cheap and good to start from: K-SVD's, if not overridden."""
        check_rank(rank, self.activations.head_dim)
        gram = self.summed(lambda part: gram_by_run(self.data(part), self.grouping))
        return leading_basis(gram, rank, self.grouping, self.activations.dtype)

    def data(self, sequences: Tensor | None = None) -> Tensor:
        """The keys or values a basis projects, of some sequences or all: (s, H_kv, n, d).

        They are kept for the steps to come.
        """
        if self.site == "key":
            return self.activations.keys_in(self.rotary, sequences)
        return self.activations.values_of(sequences)

    def summed(
        self, compute: Callable[[Tensor], Tensor], sequences: Tensor | None = None
    ) -> Tensor:
        """Sum of what is computed from a few sequences at a time, of some sequences or all."""
        if sequences is None:
            sequences = torch.arange(self.activations.sequences)
        first, *others = sequences.split(SEQUENCES_AT_A_TIME)
        total = compute(first)
        for part in others:
            total = total + compute(part)
        return total

    def statistics(self) -> Tensor:
        """Mean and variance of every feature, [μ; σ²], Eq. (dkv_stats): (groups, 2·width·d)."""
        known, grouping = self.activations, self.grouping
        heads = grouping.heads // grouping.width // grouping.groups  # in one group, side by side
        count = known.sequences * known.length * heads

        def rows(part: Tensor) -> Tensor:
            runs = grouping.split(self.data(part)).transpose(0, 1)  # (runs, s, n, width·d)
            return runs.unflatten(0, (grouping.groups, heads)).flatten(1, 3)

        mean = self.summed(lambda part: rows(part).sum(dim=1)) / count  # (groups, width·d)
        centred = mean.unsqueeze(1)
        variance = self.summed(lambda part: (rows(part) - centred).square().sum(dim=1)) / count
        return torch.cat([mean, variance], dim=-1)


class Objective(ABC):
    """Builds problems. Subclass, write `problem`, and register the class under a name.

    Registered names are accepted by every study; an objective with a closed form says so in
    `has_closed_form`.
    """

    def has_closed_form(self, site: Site, grouping: str | int) -> tuple[bool, str]:
        """Whether `Problem.closed_form` exists here, and the reason if it does not."""
        return False, f"{type(self).__name__} has no closed form"

    @abstractmethod
    def problem(
        self,
        activations: LayerActivations,
        site: Site,
        grouping: HeadGrouping,
        rotary: Rotary = "pre",
    ) -> Problem:
        """The problem of finding a basis for `site`. Parameters as in `Problem`."""


OBJECTIVES: Registry[Objective] = Registry("objective", "manifoldkv.objectives")
register_objective = OBJECTIVES.register
