"""Registries of pluggable methods by name: a decorator, and entry points of other packages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.metadata import EntryPoints, entry_points
from typing import Any, Generic, TypeVar, cast

from manifoldkv.core.errors import ArgumentError

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes of one kind by name, registered here or by entry points of other packages.

    Parameters
    ----------
    kind : str
        Kind of classes in error messages (``"objective"``).
    entry_point_group : str
        Group of the entry points by which other packages add classes.
    """

    def __init__(self, kind: str, entry_point_group: str) -> None:
        self._kind = kind
        self._group = entry_point_group
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Return a class decorator that registers the class as `name`.

        Raises
        ------
        ValueError
            If another class already has the name.
        """

        def decorate(cls: type[T]) -> type[T]:
            if self._classes.get(name, cls) is not cls:
                raise ValueError(f"{self._kind} {name!r} is already {self._classes[name]!r}")
            self._classes[name] = cls
            return cls

        return decorate

    def names(self) -> list[str]:
        """Return all names: registered ones in order of registration, then entry points."""
        return list(dict.fromkeys([*self._classes, *(e.name for e in self._entry_points())]))

    def get(self, name: str) -> type[T]:
        """Return the class called `name`.

        Raises
        ------
        ArgumentError
            If the name is unknown; the message lists the known ones.
        """
        if name not in self._classes:
            for entry_point in self._entry_points():
                if entry_point.name == name:
                    self._classes[name] = entry_point.load()
        if name not in self._classes:
            names = ", ".join(self.names())
            raise ArgumentError(f"unknown {self._kind} {name!r}; known: {names}")
        return self._classes[name]

    def resolve(self, method: str | T) -> T:
        """Return a method, made with its default fields if it is a name; see `get`."""
        return self.get(method)() if isinstance(method, str) else method

    def describe(self, method: T) -> dict[str, Any]:
        """Return the registered name of a method, else its qualified name, and its fields."""
        cls, instance = type(method), cast(object, method)
        names = {registered: name for name, registered in self._classes.items()}
        name = names.get(cls, f"{cls.__module__}.{cls.__qualname__}")
        if dataclasses.is_dataclass(instance) and not isinstance(instance, type):
            return {"name": name} | dataclasses.asdict(instance)
        return {"name": name}

    def _entry_points(self) -> EntryPoints:
        return entry_points(group=self._group)
