"""Recipes and registered names, for people and for machines."""

from __future__ import annotations

from typing import Any

from manifoldkv.cli.answers import Answer
from manifoldkv.recipes.low_rank import REGISTRIES
from manifoldkv.recipes.named import recipe_named, recipe_names
from manifoldkv.registry import Registry

TITLES = {"objective": "objectives", "solver": "solvers", "ranks": "rank rules"}
"""Headings of the fields of a recipe that have a registry."""


def listed() -> Answer:
    """Return recipes with their fields; objectives, solvers and rank rules with first lines."""
    facts: dict[str, Any] = {
        "recipes": {name: recipe_named(name).describe() for name in recipe_names()}
    }
    lines = ["recipes"]
    for name, parts in facts["recipes"].items():
        lines += [f"  {name}", *(f"    {part:15} {_part(value)}" for part, value in parts.items())]
    for field, title in TITLES.items():
        facts[title] = named = _first_lines(REGISTRIES[field])
        width = max(map(len, named))
        lines += ["", title, *(f"  {name:{width}}  {line}" for name, line in named.items())]
    return Answer(facts, lines)


def _first_lines(registry: Registry[Any]) -> dict[str, str]:
    """Return the first line of the docstring of every registered class."""
    docstrings = {name: (registry.get(name).__doc__ or "").strip() for name in registry.names()}
    return {name: text.partition("\n")[0].rstrip() for name, text in docstrings.items()}


def _part(value: Any) -> str:
    """Return a field of a recipe as a line shows it: a method by its name and its fields."""
    if not isinstance(value, dict):
        return str(value)
    fields = ", ".join(f"{name}={field}" for name, field in value.items() if name != "name")
    return f"{value['name']}({fields})" if fields else str(value["name"])
