"""EigenAttention: keep the energy of keys and queries together (Eq. app_eigen)."""

from __future__ import annotations

import torch
from torch import Tensor

from manifoldkv.activations import Batch, LayerActivations, Rotary, Site
from manifoldkv.basis import HeadGrouping
from manifoldkv.objectives.base import Objective, register_objective
from manifoldkv.objectives.gram import GramProblem
from manifoldkv.objectives.k_svd import ReconstructionProblem
from manifoldkv.objectives.linear_algebra import gram_by_run


class StackedProblem(GramProblem):
    """Minimise ||Z - Z P Pᵀ||² / ||Z||² for Z = [K; Q].

    All query heads are stacked beside the KV heads they read. Where g heads are concatenated, the
    i-th query head of each of them are concatenated too, so that Z keeps its g·d columns.
    """

    def matrices(self, sequences: Tensor | None) -> tuple[Tensor, None]:
        return self.summed(self._gram, sequences), None

    def _gram(self, sequences: Tensor) -> Tensor:
        made = self.activations.projections(self.rotary, Batch(sequences))
        gram = gram_by_run(made.keys, self.grouping)
        by_share = made.queries.unflatten(1, (self.grouping.heads, -1))  # (S, H_kv, share, n, d)
        for share in by_share.unbind(2):
            gram = gram + gram_by_run(share, self.grouping)
        return gram


@register_objective("eigen-attention")
class EigenAttention(Objective):
    """SVD of [K; Q] for keys; for values the same as K-SVD. The paper's baseline."""

    def has_closed_form(self, site: Site, grouping: str | int) -> tuple[bool, str]:
        return True, ""

    def problem(
        self,
        activations: LayerActivations,
        site: Site,
        grouping: HeadGrouping,
        rotary: Rotary = "pre",
    ) -> GramProblem:
        problem = StackedProblem if site == "key" else ReconstructionProblem
        return problem(activations, site, grouping, rotary)


def singular_values(
    activations: LayerActivations, site: Site, grouping: HeadGrouping, rotary: Rotary = "pre"
) -> Tensor:
    """Of what EigenAttention decomposes, by basis: (groups, d), descending, float64.

    Where heads are concatenated, an entry is the sum of as many singular values: what one more
    rank per head adds.
    """
    gram, _ = EigenAttention().problem(activations, site, grouping, rotary).matrices(None)
    if grouping.groups == 1:
        gram = gram.sum(dim=0, keepdim=True)
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(-1)
    return values.unflatten(-1, (-1, grouping.width)).sum(dim=-1)
