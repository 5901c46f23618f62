"""Methods of the benchmark, one class each: recipes, variants of them, and baselines.

A file has one family. Importing the package registers all of them in `METHODS`.
"""

from methods import (
    aatc,
    aqua,
    bits,
    cq,
    dropping,
    evicted,
    higgs,
    integers,
    kivi,
    kvtc,
    ranks,
    rounding,
    stored,
    turboquant,
    xkv,
)
from methods.base import METHODS, Method, Setting, register_method
from methods.plans import AttendedMethod, PlanMethod

__all__ = [
    "METHODS",
    "AttendedMethod",
    "Method",
    "PlanMethod",
    "Setting",
    "aatc",
    "aqua",
    "bits",
    "cq",
    "dropping",
    "evicted",
    "higgs",
    "integers",
    "kivi",
    "kvtc",
    "ranks",
    "register_method",
    "rounding",
    "stored",
    "turboquant",
    "xkv",
]
