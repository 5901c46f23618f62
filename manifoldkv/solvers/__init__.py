"""Solvers: each finds a basis that makes the loss of a problem small."""

from manifoldkv.solvers import closed_form, predictor, riemannian_adam
from manifoldkv.solvers.base import SOLVERS, Solution, Solver, register_solver

__all__ = [
    "SOLVERS",
    "Solution",
    "Solver",
    "closed_form",
    "predictor",
    "register_solver",
    "riemannian_adam",
]
