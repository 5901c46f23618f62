"""Commands that list what is registered."""

from __future__ import annotations

from typing import Any

from manifoldkv.cli.answers import Answer
from manifoldkv.objectives import OBJECTIVES
from manifoldkv.pipeline.recipes import RECIPES
from manifoldkv.registry import Registry
from manifoldkv.solvers import SOLVERS


def objectives() -> Answer:
    """Return the registered objectives with their first lines."""
    return _described(OBJECTIVES)


def solvers() -> Answer:
    """Return the registered solvers with their first lines."""
    return _described(SOLVERS)


def recipes() -> Answer:
    """Return the recipes and what they are made of."""
    facts = {name: recipe.describe() for name, recipe in RECIPES.items()}
    lines = []
    for name, parts in facts.items():
        lines += [name, *(f"  {part:15} {_part(value)}" for part, value in parts.items())]
    return Answer(facts, lines)


def _described(registry: Registry[Any]) -> Answer:
    named = {}
    for name in registry.names():
        lines = (registry.get(name).__doc__ or "").strip().splitlines()
        named[name] = lines[0] if lines else ""
    width = max(map(len, named))
    return Answer(named, [f"{name:{width}}  {line}" for name, line in named.items()])


def _part(value: Any) -> str:
    """Return a field of a recipe as a line shows it: a method by its name and its fields."""
    if not isinstance(value, dict):
        return str(value)
    fields = ", ".join(f"{name}={field}" for name, field in value.items() if name != "name")
    return f"{value['name']}({fields})" if fields else str(value["name"])
