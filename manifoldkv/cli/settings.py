"""Fields of a recipe and of its run, as ``--set name=value`` gives them."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, get_args, get_type_hints

from manifoldkv.coding.integers import Quantization
from manifoldkv.errors import ArgumentError
from manifoldkv.recipes.config import CompressionConfig
from manifoldkv.recipes.named import recipe_named
from manifoldkv.recipes.recipe import Recipe

RUN = ("rotary", "seed", "bits")
"""Names of settings that belong to the run, whatever its recipe."""
PLAIN = (int, float, bool, str, type(None))

T = TypeVar("T", bound=Any)


def configured(recipe: str, settings: Sequence[str]) -> CompressionConfig:
    """Return the configuration of a named recipe with some of its fields changed.

    Parameters
    ----------
    recipe : str
        Name out of `RECIPES`.
    settings : sequence of str
        ``name=value`` each. A name is a field of the recipe (``sinks=8``), a field of one of its
        methods after a dot (``ranks.multiple=8``), or one of `RUN`; a later setting wins. Values
        are Python literals or plain words: ``4``, ``0.5``, ``none``, ``0,2,4,8``, ``kq-svd``.

    Raises
    ------
    ArgumentError
        If a recipe or a method of a name does not exist.
        If a setting is not ``name=value``, has an unknown name or a value of another type.
    PlanError
        If a setting of the run does not go with the recipe.
    """
    chosen, run = recipe_named(recipe), dict[str, Any]()
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise ArgumentError(f"--set takes name=value, got {setting!r}")
        if name in RUN:
            run[name] = _value(text)
        else:
            chosen = _with(chosen, name, text, recipe)
    bits = run.pop("bits", None)
    quantization = None if bits is None else Quantization(bits)
    return CompressionConfig(recipe=chosen, quantization=quantization, **run)


def _with(chosen: Recipe, name: str, text: str, recipe: str) -> Recipe:
    part, dot, field = name.partition(".")
    if part not in {known.name for known in fields(chosen)}:
        known = ", ".join([*(known.name for known in fields(chosen)), *RUN])
        raise ArgumentError(f"recipe {recipe} has no field {part!r}; known: {known}")
    if not dot:
        return _replaced(chosen, part, text)
    method = getattr(chosen, part)
    own = {known.name for known in fields(method)} if is_dataclass(method) else set()
    if field not in own:
        raise ArgumentError(
            f"{part} of recipe {recipe} has no field {field!r}; known: {sorted(own)}"
        )
    return replace(chosen, **{part: _replaced(method, field, text)})


def _replaced(owner: T, name: str, text: str) -> T:
    """Return a dataclass with a field changed, whose plain types are checked."""
    value, hint = _value(text), get_type_hints(type(owner))[name]
    accepted = get_args(hint) or (hint,)
    plain = tuple(kind for kind in accepted if kind in PLAIN)
    if plain and len(plain) == len(accepted) and not isinstance(value, plain):
        raise ArgumentError(f"{name}={text} must be {' or '.join(kind.__name__ for kind in plain)}")
    return replace(owner, **{name: value})


def _value(text: str) -> Any:
    """Return a literal, or the text itself where it is none."""
    if text.lower() in ("none", "true", "false"):
        text = text.capitalize()
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
