"""Solvers: minimisers of the loss of a problem."""

from manifoldkv.solvers.base import SOLVERS, Solution, Solver, checked, register_solver
from manifoldkv.solvers.closed_form import ClosedForm
from manifoldkv.solvers.flag import Flag, ObliqueFlag
from manifoldkv.solvers.predictor import Predictor
from manifoldkv.solvers.riemannian_adam import RiemannianAdam
from manifoldkv.solvers.riemannian_lbfgs import ObliqueLBFGS, RiemannianLBFGS

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
