"""Nested bases of all ranks by one solve, on a flag manifold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import geoopt
import torch
from torch import Tensor

from manifoldkv.activations.layer import Batch
from manifoldkv.basis import Basis, check_rank, orthonormal_basis
from manifoldkv.objectives.base import Problem
from manifoldkv.solvers.base import Solution, register_solver
from manifoldkv.solvers.families import (
    Orthonormal,
    joint_eigenvectors,
    orthogonal_complement,
    ridged,
)
from manifoldkv.solvers.quasi_newton import Preconditioner
from manifoldkv.solvers.riemannian_lbfgs import RiemannianLBFGS

NEGLIGIBLE = 1e-6
"""Smallest KQ-SVD loss of a rank, relative to the largest, that weighs the rank."""


class Flags(Orthonormal):
    """Flags: columns X (groups, p, c) of which the leading ones are the basis of every rank.

    A flag is a point of the Stiefel manifold up to rotations of the columns between two successive
    ranks, which no loss depends on. The loss is the mean over ranks of the loss of the leading
    columns, relative to the root of KQ-SVD's loss at the start. Every rank is evaluated on
    sequences of its own.

    Parameters
    ----------
    problem : Problem
        Problem whose bases are points.
    ranks : sequence of int
        Ranks per KV head, ascending.
    """

    manifold = geoopt.Stiefel(canonical=False)

    def __init__(self, problem: Problem, ranks: Sequence[int]) -> None:
        super().__init__(problem, ranks[-1])
        self.counts = [rank * problem.grouping.width for rank in ranks]
        initial = problem.initial(self.rank).down.double()
        squares = torch.tensor([self.quadratic(initial[..., :count])[0] for count in self.counts])
        squares = squares.double().clamp(min=NEGLIGIBLE * float(squares.max()))
        self._curvatures = 1 / squares
        # A quadratic loss grows as KQ-SVD's, any other as its root.
        cheap = problem.objective.full_batch_is_cheap
        self._weights = self._curvatures if cheap else self._curvatures.sqrt()

    def model(self, point: Tensor) -> tuple[float, Tensor]:
        total, gradient = 0.0, torch.zeros_like(point)
        for count, scale in zip(self.counts, self._curvatures.tolist(), strict=True):
            loss, of_leading = self.quadratic(point[..., :count])
            total += scale * loss
            gradient[..., :count] += scale * of_leading
        return total, self.manifold.egrad2rgrad(point, gradient)

    def loss(self, point: Tensor, batch: Batch | None) -> Tensor:
        losses = []
        for count, part in zip(self.counts, self._parts(batch), strict=True):
            leading = point[..., :count]
            basis = Basis(leading, leading, self.problem.grouping)
            losses.append(self.problem.loss(basis.like(self.problem.activations.cos), part))
        return (self._weights * torch.stack(losses).double()).mean() / self._weights.mean()

    def _parts(self, batch: Batch | None) -> list[Batch | None]:
        """Return the data of every rank, a share of the sequences of a batch."""
        count = len(self.counts)
        if batch is None or len(batch.sequences) < count:
            return [batch] * count
        return [Batch(part, batch.rows) for part in batch.sequences.tensor_split(count)]

    def preconditioner(self, point: Tensor) -> Preconditioner:
        """Return the inverse Hessian of the model without its negative terms.

        A tangent vector at X turns the columns between two successive ranks towards all later ones
        and towards the complement Y: in the frame [X, Y] it is a skew matrix without diagonal
        blocks. Every other block has two Kronecker products, as in `Orthonormal`, weighted by the
        ranks that separate its columns from its rows.
        """
        frame = torch.cat([point, orthogonal_complement(point)], dim=-1)
        edges = [0, *self.counts, frame.shape[-1]]
        values, vectors = [], torch.zeros_like(frame)
        for first, last in pairwise(edges):
            if first == last:
                continue
            block = frame[..., first:last]
            weight, gram = (ridged(block.mT @ x @ block) for x in (self.weight, self.gram))
            of_block, vectors[..., first:last, first:last] = joint_eigenvectors(weight, gram)
            values.append(of_block)
        joint = torch.cat(values, dim=-1)  # (groups, p)
        curvature = self._separation(len(frame[0])) * (joint.unsqueeze(-1) + joint.unsqueeze(-2))
        inverse = torch.where(curvature > 0, 1 / curvature, 0.0)
        columns = point.shape[-1]

        def precondition(vector: Tensor) -> Tensor:
            skew = torch.zeros_like(frame)
            skew[..., :columns] = frame.mT @ vector
            skew[..., :columns, columns:] = -skew[..., columns:, :columns].mT
            skew = vectors @ ((vectors.mT @ skew @ vectors) * inverse) @ vectors.mT
            return frame @ skew[..., :columns]

        return precondition

    def _separation(self, size: int) -> Tensor:
        """Return the summed weight of the ranks that separate two directions, (p, p)."""
        inside = torch.arange(size) < torch.tensor(self.counts).unsqueeze(-1)  # (ranks, p)
        apart = inside.unsqueeze(-1) != inside.unsqueeze(-2)
        return (self._curvatures[:, None, None] * apart).sum(dim=0)

    def projector(self, point: Tensor) -> Tensor:
        """Return the mean projector of all ranks, of which `nearest` finds the flag."""
        leading = [point[..., :count] for count in self.counts]
        return torch.stack([columns @ columns.mT for columns in leading]).mean(dim=0)


@register_solver("flag")
@dataclass(frozen=True)
class Flag(RiemannianLBFGS):
    """Nested orthonormal bases of all ranks by one solve.

    The leading columns of a basis are the basis of any smaller rank. The descent is that of
    `RiemannianLBFGS` on the mean loss of all ranks (Ye, Wong and Lim 2022, arXiv:1907.00949).
    """

    steps: int = 128

    joint: ClassVar[bool] = True

    def solve(self, problem: Problem, rank: int, seed: int = 0) -> Solution:
        ((_, solution),) = self.solve_ranks(problem, [rank], seed)
        return solution

    def solve_ranks(
        self, problem: Problem, ranks: Sequence[int], seed: int = 0
    ) -> Iterator[tuple[int, Solution]]:
        ranks = sorted(set(ranks))
        for rank in ranks:
            check_rank(rank, problem.activations.head_dim)
        smaller = [rank for rank in ranks if rank < problem.activations.head_dim]
        point, history, status = self.descend(Flags(problem, smaller or ranks), seed)
        frame = torch.cat([point, orthogonal_complement(point)], dim=-1)
        frame = frame.to(problem.activations.dtype)
        for rank in ranks:
            columns = frame[..., : rank * problem.grouping.width].contiguous()
            yield rank, Solution(orthonormal_basis(columns, problem.grouping), history, status)
