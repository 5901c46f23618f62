"""Objectives: losses over bases."""

from manifoldkv.basis import Site
from manifoldkv.objectives.base import OBJECTIVES, Objective, Problem, register_objective
from manifoldkv.objectives.eigen_attention import EigenAttention
from manifoldkv.objectives.fisher import Fisher
from manifoldkv.objectives.k_svd import KSVD
from manifoldkv.objectives.kq_svd import KQSVD
from manifoldkv.objectives.layer_output import LayerOutput

__all__ = [
    "KQSVD",
    "KSVD",
    "OBJECTIVES",
    "EigenAttention",
    "Fisher",
    "LayerOutput",
    "Objective",
    "Problem",
    "Site",
    "register_objective",
]
