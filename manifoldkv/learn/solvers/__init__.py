"""Solvers: minimisers of the loss of a problem."""

from manifoldkv.learn.solvers.base import SOLVERS, Solution, Solver, checked, register_solver
from manifoldkv.learn.solvers.closed_form import ClosedForm
from manifoldkv.learn.solvers.predictor import Predictor
from manifoldkv.learn.solvers.riemannian_adam import RiemannianAdam
from manifoldkv.learn.solvers.riemannian_lbfgs import (
    Flag,
    ObliqueFlag,
    ObliqueLBFGS,
    RiemannianLBFGS,
)

__all__ = [
    "SOLVERS",
    "ClosedForm",
    "Flag",
    "ObliqueFlag",
    "ObliqueLBFGS",
    "Predictor",
    "RiemannianAdam",
    "RiemannianLBFGS",
    "Solution",
    "Solver",
    "checked",
    "register_solver",
]
