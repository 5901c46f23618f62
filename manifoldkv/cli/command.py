"""Commands: a class of options here, and the work in a module of this room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from importlib import import_module
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo

from manifoldkv.cli.answers import show

JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")]

T = TypeVar("T")


def command(app: typer.Typer, work: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator that makes a dataclass of a class and adds it to an app as a command.

    Name and help are those of the class, in lower case, and its docstring; each field that is
    annotated for typer is an option. `work` is ``module.function`` in this room: imported when the
    command is called, it takes an instance and returns an answer, which is printed. Help lists
    arguments, required options, fields of the class and then inherited ones.
    """

    def add(cls: type[T]) -> type[T]:
        options: Any = dataclass(frozen=True, kw_only=True)(cls)
        module, _, function = work.partition(".")

        def run(**values: Any) -> None:
            as_json = values.pop("as_json")
            answer = getattr(import_module(f"manifoldkv.cli.{module}"), function)
            show(answer(options(**values)), as_json)

        parameters = [*_parameters(options), _parameter("as_json", JSON, False)]
        parameters.sort(key=lambda parameter: _place(parameter, cls))
        vars(run)["__signature__"] = Signature(parameters)
        run.__annotations__ = {}
        app.command(cls.__name__.lower(), help=cls.__doc__)(run)
        return cls

    return add


def _parameters(options: Any) -> list[Parameter]:
    """Return a parameter for every field that is annotated for typer."""
    hints = get_type_hints(options, include_extras=True)
    return [
        _parameter(f.name, hints[f.name], Parameter.empty if f.default is MISSING else f.default)
        for f in fields(options)
        if get_origin(hints[f.name]) is Annotated
    ]


def _parameter(name: str, annotation: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _place(parameter: Parameter, cls: type) -> int:
    """Return the rank of an option in the help."""
    if isinstance(parameter.annotation.__metadata__[0], ArgumentInfo):
        return 0
    if parameter.default is Parameter.empty:
        return 1
    return 2 if parameter.name in cls.__annotations__ else 3
