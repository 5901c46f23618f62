"""The contract of a method, and the registry of methods."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import Cache, PreTrainedModel

from manifoldkv.core.basis import Rotary
from manifoldkv.core.errors import ModelError
from manifoldkv.core.registry import Registry
from manifoldkv.core.windows import cached_tokens
from manifoldkv.evaluate import Perplexity
from manifoldkv.evaluate.retrieval import Prompts
from manifoldkv.models.support import (
    attention_of,
    decoder_layers,
    sliding_windows,
)

if TYPE_CHECKING:
    from methods.plans import PlanMethod


@dataclass(frozen=True)
class Setting:
    """Model, text and options that all methods of a benchmark share.

    Parameters
    ----------
    model : PreTrainedModel
        Model whose cache is compressed.
    calibration : Tensor
        Token ids, (sequences, length).
    window : int
        Tokens at which ratios are counted.
    rotary : {"pre", "post"}
        Whether plans compress keys before or after rotation.
    seed : int
        Seed of the solvers.
    folder : Path
        Checkpoints of the bases.
    """

    model: PreTrainedModel
    calibration: Tensor
    window: int
    rotary: Rotary
    seed: int
    folder: Path

    @property
    def layers(self) -> int:
        """Return the number of decoder layers."""
        return len(decoder_layers(self.model))

    @property
    def head_dim(self) -> int:
        """Return the number of features of a head, d."""
        return int(attention_of(decoder_layers(self.model)[0]).head_dim)

    @property
    def features(self) -> int:
        """Return the number of features of the keys of a token in a layer, H_kv · d."""
        return int(self.model.config.get_text_config().num_key_value_heads * self.head_dim)

    def stock_bytes(self, tokens: int) -> int:
        """Return the bytes of the uncompressed cache of one sequence, in 16-bit numbers."""
        windows = sliding_windows(self.model.config)
        return 2 * self.features * 2 * sum(cached_tokens(tokens, window) for window in windows)


class Method(ABC):
    """A way to make a cache smaller; an instance is the method at one ratio.

    The first line of a method's docstring describes it in ``--help`` and in summaries.

    Parameters
    ----------
    setting : Setting
        Model, text and options of the benchmark.
    ratio : float
        Requested bytes of the cache over those of the uncompressed one.
    """

    def __init__(self, setting: Setting, ratio: float) -> None:
        self.setting = setting
        self.ratio = ratio

    @classmethod
    def ratios(cls, requested: Sequence[float]) -> Sequence[float]:
        """Return the ratios that the method is measured at, of those requested or its own."""
        return requested

    @classmethod
    def describe(cls) -> dict[str, Any]:
        """Return the settings that its caches depend on beside ratio, model and text."""
        return {"method": cls.__qualname__}

    @abstractmethod
    def nbytes(self, tokens: int) -> int:
        """Return the bytes of a cache of one sequence.

        Raises
        ------
        ArgumentError, PlanError, ModelError
            If the method cannot reach the ratio on this model.
        """

    @abstractmethod
    def perplexity(self, tokens: Tensor) -> Perplexity | None:
        """Return the loss on token ids (sequences, length) read through the cache.

        None for a method that compresses a whole prompt at once.
        """

    @abstractmethod
    def holder(
        self, model: PreTrainedModel, prompts: Prompts
    ) -> AbstractContextManager[Callable[[], Cache]]:
        """Hold prompts in the cache, as `manifoldkv.evaluate.retrieval.Holder` does."""

    def planned(self) -> Sequence[PlanMethod]:
        """Return the methods whose plans are kept for other runs: itself if it is one."""
        return ()

    def facts(self) -> dict[str, float]:
        """Return the bytes of the bases, and as `attention_work` the work of a plan."""
        return {"basis_bytes": 0, "attention_work": math.nan}


class Baseline(Method):
    """A method for models without sliding windows.

    Raises
    ------
    ModelError
        If a layer has a sliding window.
    """

    def __init__(self, setting: Setting, ratio: float) -> None:
        super().__init__(setting, ratio)
        for index, window in enumerate(sliding_windows(setting.model.config)):
            if window is not None:
                raise ModelError(
                    f"layer {index} has a sliding window of {window} tokens, and this cache "
                    "supports only layers without one"
                )


METHODS: Registry[Method] = Registry("method", "manifoldkv.benchmark_methods")
register_method = METHODS.register


@torch.no_grad()
def losses(
    model: PreTrainedModel,
    tokens: Tensor,
    keywords: Callable[[], dict[str, Any]],
    parts: list[int] | None = None,
) -> Perplexity:
    """Return the loss on token ids (sequences, length), with keyword arguments for the model.

    A sequence is read at once, or in parts of some lengths with the same arguments.
    """
    by_sequence = []
    for sequence in tqdm(tokens.to(model.device).split(1), disable=None, leave=False):
        given = keywords()
        read = sequence.split(parts or sequence.shape[1], dim=1)
        logits = torch.cat([model(input_ids=part, **given).logits[0] for part in read])[:-1]
        by_sequence.append(cross_entropy(logits.float(), sequence[0, 1:]).item())
    return Perplexity(tuple(by_sequence), tokens.shape[0] * (tokens.shape[1] - 1))
