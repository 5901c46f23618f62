"""The quantised cache of transformers itself, with its HQQ backend, as a check of ours."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from transformers import Cache, PreTrainedModel
from transformers.cache_utils import QuantizedCache

from manifoldkv.errors import ModelError
from manifoldkv.evaluation.retrieval import Prompts

GROUP = 64
"""Neighbouring elements that have a scale and a zero point together: a head of a token, usually."""


def check_hqq() -> None:
    """Refuse to go on where the package is missing.

    Raises
    ------
    ModelError
        That says how to install it.
    """
    if importlib.util.find_spec("hqq") is None:
        raise ModelError(
            "the quantised cache of transformers needs the package hqq: pip install hqq"
        )


@dataclass(frozen=True)
class HQQHolder:
    """Holds a prompt in `QuantizedCache`, which rounds all of it when it is read.

    Tokens that come after it stay as they are until there are 128 of them.

    Parameters
    ----------
    bits : int
        Of an element: 8, 4 or 2.
    """

    bits: int

    def new_cache(self, model: PreTrainedModel) -> QuantizedCache:
        """Return an empty cache."""
        return QuantizedCache(
            "hqq", model.config, nbits=self.bits, axis_key=1, axis_value=1, q_group_size=GROUP
        )

    @contextmanager
    def __call__(self, model: PreTrainedModel, prompts: Prompts) -> Iterator[Callable[[], Cache]]:
        def new_cache() -> Cache:
            cache = self.new_cache(model)
            for index, layer in enumerate(prompts.stock.layers):
                cache.update(layer.keys, layer.values, index)
            return cache

        yield new_cache

    def nbytes(self, elements: int) -> int:
        """Return the bytes of so many elements of a prompt: codes, scales and zero points."""
        return elements * self.bits // 8 + 2 * 2 * (elements // GROUP)
