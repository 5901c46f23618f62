"""Commands: a signature here, with options in groups, and the work in a module of this room."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from dataclasses import fields, is_dataclass
from importlib import import_module
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo

from manifoldkv.cli.answers import show

JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")]

F = TypeVar("F", bound=Callable[..., None])


def command(app: typer.Typer, module: str) -> Callable[[F], F]:
    """Return a decorator that adds a command with the name, signature and docstring of a function.

    The command imports `module` of this room when it is called, calls the function of the same name
    there and prints its answer. A parameter whose type is a dataclass is a group of options: every
    field that is annotated for typer is one, with the default of the parameter's own default, or
    else of the field. Help lists arguments, required options, the command's own options and then
    those of groups.
    """

    def add(function: F) -> F:
        name, hints = function.__name__, get_type_hints(function, include_extras=True)
        own, groups = inspect.signature(function).parameters, {}
        options = []
        for key, parameter in own.items():
            if is_dataclass(hints[key]):
                groups[key] = _group(hints[key], parameter.default)
                options += groups[key]
            else:
                options.append(_option(key, hints[key], parameter.default))
        options.append(_option("as_json", JSON, False))

        def run(**values: Any) -> None:
            as_json = values.pop("as_json")
            for group, members in groups.items():
                values[group] = hints[group](**{o.name: values.pop(o.name) for o in members})
            work = getattr(import_module(f"manifoldkv.cli.{module}"), name)
            show(work(**values), as_json)

        options.sort(key=lambda option: _place(option, own))
        vars(run)["__signature__"] = Signature(options)
        run.__annotations__ = {}
        app.command(name.rstrip("_"), help=function.__doc__)(run)
        return function

    return add


def _group(group: Any, default: Any) -> list[Parameter]:
    """Return a parameter for every field of a group that is annotated for typer."""
    hints = get_type_hints(group, include_extras=True)
    defaults = group if default is Parameter.empty else default
    return [
        _option(field.name, hints[field.name], getattr(defaults, field.name, Parameter.empty))
        for field in fields(group)
        if get_origin(hints[field.name]) is Annotated
    ]


def _option(name: str, annotation: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _place(option: Parameter, own: Container[str]) -> int:
    """Return the rank of an option in the help."""
    if isinstance(option.annotation.__metadata__[0], ArgumentInfo):
        return 0
    if option.default is Parameter.empty:
        return 1
    return 2 if option.name in own else 3
