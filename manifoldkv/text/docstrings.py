"""The ``docstrings`` text source: English technical prose of every installation.

Documents are docstrings of the packages that manifoldkv depends on, parsed from source files with
:mod:`ast`, without imports. A hash of the words of a document determines its split, so that another
version of a package cannot move held-out text into calibration.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

Split = Literal["calibration", "held-out"]

PACKAGES = (
    "numpy",
    "scipy",
    "pandas",
    "matplotlib",
    "torch",
    "transformers",
    "sympy",
    "networkx",
    "datasets",
    "huggingface_hub",
    "fsspec",
    "geoopt",
    "PIL",
)
"""Direct and indirect dependencies of manifoldkv, read beside the standard library."""

MINIMUM_CHARACTERS = 200
HELD_OUT_FRACTION = 1 / 5
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "site-packages", "pydoc_data", "idlelib", "lib2to3", "__pycache__"}
)


def split_of(document: str) -> Split:
    """Return the split of a document by the SHA-256 of its words, without white space."""
    digest = hashlib.sha256(" ".join(document.split()).encode()).digest()
    uniform = int.from_bytes(digest[:8]) / 2**64
    return "held-out" if uniform < HELD_OUT_FRACTION else "calibration"


def read_docstrings(split: Split | None = None) -> Iterator[str]:
    """Yield the documents of a split (both if None), each once, in a fixed order.

    Source files are ordered by a hash of their names, so that the first documents are a mixture of
    all packages. Documents are dedented and have at least `MINIMUM_CHARACTERS` characters.
    """
    seen: set[bytes] = set()
    for path in _source_files(tuple(_roots())):
        for document in _documents(path):
            words = hashlib.sha256(" ".join(document.split()).encode()).digest()
            if words in seen:
                continue
            seen.add(words)
            if split is None or split_of(document) == split:
                yield document


def read_pydoc_topics() -> Iterator[str]:
    """Yield the chapters of Python's reference, ``pydoc_data.topics``, a second corpus."""
    path = Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Dict):
            for value in node.values:
                yield str(ast.literal_eval(value))


@cache
def _source_files(roots: tuple[tuple[str, Path], ...]) -> list[Path]:
    named: list[tuple[str, Path]] = []
    for package, root in roots:
        for path in root.rglob("*.py"):
            relative = path.relative_to(root)
            if _SKIPPED_FOLDERS.isdisjoint(relative.parts):
                named.append((f"{package}/{relative.as_posix()}", path))
    named.sort(key=lambda entry: hashlib.sha256(entry[0].encode()).digest())
    return [path for _, path in named]


def _roots() -> Iterator[tuple[str, Path]]:
    yield "", Path(sysconfig.get_path("stdlib"))
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)  # finds the folder, imports nothing
        for location in (spec.submodule_search_locations or []) if spec else []:
            yield package, Path(location)


def _documents(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in third-party source
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            document = ast.get_docstring(node)
            if document and len(document) >= MINIMUM_CHARACTERS:
                yield document
