"""Temporary changes to a model inside a compressed block, and operations refused meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.errors import CacheError
from manifoldkv.models.replacing import replace_attribute


class WithoutGradient(torch.autograd.Function):
    """Identity on the attention output that refuses a gradient: stored tokens have none."""

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
    """A hook that refuses copies of the module it is registered on."""

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


def change_generate(stack: ExitStack, model: PreTrainedModel, new_cache: Callable[[], Any]) -> None:
    """Make `generate` create a compressed cache where it would create an uncompressed one.

    Continuous batching, whose cache is paged, is refused.
    """
    prepare = model._prepare_cache_for_generation

    def prepare_compressed(
        generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if generation_config.use_cache is not False:
            # Some models name a default implementation, which is overridden.
            asked = generation_config.cache_implementation
            if asked not in (None, model.generation_config.cache_implementation):
                raise CacheError(
                    f"a compressed model has a compressed cache: call generate without "
                    f"cache_implementation={asked!r}"
                )
            generation_config.cache_implementation = None
            if model_kwargs.get("past_key_values") is None:
                model_kwargs["past_key_values"] = new_cache()
                if generation_config.is_assistant:
                    model_kwargs["past_key_values"].activate_past_recording()
        prepare(generation_config, model_kwargs, *args, **kwargs)

    replace_attribute(stack, model, "_prepare_cache_for_generation", prepare_compressed)
    replace_attribute(stack, model, "init_continuous_batching", _refuse_continuous_batching)


def _refuse_continuous_batching(*args: Any, **kwargs: Any) -> NoReturn:
    raise CacheError(
        "continuous batching has a paged cache, which cannot be compressed: call generate"
    )
