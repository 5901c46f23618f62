"""Tiny random models, activations of a layer, and random bases."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from manifoldkv.core.basis import Basis, HeadGrouping, orthonormal_basis
from manifoldkv.statistics.capture import capture
from manifoldkv.statistics.layer import LayerActivations

HEAD_DIM = 8
KV_HEADS = 2

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # attention is not uniform
}


@cache
def tiny_activations(dtype: torch.dtype = torch.float64) -> LayerActivations:
    """Return layer 1 of a random Llama with 4 query and 2 KV heads of 8, 6 sequences of 16."""
    return next(iter(capture(tiny_llama(dtype), tiny_tokens(), [1])))


@cache
def tiny_tokens() -> Tensor:
    """Return token ids of 6 sequences of 16, (6, 16), int64."""
    return torch.randint(64, (6, 16), generator=torch.Generator().manual_seed(0))


@cache
def tiny_llama(dtype: torch.dtype) -> PreTrainedModel:
    """Return a random Llama of two layers with full attention."""
    return _random_model(LlamaConfig(**SHAPE), dtype)


@cache
def tiny_gemma() -> PreTrainedModel:
    """Return a random Gemma 3 of a layer with a sliding window and one with full attention."""
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SHAPE, sliding_window=6, layer_types=kinds)
    return _random_model(config, torch.float64)


def _random_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    return model.to(dtype).eval().requires_grad_(False)


def random_basis(rank: int, grouping: HeadGrouping, seed: int) -> Basis:
    """Return a uniformly random orthonormal basis in float64."""
    generator = torch.Generator().manual_seed(seed)
    size = HEAD_DIM * grouping.width
    shape = (grouping.groups, size, rank * grouping.width)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    return orthonormal_basis(torch.linalg.qr(normal).Q, grouping)
