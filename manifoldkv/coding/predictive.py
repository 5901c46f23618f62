"""Predictive coding along the layers: transforms of residuals, and their reconstructions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manifoldkv.coding.search import exact_tensors
from manifoldkv.coding.transform import TransformConfig, WeightedKLT
from manifoldkv.core.basis import SITES, detached
from manifoldkv.core.progress import follow
from manifoldkv.plan.predictor import LinearPredictor, PredictorContext
from manifoldkv.statistics.statistics import Statistics

Fit = Callable[[int, Tensor, Tensor | None, TransformConfig], WeightedKLT]
"""Function of the index of a tensor (keys and values of all layers counted), its samples
(tokens, D), the inputs of its predictor (tokens, inputs) and a configuration, that fits a
transform."""
Reconstruct = Callable[[int, WeightedKLT, Tensor, PredictorContext], Tensor]
"""Function of the index of a tensor, its transform, its samples and the reconstructions of tensors
before it, that returns the reconstruction (tokens, D)."""


@dataclass(frozen=True)
class FittedLayer:
    """Transforms of the keys and values of a layer.

    Parameters
    ----------
    transforms : list of WeightedKLT
        Of keys and of values.
    reconstructed : list of Tensor
        Reconstructions of the samples of keys and of values, or the samples, (tokens, D) each.
    """

    transforms: list[WeightedKLT]
    reconstructed: list[Tensor]


def fit_layers(
    statistics: Statistics,
    configs: Sequence[TransformConfig],
    fit: Fit,
    reconstruct: Reconstruct | None = None,
) -> Iterator[FittedLayer]:
    """Yield the transforms of all layers, from the first to the last.

    Keys and values of neighbouring layers are alike. Each tensor may be predicted by ridge
    regression from tensors before it, and the residual is transformed and quantized.

    Parameters
    ----------
    statistics : Statistics
        Of the model.
    configs : sequence of TransformConfig
        Of keys and values of all layers, one after the other.
    fit : callable
        `Fit` of a tensor.
    reconstruct : callable, optional
        `Reconstruct` of a tensor; without it predictors read the samples themselves.
    """
    windows = statistics.model.windows
    depth = max((below for config in configs for below, _ in config.inputs), default=None)
    context = PredictorContext(depth, windows)
    for index in follow(range(len(windows)), len(windows), "fitting layers"):
        context.begin(index)
        layer = FittedLayer([], [])
        for tensor, x in enumerate(exact_tensors(statistics, index), len(SITES) * index):
            config = configs[tensor]
            inputs = torch.cat(context.of(config.inputs), dim=1) if config.inputs else None
            transform = fit(tensor, x, inputs, config)
            if depth is not None and reconstruct is not None:
                x = reconstruct(tensor, transform, x, context)
            context.add(x)
            layer.transforms.append(transform)
            layer.reconstructed.append(x)
        yield layer


def predictor_of(transform: WeightedKLT, config: TransformConfig) -> LinearPredictor | None:
    """Return the predictor of a transform, in float32; None without one."""
    if transform.weights is None:
        return None
    expansion = None if transform.expansion is None else detached(transform.expansion.float())
    return LinearPredictor(config.inputs, detached(transform.weights.float()), expansion)
