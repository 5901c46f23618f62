"""Names for pluggable methods: a decorator for one's own code, entry points for other packages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.metadata import EntryPoints, entry_points
from typing import Any, Generic, TypeVar

from manifoldkv.errors import ArgumentError

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes of one kind by name.

    Parameters
    ----------
    kind : str
        What is registered, as error messages call it (``"objective"``).
    entry_point_group : str
        Other packages add classes by an entry point of this group.
    """

    def __init__(self, kind: str, entry_point_group: str) -> None:
        self._kind = kind
        self._group = entry_point_group
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Return a class decorator that makes the class known as `name`.

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
        """Return all known names: registered ones in order of registration, then entry points."""
        return list(dict.fromkeys([*self._classes, *(e.name for e in self._entry_points())]))

    def get(self, name: str) -> type[T]:
        """Return the class called `name`.

        Raises
        ------
        ArgumentError
            If there is none; the message lists the known names.
        """
        if name not in self._classes:
            for entry_point in self._entry_points():
                if entry_point.name == name:
                    self._classes[name] = entry_point.load()
        if name not in self._classes:
            known = ", ".join(self.names())
            raise ArgumentError(f"unknown {self._kind} {name!r}; known: {known}")
        return self._classes[name]

    def resolve(self, method: str | T) -> T:
        """Return a method as it is, or the one called so with its default fields.

        Raises
        ------
        ArgumentError
            If there is none of this name.
        """
        return self.get(method)() if isinstance(method, str) else method

    def describe(self, method: T) -> dict[str, Any]:
        """Return the name of a method, or that of its class if it has none, and its fields."""
        cls = type(method)
        named = {known: name for name, known in self._classes.items()}
        name = named.get(cls, f"{cls.__module__}.{cls.__qualname__}")
        fields = _fields(method)
        return {"name": name} | fields

    def _entry_points(self) -> EntryPoints:
        return entry_points(group=self._group)


def _fields(method: object) -> dict[str, Any]:
    """Return the fields of a dataclass; nothing of any other class."""
    if dataclasses.is_dataclass(method) and not isinstance(method, type):
        return dataclasses.asdict(method)
    return {}
