"""Objectives: losses over bases."""

from manifoldkv.core.basis import Site
from manifoldkv.learn.objectives.base import OBJECTIVES, Objective, Problem, register_objective
from manifoldkv.learn.objectives.eigen_attention import EigenAttention
from manifoldkv.learn.objectives.fisher import Fisher
from manifoldkv.learn.objectives.k_svd import KSVD
from manifoldkv.learn.objectives.kq_svd import KQSVD
from manifoldkv.learn.objectives.layer_output import LayerOutput

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
