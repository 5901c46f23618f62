"""What several laws look at is computed for the first of them only."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

_KEPT: dict[tuple[Hashable, ...], tuple[tuple[object, ...], Any]] = {}


def once(objects: tuple[object, ...], key: Hashable, compute: Callable[[], T]) -> T:
    """Return what is computed for these very objects, which is done at the first call only.

    The objects need not be hashable. They are kept, so that no others take their identity.
    """
    place = (*map(id, objects), key)
    if place not in _KEPT:
        _KEPT[place] = (objects, compute())
    return _KEPT[place][1]
