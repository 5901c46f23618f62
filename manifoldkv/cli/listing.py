"""The command that lists what is registered."""

from __future__ import annotations

from typing import Any

from manifoldkv.cli.answers import Answer
from manifoldkv.objectives import OBJECTIVES
from manifoldkv.pipeline.recipes import RECIPES
from manifoldkv.ranks import RANK_RULES
from manifoldkv.registry import Registry
from manifoldkv.solvers import SOLVERS


def listed() -> Answer:
    """Return recipes with their fields; objectives, solvers and rank rules with first lines."""
    facts: dict[str, Any] = {
        "recipes": {name: recipe.describe() for name, recipe in RECIPES.items()}
    }
    lines = ["recipes"]
    for name, parts in facts["recipes"].items():
        lines += [f"  {name}", *(f"    {part:15} {_part(value)}" for part, value in parts.items())]
    registries: dict[str, Registry[Any]] = {
        "objectives": OBJECTIVES,
        "solvers": SOLVERS,
        "rank rules": RANK_RULES,
    }
    for kind, registry in registries.items():
        facts[kind] = _first_lines(registry)
        width = max(map(len, facts[kind]))
        lines += ["", kind, *(f"  {name:{width}}  {line}" for name, line in facts[kind].items())]
    return Answer(facts, lines)


def _first_lines(registry: Registry[Any]) -> dict[str, str]:
    """Return the first line of the docstring of every registered class."""
    found = {}
    for name in registry.names():
        lines = (registry.get(name).__doc__ or "").strip().splitlines()
        found[name] = lines[0] if lines else ""
    return found


def _part(value: Any) -> str:
    """Return a field of a recipe as a line shows it: a method by its name and its fields."""
    if not isinstance(value, dict):
        return str(value)
    fields = ", ".join(f"{name}={field}" for name, field in value.items() if name != "name")
    return f"{value['name']}({fields})" if fields else str(value["name"])
