"""Nested bases of all ranks by one solve, on flag manifolds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

import geoopt
import torch
from torch import Tensor

from manifoldkv.activations.layer import Batch
from manifoldkv.basis import Basis, check_rank, orthonormal_basis
from manifoldkv.modes import in_own_modes
from manifoldkv.objectives.base import Problem
from manifoldkv.objectives.linear_algebra import same_size
from manifoldkv.solvers.base import Solution, register_solver
from manifoldkv.solvers.families import (
    Family,
    Oblique,
    Orthonormal,
    joint_eigenvectors,
    orthogonal_complement,
    ridged,
)
from manifoldkv.solvers.quasi_newton import Preconditioner
from manifoldkv.solvers.riemannian_lbfgs import RiemannianLBFGS

NEGLIGIBLE = 1e-6
"""Smallest KQ-SVD loss of a rank, relative to the largest, that weighs the rank."""
LEAST_LOSS = 1e-12
"""Smallest KQ-SVD loss that is not rounding; matrices of the site have mean diagonal 1."""


class Flags(Family):
    """Flags: points (…, p, c) of which the leading columns are the basis of every rank.

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
        squares = torch.tensor([self.starting_loss(count) for count in self.counts]).double()
        squares = squares.clamp(min=max(NEGLIGIBLE * float(squares.max()), LEAST_LOSS))
        self.curvatures = 1 / squares
        # A quadratic loss grows as KQ-SVD's, any other as its root.
        cheap = problem.objective.full_batch_is_cheap
        self._weights = self.curvatures if cheap else self.curvatures.sqrt()

    @abstractmethod
    def starting_loss(self, count: int) -> float:
        """Return KQ-SVD's loss of the leading columns of the start."""

    @abstractmethod
    def block_curvatures(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Return curvatures (…, b) of directions of a block (…, p, b), and the directions in it."""

    @abstractmethod
    def nested(self, frame: Tensor, edges: Sequence[int]) -> Basis:
        """Return a basis of which the leading columns up to every edge are those of a frame."""

    def bases(self, point: Tensor, ranks: Sequence[int]) -> Iterator[tuple[int, Basis]]:
        """Yield ranks and their bases, of which that of rank head_dim completes the others."""
        grouping = self.problem.grouping
        frame = torch.cat([point, orthogonal_complement(point)], dim=-1)
        whole = self.nested(frame, [*self.counts, frame.shape[-1]])
        for rank in ranks:
            leading = ..., slice(rank * grouping.width)
            down = whole.down[leading].contiguous()
            up = down if whole.orthonormal else whole.up[leading].contiguous()
            yield rank, Basis(down, up, grouping)

    def final(self, point: Tensor) -> Basis:
        ((_, basis),) = self.bases(point, [self.rank])
        return basis

    def loss(self, point: Tensor, batch: Batch | None) -> Tensor:
        losses = [
            super(Flags, self).loss(point[..., :count], part)
            for count, part in zip(self.counts, self._parts(batch), strict=True)
        ]
        return (self._weights * torch.stack(losses).double()).mean() / self._weights.mean()

    def _parts(self, batch: Batch | None) -> list[Batch | None]:
        """Return the data of every rank, a share of the sequences of a batch."""
        count = len(self.counts)
        if batch is None or len(batch.sequences) < count:
            return [batch] * count
        return [Batch(part, batch.rows) for part in batch.sequences.tensor_split(count)]

    def preconditioner(self, point: Tensor) -> Preconditioner:
        """Return the inverse of a diagonal model of the Hessian.

        A tangent vector at X turns the columns between two successive ranks towards all later ones
        and towards the complement Y: in the frame [X, Y] it is a skew matrix without diagonal
        blocks. The curvature of an element is the sum of those of both directions, times the
        summed weight of the ranks that separate them.
        """
        frame = torch.cat([point, orthogonal_complement(point)], dim=-1)
        edges = [0, *self.counts, frame.shape[-1]]
        values, vectors = [], torch.zeros_like(frame)
        for first, last in pairwise(edges):
            if first < last:
                block = frame[..., first:last]
                of_block, vectors[..., first:last, first:last] = self.block_curvatures(block)
                values.append(of_block)
        joint = torch.cat(values, dim=-1)  # (…, p)
        separation = self._separation(frame.shape[-1])
        curvature = separation * (joint.unsqueeze(-1) + joint.unsqueeze(-2))
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
        return (self.curvatures[:, None, None] * apart).sum(dim=0)

    def projector(self, point: Tensor) -> Tensor:
        """Return the mean projector of all ranks, of which `nearest` finds the flag."""
        leading = [point[..., :count] for count in self.counts]
        return torch.stack([columns @ columns.mT for columns in leading]).mean(dim=0)


class OrthonormalFlags(Flags, Orthonormal):
    """Flags X (groups, p, c): down = up = X."""

    def starting_loss(self, count: int) -> float:
        return self.quadratic(self.problem.initial(self.rank).down.double()[..., :count])[0]

    def model(self, point: Tensor) -> tuple[float, Tensor]:
        total, gradient = 0.0, torch.zeros_like(point)
        for count, scale in zip(self.counts, self.curvatures.tolist(), strict=True):
            loss, of_leading = self.quadratic(point[..., :count])
            total += scale * loss
            gradient[..., :count] += scale * of_leading
        return total, self.manifold.egrad2rgrad(point, gradient)

    def block_curvatures(self, block: Tensor) -> tuple[Tensor, Tensor]:
        weight, gram = (ridged(block.mT @ x @ block) for x in (self.weight, self.gram))
        return joint_eigenvectors(weight, gram)

    def nested(self, frame: Tensor, edges: Sequence[int]) -> Basis:
        return orthonormal_basis(frame.to(self.problem.activations.dtype), self.problem.grouping)


class ObliqueFlags(Flags, Oblique):
    """Pairs of flags (2, groups, p, c): of ranges, and of complements of kernels."""

    @cached_property
    def _energies(self) -> Tensor:
        """Return the energies of both subspaces' directions, (2, groups, p, p)."""
        white = self.gram_root @ self.weight_root
        return torch.stack([white @ white.mT, white.mT @ white])

    def starting_loss(self, count: int) -> float:
        return float(torch.linalg.eigvalsh(self._energies[0]).flip(-1)[..., count:].sum())

    def block_curvatures(self, block: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(ridged(block.mT @ self._energies @ block))
        return values, vectors

    def nested(self, frame: Tensor, edges: Sequence[int]) -> Basis:
        """Biorthogonalise block by block; latents between two ranks are uncorrelated, falling."""
        down, up = self.gram_inverse @ frame[0], self.weight_inverse @ frame[1]
        for first, last in pairwise([0, *edges]):
            if first == last:
                continue
            before, block = (..., slice(0, first)), (..., slice(first, last))
            towards = down[block] - down[before] @ (up[before].mT @ down[block])
            against = up[block] - up[before] @ (down[before].mT @ up[block])
            left, gains, right = torch.linalg.svd(against.mT @ towards)
            down[block] = towards @ (right.mT / gains.unsqueeze(-2)).flip(-1)
            up[block] = against @ left.flip(-1)
        down, up = same_size(down, up)
        dtype = self.problem.activations.dtype
        return Basis(down.to(dtype), up.to(dtype), self.problem.grouping)


@register_solver("flag")
@dataclass(frozen=True)
class Flag(RiemannianLBFGS):
    """Nested orthonormal bases of all ranks by one solve.

    The leading columns of a basis are the basis of any smaller rank. The descent is that of
    `RiemannianLBFGS` on the mean loss of all ranks (Ye, Wong and Lim 2022, arXiv:1907.00949).
    """

    steps: int = 128

    flags: ClassVar[type[Flags]] = OrthonormalFlags
    joint: ClassVar[bool] = True

    def solve(self, problem: Problem, rank: int, seed: int = 0) -> Solution:
        ((_, solution),) = self.solve_ranks(problem, [rank], seed)
        return solution

    @in_own_modes
    def solve_ranks(
        self, problem: Problem, ranks: Sequence[int], seed: int = 0
    ) -> Iterator[tuple[int, Solution]]:
        ranks = sorted(set(ranks))
        for rank in ranks:
            check_rank(rank, problem.activations.head_dim)
        smaller = [rank for rank in ranks if rank < problem.activations.head_dim]
        flags = self.flags(problem, smaller or ranks)
        point, history, status = self.descend(flags, seed)
        for rank, basis in flags.bases(point, ranks):
            yield rank, Solution(basis, history, status)


@register_solver("oblique-flag")
@dataclass(frozen=True)
class ObliqueFlag(Flag):
    """Nested oblique bases of all ranks by one solve.

    The leading columns of down and up are the basis of any smaller rank. The start is the closed
    form of KQ-SVD, whose bases are nested.
    """

    steps: int = 64

    flags: ClassVar[type[Flags]] = ObliqueFlags
