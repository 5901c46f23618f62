"""Contract of objectives, and the problem that a solver minimises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from manifoldkv.activations.layer import Batch, LayerActivations
from manifoldkv.basis import Basis, HeadGrouping, Rotary, Site, check_rank
from manifoldkv.errors import ArgumentError
from manifoldkv.modes import own_modes
from manifoldkv.objectives.linear_algebra import gram_by_group, leading_basis
from manifoldkv.registry import Registry

__all__ = ["OBJECTIVES", "Batch", "Objective", "Problem", "Rotary", "Site", "register_objective"]

SEQUENCES_AT_A_TIME = 8

T = TypeVar("T")


@dataclass(frozen=True)
class Objective(ABC):
    """A loss over the bases of one site of one layer.

    Subclasses write `loss`, and may write `closed_form` (with `has_closed_form`) and `initial`.
    They are frozen dataclasses whose fields are hyper-parameters; data are in the `Problem`.
    """

    full_batch_is_cheap: ClassVar[bool] = False
    """Whether the loss over all data costs less than over a sample, as it depends on sums that are
    computed once (Gram matrices, say). Keys and values are then not held."""

    @abstractmethod
    def loss(self, problem: Problem, basis: Basis, batch: Batch | None = None) -> Tensor:
        """Return the scalar to minimise, differentiable in the basis.

        It must be a function of ``down upᵀ``, not negative, and 0 if that is the identity.

        Parameters
        ----------
        problem : Problem
            Layer, site and head grouping.
        basis : Basis
            Argument of the loss.
        batch : Batch, optional
            Sequences and query rows; all if omitted.
        """

    def has_closed_form(self, site: Site, grouping: str | int) -> tuple[bool, str]:
        """Return whether `closed_form` exists here, and the reason if it does not."""
        return False, f"{type(self).__name__} has no closed form"

    def closed_form(self, problem: Problem, rank: int) -> Basis:
        """Return the exact minimiser.

        Raises
        ------
        ArgumentError
            If there is no closed form.
        """
        raise ArgumentError(self.has_closed_form(problem.site, problem.grouping.name)[1])

    def initial(self, problem: Problem, rank: int) -> Basis:
        """Return an orthonormal start of iterative solvers, by default the basis of K-SVD."""
        gram = problem.summed(lambda part: gram_by_group(problem.data(part), problem.grouping))
        return leading_basis(gram, rank, problem.grouping, problem.activations.dtype)

    def problem(
        self,
        activations: LayerActivations,
        site: Site,
        grouping: HeadGrouping,
        rotary: Rotary = "pre",
    ) -> Problem:
        """Return the `Problem` of this objective, with its parameters."""
        return Problem(self, activations, site, grouping, rotary)


class Problem:
    """An objective on the calibration data of one site of one layer.

    Parameters
    ----------
    objective : Objective
        Objective that defines the loss.
    activations : LayerActivations
        Calibration data.
    site : {"key", "value"}
        Keys or values.
    grouping : HeadGrouping
        Heads that share a basis.
    rotary : {"pre", "post"}
        Whether keys are projected before or after rotation; without effect on values.
    """

    def __init__(
        self,
        objective: Objective,
        activations: LayerActivations,
        site: Site,
        grouping: HeadGrouping,
        rotary: Rotary = "pre",
    ) -> None:
        self.objective = objective
        self.activations = activations
        self.site: Site = site
        self.grouping = grouping
        self.rotary: Rotary = rotary
        self._computed: dict[str, Any] = {}

    def loss(self, basis: Basis, batch: Batch | None = None) -> Tensor:
        """Return the loss of a basis; see `Objective.loss`."""
        with _own_modes():
            return self.objective.loss(self, basis, batch)

    def closed_form(self, rank: int) -> Basis:
        """Return the exact minimiser; see `Objective.closed_form`.

        Raises
        ------
        ArgumentError
            If the rank is not between 1 and head_dim, or there is no closed form.
        """
        check_rank(rank, self.activations.head_dim)
        with _own_modes():
            return self.objective.closed_form(self, rank)

    def initial(self, rank: int) -> Basis:
        """Return the orthonormal start of iterative solvers; see `Objective.initial`.

        Raises
        ------
        ArgumentError
            If the rank is not between 1 and head_dim.
        """
        check_rank(rank, self.activations.head_dim)
        with _own_modes():
            return self.objective.initial(self, rank)

    def data(self, sequences: Tensor | None = None) -> Tensor:
        """Return keys or values (s, H_kv, n, d) of `sequences`; None for all.

        They are held for later steps, unless the objective reads each element only once.
        """
        if self.objective.full_batch_is_cheap:
            batch = None if sequences is None else Batch(sequences)
            projections = self.activations.projections(self.rotary, batch)
            return projections.keys if self.site == "key" else projections.values
        if self.site == "key":
            return self.activations.keys_in(self.rotary, sequences)
        return self.activations.values_of(sequences)

    def once(self, compute: Callable[[Problem], T]) -> T:
        """Return ``compute(self)``, computed at the first call only."""
        name = compute.__qualname__
        if name not in self._computed:
            with own_modes():  # whatever the modes of the first caller
                self._computed[name] = compute(self)
        return self._computed[name]

    def summed(
        self, compute: Callable[[Tensor], Tensor], sequences: Tensor | None = None
    ) -> Tensor:
        """Return the sum of a function of a few sequences at a time, over all if None."""
        if sequences is None:
            sequences = torch.arange(self.activations.sequences)
        first, *others = sequences.split(SEQUENCES_AT_A_TIME)
        total = compute(first)
        for part in others:
            total = total + compute(part)
        return total

    def statistics(self) -> Tensor:
        """Return mean and variance of features, [μ; σ²], (groups, 2·width·d), Eq. (dkv_stats)."""
        activations, grouping = self.activations, self.grouping
        heads = grouping.heads // grouping.width // grouping.groups  # number that share a basis
        count = activations.sequences * activations.length * heads

        def rows(part: Tensor) -> Tensor:
            by_group = grouping.split(self.data(part)).transpose(0, 1)  # (H/width, s, n, width·d)
            return by_group.unflatten(0, (grouping.groups, heads)).flatten(1, 3)

        mean = self.summed(lambda part: rows(part).sum(dim=1)) / count  # (groups, width·d)
        centre = mean.unsqueeze(1)
        variance = self.summed(lambda part: (rows(part) - centre).square().sum(dim=1)) / count
        return torch.cat([mean, variance], dim=-1)


def _own_modes() -> AbstractContextManager[None]:
    """Return a block in torch's own defaults, with gradients if the caller wants them."""
    return own_modes(gradients=torch.is_grad_enabled())


OBJECTIVES: Registry[Objective] = Registry("objective", "manifoldkv.objectives")
register_objective = OBJECTIVES.register
