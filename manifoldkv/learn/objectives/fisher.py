"""Fisher: divergence of next-token distributions, to second order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from manifoldkv.core.basis import Site
from manifoldkv.learn.objectives.base import Problem, register_objective
from manifoldkv.learn.objectives.gram import GramObjective
from manifoldkv.learn.objectives.linear_algebra import diagonal_blocks, gram_by_group
from manifoldkv.statistics.statistics import Statistics, TensorStatistics


@register_objective("fisher")
@dataclass(frozen=True)
class Fisher(GramObjective):
    """Gradient-weighted PCA: errors weighed by the Fisher information of keys or values.

    Minimises E[(x - x down upᵀ) F (x - x down upᵀ)ᵀ] relative to E[x F xᵀ] with F = E[g gᵀ]
    (`collect`): half of the numerator is the loss in nats per token, to second order. With g
    concatenated heads, F is a block of that of all heads. Keys are those before rotation. The
    closed form is oblique; iterative solvers stay orthonormal.
    """

    needs_statistics: ClassVar[bool] = True
    weighs_residuals: ClassVar[bool] = True

    def metric(self, statistics: Statistics, layer: int, site: Site) -> Tensor:
        """Return F, whose costs are in nats for all layers alike."""
        return self.weight(statistics.layers[layer].of(site))

    def weight(self, statistics: TensorStatistics) -> Tensor:
        return statistics.fisher

    def matrices(self, problem: Problem, sequences: Tensor | None) -> tuple[Tensor, Tensor]:
        gram = problem.summed(
            lambda part: gram_by_group(problem.data(part), problem.grouping), sequences
        )
        assert problem.metric is not None  # the problem has checked it
        return gram, diagonal_blocks(problem.metric.to(gram.device), problem.grouping)
