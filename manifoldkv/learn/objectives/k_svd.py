"""K-SVD: reconstruction error of keys, or of values (Eq. app_ksvd)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manifoldkv.learn.objectives.base import Problem, register_objective
from manifoldkv.learn.objectives.gram import GramObjective
from manifoldkv.learn.objectives.linear_algebra import gram_by_group
from manifoldkv.statistics.statistics import TensorStatistics


@register_objective("k-svd")
@dataclass(frozen=True)
class KSVD(GramObjective):
    """Truncated SVD of the cached tensor.

    Minimises ||X - X P Pᵀ||² / ||X||² for the keys or values X. With a basis shared by all heads,
    this is the released EigenAttention code for keys of Llama models, up to its averaging of texts.
    """

    def matrices(self, problem: Problem, sequences: Tensor | None) -> tuple[Tensor, None]:
        def gram(part: Tensor) -> Tensor:
            return gram_by_group(problem.data(part), problem.grouping)

        return problem.summed(gram, sequences), None

    def weight(self, statistics: TensorStatistics) -> Tensor:
        return torch.eye(len(statistics.mean), dtype=torch.float64)
