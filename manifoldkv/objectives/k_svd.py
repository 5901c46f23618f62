"""K-SVD: keep the energy of keys, or of values (Eq. app_ksvd)."""

from __future__ import annotations

from torch import Tensor

from manifoldkv.activations import LayerActivations, Rotary, Site
from manifoldkv.basis import HeadGrouping
from manifoldkv.objectives.base import Objective, register_objective
from manifoldkv.objectives.gram import GramProblem
from manifoldkv.objectives.linear_algebra import gram_by_run


class ReconstructionProblem(GramProblem):
    """Minimise ||X - X P Pᵀ||² / ||X||² for the keys or values X."""

    def matrices(self, sequences: Tensor | None) -> tuple[Tensor, None]:
        gram = self.summed(lambda part: gram_by_run(self.data(part), self.grouping), sequences)
        return gram, None


@register_objective("k-svd")
class KSVD(Objective):
    """Reconstruction of the cached tensor itself: truncated SVD.

    With a basis shared by all heads this is what the released EigenAttention code does to the keys
    of Llama models, up to its averaging of texts.
    """

    def has_closed_form(self, site: Site, grouping: str | int) -> tuple[bool, str]:
        return True, ""

    def problem(
        self,
        activations: LayerActivations,
        site: Site,
        grouping: HeadGrouping,
        rotary: Rotary = "pre",
    ) -> ReconstructionProblem:
        return ReconstructionProblem(activations, site, grouping, rotary)
