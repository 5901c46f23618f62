"""Caches of prompts that are stored and read back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

from torch import Tensor
from transformers import Cache, PreTrainedModel

from manifoldkv import RECIPES, Codec, CompressionPlan, Recipe
from manifoldkv.evaluate.retrieval import Holder, Prompts
from methods.base import register_method
from methods.plans import PlanMethod


@register_method("stored")
class Stored(PlanMethod):
    """The recipe stored: the cache of a prompt is coded once, tokens after it are uncompressed.

    A text that is read token by token has no loss. Bytes are expected ones, of symbols as frequent
    as those of calibration text.
    """

    recipe: ClassVar[Recipe] = RECIPES["stored"]

    @classmethod
    def describe(cls) -> dict[str, Any]:
        return {"recipe": cls.recipe.describe()}

    def make_plan(self) -> CompressionPlan:
        return self.compressed(self.recipe, self.ratio)

    def perplexity(self, tokens: Tensor) -> None:
        """Return None: a prompt is stored once, after it was read."""

    def holder(
        self, model: PreTrainedModel, prompts: Prompts
    ) -> AbstractContextManager[Callable[[], Cache]]:
        return through_codec(Codec(model, self.plan))(model, prompts)


def through_codec(codec: Codec) -> Holder:
    """Return a holder of prompts in caches that are stored and read back."""

    @contextmanager
    def holder(model: PreTrainedModel, prompts: Prompts) -> Iterator[Callable[[], Cache]]:
        reconstructed = codec.decode(codec.encode(prompts.stock, prompts.ids))
        yield lambda: copy.deepcopy(reconstructed)

    return holder
