"""Fields of a recipe and of its run, as ``--set name=value`` writes them."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from manifoldkv.core.errors import ArgumentError
from manifoldkv.plan.formats.integers import Quantization
from manifoldkv.recipes.config import CompressionConfig
from manifoldkv.recipes.named import recipe_named

RUN = ("rotary", "seed", "bits")
"""Settings of runs of any recipe."""
PLAIN = (int, float, bool, str, type(None))

T = TypeVar("T", bound=Any)


def configured(recipe: str, settings: Sequence[str]) -> CompressionConfig:
    """Return the configuration of a named recipe with some of its fields changed.

    A setting is ``name=value``: a field of the recipe (``sinks=8``), a field of one of its methods
    after a dot (``ranks.multiple=8``), or one of `RUN`; the last one wins. Values are Python
    literals or plain words: ``4``, ``0.5``, ``none``, ``0,2,4,8``, ``kq-svd``.

    Raises
    ------
    ArgumentError, PlanError
        If a name is unknown, a value is of another type, or settings contradict each other.
    """
    chosen, run = recipe_named(recipe), dict[str, Any]()
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise ArgumentError(f"--set takes name=value, got {setting!r}")
        if name in RUN:
            run[name] = _value(text)
        else:
            chosen = _changed(chosen, name, text, f"recipe {recipe}", RUN)
    bits = run.pop("bits", None)
    quantization = None if bits is None else Quantization(bits)
    return CompressionConfig(recipe=chosen, quantization=quantization, **run)


def _changed(owner: T, name: str, text: str, title: str, others: Sequence[str] = ()) -> T:
    """Return a dataclass with a field changed, or with a field of a field (``ranks.multiple``).

    `title` and `others` are the dataclass and further names in the message on an unknown name.
    """
    first, _, rest = name.partition(".")
    names = [field.name for field in fields(owner)] if is_dataclass(owner) else []
    if first not in names:
        known = ", ".join([*names, *others])
        raise ArgumentError(f"{title} has no field {first!r}; known: {known}")
    if rest:
        value = _changed(getattr(owner, first), rest, text, f"{first} of {title}")
    else:
        value = _checked(owner, first, text)
    return replace(owner, **{first: value})


def _checked(owner: Any, name: str, text: str) -> Any:
    """Return the value of a field; of a tuple, from its parts: ``8``, ``none,8``."""
    value, hint, said = _value(text), get_type_hints(type(owner))[name], f"{name}={text}"
    if get_origin(hint) is not tuple:
        return _of_type(value, hint, said)
    if isinstance(value, str):
        value = [_value(part) for part in value.split(",")]
    parts = value if isinstance(value, list | tuple) else [value]
    return tuple(_of_type(part, get_args(hint)[0], said) for part in parts)


def _of_type(value: Any, hint: Any, said: str) -> Any:
    """Return a value, refused if its field has plain types and it is of another."""
    accepted = get_args(hint) or (hint,)
    if not all(kind in PLAIN for kind in accepted):
        return value
    if float in accepted and type(value) is int:
        value = float(value)
    if not isinstance(value, accepted):
        names = ["none" if kind is type(None) else kind.__name__ for kind in accepted]
        raise ArgumentError(f"{said} must be {' or '.join(names)}")
    return value


def _value(text: str) -> Any:
    """Return a Python literal, or the text itself as a plain word."""
    if text.lower() in ("none", "true", "false"):
        text = text.capitalize()
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
