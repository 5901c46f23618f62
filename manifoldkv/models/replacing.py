"""Temporary replacement of attributes."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any


def replace_attribute(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the stack is left."""
    if name in vars(owner):
        undo = partial(setattr, owner, name, vars(owner)[name])
    else:
        undo = partial(delattr, owner, name)
    setattr(owner, name, value)
    stack.callback(undo)
