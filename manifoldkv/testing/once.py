"""Results that several laws share, computed once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

_KEPT: dict[tuple[Hashable, ...], tuple[tuple[object, ...], Any]] = {}


def once(objects: tuple[object, ...], key: Hashable, compute: Callable[[], T]) -> T:
    """Return a result that is computed at the first call for these objects and this key.

    The objects need not be hashable. They are kept, so that no others take their identity.
    """
    at = (*map(id, objects), key)
    if at not in _KEPT:
        _KEPT[at] = (objects, compute())
    return _KEPT[at][1]
