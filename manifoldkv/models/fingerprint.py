"""Fingerprints of weights, to distinguish weights of the same shape."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manifoldkv.errors import ModelError
from manifoldkv.models.offloading import weight_of
from manifoldkv.models.support import attention_of, decoder_layers, is_linear, linear_weight

SIDE = 8
"""Number of sampled rows, and of sampled columns, of a matrix."""


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> Tensor:
    """Return elements of the embedding and of attention in the first and the last layer.

    They are (matrices, SIDE²), float32, on the CPU. Active adapters are included. Of an offloaded
    model only these matrices are read.

    Raises
    ------
    ModelError
        If the model is on the meta device.
    """
    elements = []
    for name, sampled in _samples_of_matrices(model):
        if sampled.is_meta:
            raise ModelError(f"{name} is on the meta device: load the model with its weights")
        elements.append(sampled.flatten().float().cpu())
    return torch.stack(elements)


def _samples_of_matrices(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield names and samples of the matrices, (SIDE, SIDE)."""
    yield "the input embedding", _sampled(model.get_input_embeddings().weight)
    layers = decoder_layers(model)
    for layer in (layers[0], layers[-1]):
        for name, linear in sorted(attention_of(layer).named_children()):
            if isinstance(linear, nn.Linear):
                yield name, _sampled(weight_of(layer, f"self_attn.{name}.weight"))
            elif is_linear(linear):
                columns = linear_weight(linear, _spread(linear.weight.shape[1]))
                yield name, columns[_spread(len(columns)).to(columns.device)]


def _sampled(weight: Tensor) -> Tensor:
    """Return evenly spaced elements of a matrix, (SIDE, SIDE)."""
    rows, columns = (_spread(size).to(weight.device) for size in weight.shape)
    return weight[rows[:, None], columns]


def _spread(size: int) -> Tensor:
    """Return evenly spaced indices of a dimension, (SIDE,), int64."""
    return torch.linspace(0, size - 1, SIDE, dtype=torch.float64).round().long()
