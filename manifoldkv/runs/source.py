"""Digests of the code that results depend on: runs never resume from results of other code."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import ModuleType
from typing import Any

from manifoldkv.core.errors import RunError

PACKAGES = ("manifoldkv", "torch", "transformers", "geoopt")
"""Packages that the bases of a plan depend on."""
INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib"))
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()


def versions() -> dict[str, str]:
    """Return the versions of the packages that the bases of a plan depend on."""
    return {name: _version(name) for name in PACKAGES}


def digest_of_code(*parts: Callable[..., Any]) -> str:
    """Return the SHA-256 of the code of classes and functions.

    It covers the source of their modules and of all modules these refer to; of installed packages
    the version.

    Parameters
    ----------
    parts : class or function
        Classes of objectives, solvers and rank rules, and their callers.

    Raises
    ------
    RunError
        If a source cannot be read.
    """
    described = versions()
    classes = [base for part in parts for base in getattr(part, "__mro__", [part])]
    for part in dict.fromkeys(classes):
        module = sys.modules[part.__module__]
        if part.__module__ == "__main__" and not hasattr(module, "__file__"):
            raise RunError(
                f"the source of {part.__qualname__} cannot be read, so that a later run could not "
                "tell whether it has changed: define it in a file, or store no checkpoints"
            )
        _describe(module, described)
    return hashlib.sha256(repr(sorted(described.items())).encode()).hexdigest()


def _describe(module: ModuleType, described: dict[str, str]) -> None:
    """Add the digests of a module and of the modules it refers to."""
    name = module.__name__
    file = getattr(module, "__file__", None)
    if file is None or f"module {name}" in described:
        return
    path = Path(file).resolve()
    if any(path.is_relative_to(folder) for folder in INSTALLED):
        for distribution in _distributions().get(name.partition(".")[0], []):
            described[distribution] = _version(distribution)
        return
    if path.is_relative_to(STANDARD_LIBRARY):
        return
    described[f"module {name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    for value in list(vars(module).values()):
        owner = value if isinstance(value, ModuleType) else _module_of(value)
        if owner is not None:
            _describe(owner, described)


def _module_of(value: object) -> ModuleType | None:
    """Return the module of a function or class, or of the class of another value."""
    name = getattr(value, "__module__", None)
    return sys.modules.get(name) if isinstance(name, str) else None


@cache
def _version(distribution: str) -> str:
    """Return a version, cached: a digest of code needs thousands."""
    return version(distribution)


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(packages_distributions())
