"""What a compressed block changes about a model until it is left, and what it refuses meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from manifoldkv.errors import CacheError


class WithoutGradient(torch.autograd.Function):
    """Hands the output of attention on, and refuses a gradient: what is stored has none."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *inputs: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise CacheError(
            "no gradient passes through a compressed cache: train the model outside of the block; "
            "manifoldkv.tune trains bases"
        )


class _Hook:
    """A hook that keeps the module it is registered on from being copied."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> Any:
        return self._hook(*args)

    def __reduce__(self) -> NoReturn:
        raise CacheError(
            "a model inside a compressed block can be neither copied nor pickled: leave the block"
        )


def register(stack: ExitStack, add: Callable[..., Any], hook: Callable[..., Any]) -> None:
    """Register a hook until the stack is left."""
    stack.callback(add(_Hook(hook), with_kwargs=True).remove)


def replace_attribute(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the stack is left."""
    if name in vars(owner):
        undo = partial(setattr, owner, name, vars(owner)[name])
    else:
        undo = partial(delattr, owner, name)
    setattr(owner, name, value)
    stack.callback(undo)


def refuse_continuous_batching(*args: Any, **kwargs: Any) -> NoReturn:
    raise CacheError("continuous batching has a cache of its own kind: call generate instead")


def refuse_to_save(*args: Any, **kwargs: Any) -> NoReturn:
    raise CacheError("W_O has value bases folded into it: leave the block before saving the model")
