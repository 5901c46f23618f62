"""Estimates of the time and memory of `compress`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.models.decoder import Decoder
from manifoldkv.models.weights import differentiable
from manifoldkv.modes import in_own_modes
from manifoldkv.recipes.compress import started
from manifoldkv.recipes.config import CompressionConfig
from manifoldkv.recipes.probe import Estimate
from manifoldkv.text.sources import TextSource


@in_own_modes
def estimate(
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    config: CompressionConfig | None = None,
    **settings: Any,
) -> Estimate:
    """Estimate time and memory of a run of `compress`, with the same parameters, on this machine.

    The first layer is captured on a few sequences, and a part of the work is measured on it.

    Raises
    ------
    ManifoldKVError
        As `compress`, before any long work.
    """
    decoder = Decoder.of(model)
    run = started(decoder, tokens, replace(config or CompressionConfig(), **settings))
    with differentiable(decoder.model):
        return run.recipe.estimate(decoder, run)
