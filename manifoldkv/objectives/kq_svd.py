"""KQ-SVD: keep the scores QKᵀ, and the values as W_O reads them (Eqs. app_kqsvd, app_kqsvd_v)."""

from __future__ import annotations

import torch
from torch import Tensor

from manifoldkv.activations import Batch, LayerActivations, Rotary, Site
from manifoldkv.basis import Basis, HeadGrouping
from manifoldkv.errors import UnsolvableError
from manifoldkv.objectives.base import Objective, register_objective
from manifoldkv.objectives.gram import GramProblem
from manifoldkv.objectives.linear_algebra import block_diagonal, gram_by_run


class InteractionProblem(GramProblem):
    """Minimise the error of a product in which keys or values stand.

    Keys: ||Q (K - K down upᵀ)ᵀ||² with the query heads of a KV head stacked. Before rotation Q and
    K are unrotated, so the product is not the score the model computes but the part of it that
    does not depend on position. Values: ||(V - V down upᵀ) W_O||², summed over the query heads
    that read the KV head. The data enter through Gram matrices over all sequences.
    """

    def matrices(self, sequences: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.site == "key":
            gram, weight = self.summed(self._of_keys, sequences)
            return gram, weight
        gram = self.summed(lambda part: gram_by_run(self.data(part), self.grouping), sequences)
        readers = self.activations.output_weight()  # (H_q, d, hidden)
        one_by_one = (reader.double() for reader in readers)  # a copy of all would be large
        return gram, self._by_run(torch.stack([reader @ reader.mT for reader in one_by_one]))

    def _of_keys(self, sequences: Tensor) -> Tensor:
        """Gram matrices of keys and, shaped likewise, of the queries that read them."""
        made = self.activations.projections(self.rotary, Batch(sequences))
        queries = gram_by_run(made.queries, HeadGrouping(1, self.activations.query_heads))
        return torch.stack([gram_by_run(made.keys, self.grouping), self._by_run(queries)])

    def _by_run(self, by_head: Tensor) -> Tensor:
        """Matrices of query heads, (H_q, d, d), on the diagonal of the runs they read."""
        shared = by_head.unflatten(0, (self.grouping.heads, -1)).sum(dim=1)  # (H_kv, d, d)
        return block_diagonal(shared, self.grouping)

    def closed_form(self, rank: int) -> Basis:
        exists, reason = closed_form_exists(self.grouping.name)
        if not exists:
            raise UnsolvableError(reason)
        return super().closed_form(rank)


def closed_form_exists(grouping: str | int) -> tuple[bool, str]:
    if grouping == "shared":
        return False, (
            "kq-svd has no closed form for a basis shared by all heads: each head weighs the "
            "residual differently; use grouping 1, a number of heads, or all"
        )
    return True, ""


@register_objective("kq-svd")
class KQSVD(Objective):
    """Low rank of QKᵀ and V W_O. The closed form is oblique; iterative solvers stay orthonormal."""

    def has_closed_form(self, site: Site, grouping: str | int) -> tuple[bool, str]:
        return closed_form_exists(grouping)

    def problem(
        self,
        activations: LayerActivations,
        site: Site,
        grouping: HeadGrouping,
        rotary: Rotary = "pre",
    ) -> InteractionProblem:
        return InteractionProblem(activations, site, grouping, rotary)
