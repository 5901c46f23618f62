"""Results shared by several laws, computed once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

_RESULTS: dict[tuple[Hashable, ...], tuple[tuple[object, ...], Any]] = {}


def once(objects: tuple[object, ...], key: Hashable, compute: Callable[[], T]) -> T:
    """Return ``compute()``, computed at the first call for these objects and this key.

    Objects need not be hashable. They are kept alive, so that no others get their identity.
    """
    identity = (*map(id, objects), key)
    if identity not in _RESULTS:
        _RESULTS[identity] = (objects, compute())
    return _RESULTS[identity][1]
