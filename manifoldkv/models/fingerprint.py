"""Fingerprints of weights, to distinguish weights of the same shape."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manifoldkv.errors import ModelError
from manifoldkv.models.offloading import weight_of
from manifoldkv.models.support import attention_of, decoder_layers, is_linear, linear_weight
from manifoldkv.modes import in_own_modes

SIDE = 8
"""Number of sampled rows, and of sampled columns, of a matrix."""


@in_own_modes
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
    for name, columns in _columns_of_matrices(model):
        if columns.is_meta:
            raise ModelError(f"{name} is on the meta device: load the model with its weights")
        rows = _spread(columns.shape[0]).to(columns.device)
        elements.append(columns[rows].flatten().float().cpu())
    return torch.stack(elements)


def _columns_of_matrices(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield names and sampled columns of the matrices, (out, SIDE)."""
    embedding = model.get_input_embeddings().weight
    yield "the input embedding", embedding[:, _spread(embedding.shape[1]).to(embedding.device)]
    layers = decoder_layers(model)
    for layer in (layers[0], layers[-1]):
        for name, linear in sorted(attention_of(layer).named_children()):
            if isinstance(linear, nn.Linear):
                weight = weight_of(layer, f"self_attn.{name}.weight")
                yield name, weight[:, _spread(weight.shape[1]).to(weight.device)]
            elif is_linear(linear):
                yield name, linear_weight(linear, _spread(linear.weight.shape[1]))


def _spread(size: int) -> Tensor:
    """Return evenly spaced indices of a dimension, (SIDE,), int64."""
    return torch.linspace(0, size - 1, SIDE, dtype=torch.float64).round().long()
