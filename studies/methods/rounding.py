"""Caches that round every element: eight-bit floats and the quantised cache of transformers."""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, QuantizedCache

from manifoldkv.core.errors import ModelError
from manifoldkv.evaluate import Perplexity
from manifoldkv.evaluate.retrieval import Prompts
from methods.base import Baseline, Setting, losses, register_method

FLOAT8 = torch.float8_e4m3fn
GROUP = 64
"""Neighbouring elements that share a scale and a zero point in HQQ: usually one head of a token."""


class RoundingMethod(Baseline):
    """A cache class that rounds keys and values when they are appended."""

    @abstractmethod
    def new_cache(self) -> Cache:
        """Return an empty cache."""

    def perplexity(self, tokens: Tensor) -> Perplexity | None:
        return losses(self.setting.model, tokens, lambda: {"past_key_values": self.new_cache()})

    @contextmanager
    def holder(self, model: PreTrainedModel, prompts: Prompts) -> Iterator[Callable[[], Cache]]:
        def filled() -> Cache:
            cache = self.new_cache()
            for index, layer in enumerate(prompts.stock.layers):
                cache.update(layer.keys, layer.values, index)
            return cache

        yield filled


class RoundedLayer(DynamicLayer):
    """Keys and values that are rounded when they are appended, held as reconstructions.

    Parameters
    ----------
    of_keys, of_values : callable
        Reconstruction of keys and of values, (B, H_kv, n, d).
    """

    def __init__(
        self, of_keys: Callable[[Tensor], Tensor], of_values: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self._of_keys, self._of_values = of_keys, of_values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return super().update(self._of_keys(key_states), self._of_values(value_states))


@register_method("fp8")
class Float8(RoundingMethod):
    """Keys and values in the format e4m3 without a scale."""

    @classmethod
    def ratios(cls, requested: Sequence[float]) -> Sequence[float]:
        return [0.5]

    def nbytes(self, tokens: int) -> int:
        return self.setting.stock_bytes(tokens) // 2

    def new_cache(self) -> Cache:
        return Cache(layers=[Float8Layer() for _ in range(self.setting.layers)])


class Float8Layer(DynamicLayer):
    """Keys and values in the format e4m3 without a scale, the fp8 cache of inference engines."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states.to(FLOAT8), value_states.to(FLOAT8))
        return keys.to(key_states.dtype), values.to(value_states.dtype)


@register_method("transformers-hqq")
class TransformersHQQ(RoundingMethod):
    """The quantised cache of transformers, HQQ with a scale and a zero point per 64 elements.

    A prompt is quantised when it is read. Tokens after it stay unquantised until there are 128.

    Raises
    ------
    ModelError
        If the package hqq is missing or a layer has a sliding window.
    """

    def __init__(self, setting: Setting, ratio: float) -> None:
        super().__init__(setting, ratio)
        if importlib.util.find_spec("hqq") is None:
            raise ModelError(
                "the quantised cache of transformers needs hqq: "
                'pip install -c constraints.txt -e ".[rivals]"'
            )
        self.bits = round(16 * ratio)

    @classmethod
    def ratios(cls, requested: Sequence[float]) -> Sequence[float]:
        return [bits / 16 for bits in (8, 4, 2)]

    def nbytes(self, tokens: int) -> int:
        elements = self.setting.stock_bytes(tokens) // 2
        return elements * self.bits // 8 + 2 * 2 * (elements // GROUP)

    def perplexity(self, tokens: Tensor) -> None:
        """Return None: a text that is read at once attends to its unquantised tokens."""

    def new_cache(self) -> Cache:
        config = self.setting.model.config
        return QuantizedCache(
            "hqq", config, nbits=self.bits, axis_key=1, axis_value=1, q_group_size=GROUP
        )
