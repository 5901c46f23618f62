"""Identity of a model: hashes of its configuration and weights, and a fingerprint of these."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from manifoldkv.core.errors import ModelError
from manifoldkv.core.modes import in_own_modes
from manifoldkv.models.offloading import named_weights, weight_of
from manifoldkv.models.support import attention_of, decoder_layers, is_linear, linear_weight

ARCHITECTURE = (
    *("model_type", "num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rope_parameters", "layer_types", "sliding_window"),
)
"""Fields of a configuration that must be equal: shapes of layers, windows and rotation.

Keys and values depend on no others: not on the size of the vocabulary, which added tokens change,
nor on names, special tokens, the head, dtypes or generation settings.
"""
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
    for name, sampled in _samples_of_matrices(model):
        if sampled.is_meta:
            raise ModelError(f"{name} is on the meta device: load the model with its weights")
        elements.append(sampled.flatten().float().cpu())
    return torch.stack(elements)


def _samples_of_matrices(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield names and samples of the matrices, (SIDE, SIDE)."""
    embedding = model.get_input_embeddings().weight
    # The first rows: further ones are appended for added tokens, or cut off.
    first = torch.arange(SIDE).clamp(max=embedding.shape[0] - 1)
    yield "the input embedding", _sampled(embedding, first)
    layers = decoder_layers(model)
    for layer in (layers[0], layers[-1]):
        for name, linear in sorted(attention_of(layer).named_children()):
            if isinstance(linear, nn.Linear):
                yield name, _sampled(weight_of(layer, f"self_attn.{name}.weight"))
            elif is_linear(linear):
                columns = linear_weight(linear, _spread(linear.weight.shape[1]))
                yield name, columns[_spread(len(columns)).to(columns.device)]


def _sampled(weight: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return elements of a matrix, (SIDE, SIDE): of evenly spaced columns, and rows if omitted."""
    rows = _spread(weight.shape[0]) if rows is None else rows
    columns = _spread(weight.shape[1])
    return weight[rows.to(weight.device)[:, None], columns.to(weight.device)]


def _spread(size: int) -> Tensor:
    """Return evenly spaced indices of a dimension, (SIDE,), int64."""
    return torch.linspace(0, size - 1, SIDE, dtype=torch.float64).round().long()


def digest_of_model(model: PreTrainedModel) -> str:
    """Return the SHA-256 of the weights and the configuration (rotation, soft caps) of a model."""
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, tensor in named_weights(model):
        digest.update(name.encode())
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(content.numpy().data)
    return digest.hexdigest()


def config_hash(config: PretrainedConfig) -> str:
    """Return the SHA-256 of the shapes, kinds of layers and rotation of a configuration."""
    text_config = config.get_text_config()
    architecture = {name: getattr(text_config, name, None) for name in ARCHITECTURE}
    # Files write one base of the angles as 10000 and as 10000.0.
    equal = json.loads(json.dumps(architecture), parse_int=float)
    return hashlib.sha256(json.dumps(equal, sort_keys=True).encode()).hexdigest()
