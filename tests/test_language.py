"""Plain English where users read: messages, help, the README and the documentation."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RIDDLES = re.compile(
    r"\b(comes? back|(give|gives|gave|given) back|so many\b(?! as)|as (they|it) (are|is)\b|"
    r"(is|are) (?-i:none)\b|(goes?|gone) on\b|of one's own|what is left|what there is|hopefully|"
    r"as said|whichever|is known to|found to be|nobody|the very\b|of (its|their) own kind)",
    re.IGNORECASE,
)
"""Phrases of no field: say reconstruction, number of, uncompressed, unknown, resumes, residual."""
WHAT = re.compile(
    r"\b(whatever|whoever|the other way round|what (comes?|stands|holds|it|they|is|are|was|were|"
    r"has|a|an|the|no|each|every|all)\b)",
    re.IGNORECASE,
)
"""Phrases in place of a noun, which a docstring names."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOMS = sorted(path.name for path in (ROOT / "manifoldkv").iterdir() if path.is_dir())
"""Rooms whose docstrings are checked, those of attributes among them."""
MODULES = sorted(path for room in ("manifoldkv", "studies") for path in (ROOT / room).rglob("*.py"))


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Strings of a module that are no docstrings: what it prints and raises."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings:
            yield node.lineno, node.value


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings of a module, its classes, functions and attributes, by line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_have_no_riddles(room: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {phrase[0]}"
        for path in MODULES
        if path.is_relative_to(ROOT / "manifoldkv" / room)
        for line, text in docstrings(path)
        for pattern in (RIDDLES, WHAT)
        for phrase in pattern.finditer(text)
    ]
    assert found == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_has_no_riddles(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [found[0] for found in RIDDLES.finditer(text)] == []


def test_messages_and_help_have_no_riddles() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in MODULES
        for line, text in texts(path)
        if RIDDLES.search(text)
    ]
    assert found == []
