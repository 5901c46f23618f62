"""KQ-SVD: error of scores QKᵀ, and of V W_O (Eqs. app_kqsvd, app_kqsvd_v)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manifoldkv.core.basis import HeadGrouping
from manifoldkv.learn.objectives.base import Problem, register_objective
from manifoldkv.learn.objectives.gram import GramObjective
from manifoldkv.learn.objectives.linear_algebra import block_diagonal, gram_by_group
from manifoldkv.statistics.layer import Batch
from manifoldkv.statistics.statistics import TensorStatistics


@register_objective("kq-svd")
@dataclass(frozen=True)
class KQSVD(GramObjective):
    """Low rank of QKᵀ and V W_O. The closed form is oblique; iterative solvers stay orthonormal.

    Keys: ||Q (K - K down upᵀ)ᵀ||² with the query heads of a KV head stacked. Before rotation, the
    product of Q and K is not the model's score but its part that does not depend on position.
    Values: ||(V - V down upᵀ) W_O||², summed over the query heads that read the KV head.
    """

    weighs_residuals: ClassVar[bool] = True

    def matrices(self, problem: Problem, sequences: Tensor | None) -> tuple[Tensor, Tensor]:
        if problem.site == "key":
            gram, weight = problem.summed(lambda part: _key_matrices(problem, part), sequences)
            return gram, weight
        gram = problem.summed(
            lambda part: gram_by_group(problem.data(part), problem.grouping), sequences
        )
        readers = problem.activations.output_weight()  # (H_q, d, hidden)
        # One head at a time: a float64 copy of all would be large.
        by_head = torch.stack([_squared(reader.double()) for reader in readers])
        return gram, _by_group(by_head, problem.grouping)

    def weight(self, statistics: TensorStatistics) -> Tensor:
        return torch.block_diag(*statistics.readers)


def _key_matrices(problem: Problem, sequences: Tensor) -> Tensor:
    """Return Gram matrices of keys and of the queries that read them, stacked."""
    projections = problem.activations.projections(problem.rotary, Batch(sequences))
    one_head = HeadGrouping(1, problem.activations.query_heads)
    queries = gram_by_group(projections.queries, one_head)
    keys = gram_by_group(projections.keys, problem.grouping)
    return torch.stack([keys, _by_group(queries, problem.grouping)])


def _squared(matrix: Tensor) -> Tensor:
    return matrix @ matrix.mT


def _by_group(by_head: Tensor, grouping: HeadGrouping) -> Tensor:
    """Return block-diagonal matrices of head groups from matrices of query heads, (H_q, d, d)."""
    shared = by_head.unflatten(0, (grouping.heads, -1)).sum(dim=1)  # (H_kv, d, d)
    return block_diagonal(shared, grouping)
