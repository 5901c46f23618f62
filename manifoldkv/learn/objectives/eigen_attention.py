"""EigenAttention: reconstruction error of keys and queries together (Eq. app_eigen)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manifoldkv.core.basis import HeadGrouping, Rotary, Site
from manifoldkv.learn.objectives.base import Objective, Problem, register_objective
from manifoldkv.learn.objectives.k_svd import KSVD
from manifoldkv.learn.objectives.linear_algebra import gram_by_group
from manifoldkv.statistics.layer import Batch, LayerActivations
from manifoldkv.statistics.statistics import Statistics


@register_objective("eigen-attention")
@dataclass(frozen=True)
class EigenAttention(KSVD):
    """SVD of [K; Q] for keys; for values the same as K-SVD. The paper's baseline.

    Minimises ||Z - Z P Pᵀ||² / ||Z||² for Z = [K; Q], with all query heads stacked beside the KV
    heads they read. With g concatenated heads, the i-th query heads of each of them are
    concatenated too, so that Z has g·d columns. There is no metric: queries change the directions
    that are kept and not the weight of an error.
    """

    has_metric: ClassVar[bool] = False

    def metric(self, statistics: Statistics, layer: int, site: Site) -> Tensor:
        return Objective.metric(self, statistics, layer, site)

    def matrices(self, problem: Problem, sequences: Tensor | None) -> tuple[Tensor, None]:
        if problem.site == "value":
            return super().matrices(problem, sequences)
        grouping = problem.grouping

        def gram(part: Tensor) -> Tensor:
            projections = problem.activations.projections(problem.rotary, Batch(part))
            total = gram_by_group(projections.keys, grouping)
            by_share = projections.queries.unflatten(
                1, (grouping.heads, -1)
            )  # (S, H_kv, share, n, d)
            for share in by_share.unbind(2):
                total = total + gram_by_group(share, grouping)
            return total

        return problem.summed(gram, sequences), None


def singular_values(
    activations: LayerActivations, site: Site, grouping: HeadGrouping, rotary: Rotary = "pre"
) -> Tensor:
    """Return EigenAttention's singular values by basis, (groups, d), descending, float64.

    With g concatenated heads, an entry is the sum of g singular values: the gain of one more rank
    per head.
    """
    objective = EigenAttention()
    gram, _ = objective.matrices(objective.problem(activations, site, grouping, rotary), None)
    if grouping.groups == 1:
        gram = gram.sum(dim=0, keepdim=True)
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(-1)
    return values.unflatten(-1, (-1, grouping.width)).sum(dim=-1)
