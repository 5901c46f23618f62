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
    for name, sample in _samples(model):
        if sample.is_meta:
            raise ModelError(f"{name} is on the meta device: load the model with its weights")
        elements.append(sample.flatten().float().cpu())
    return torch.stack(elements)


def _samples(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield names and samples of the matrices, (SIDE, SIDE)."""
    embedding = model.get_input_embeddings().weight
    # The first rows: further ones are appended for added tokens, or cut off.
    first = torch.arange(SIDE).clamp(max=embedding.shape[0] - 1).to(embedding.device)
    yield "the input embedding", _columns(embedding)[first]
    layers = decoder_layers(model)
    for layer in (layers[0], layers[-1]):
        for name, linear in sorted(attention_of(layer).named_children()):
            if isinstance(linear, nn.Linear):
                columns = _columns(weight_of(layer, f"self_attn.{name}.weight"))
            elif is_linear(linear):
                columns = linear_weight(linear, _spread(linear.weight.shape[1]))
            else:
                continue
            yield name, columns[_spread(columns.shape[0]).to(columns.device)]


def _columns(weight: Tensor) -> Tensor:
    return weight[:, _spread(weight.shape[1]).to(weight.device)]


def _spread(size: int) -> Tensor:
    """Return evenly spaced indices of a dimension, (SIDE,), int64."""
    return torch.linspace(0, size - 1, SIDE, dtype=torch.float64).round().long()
