"""A model with the shapes of an 8B model and random weights, and a random plan for it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from manifoldkv import CompressionPlan
from manifoldkv.models.fingerprint import fingerprint
from manifoldkv.plan.model import config_hash
from measurements import shapes

INTERMEDIATE, VOCABULARY, POSITIONS = 14336, 128256, 131072
PLAN = "bands of 1, trellis"
"""Of `shapes.PLANS`, in every layer."""


def random_model(layers: int, device: torch.device) -> PreTrainedModel:
    """Return a model with random weights, on a device, in float32 on a CPU, else in bfloat16."""
    config = LlamaConfig(
        hidden_size=shapes.QUERY_HEADS * shapes.HEAD_DIM,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=shapes.QUERY_HEADS,
        num_key_value_heads=shapes.KV_HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": float(shapes.ROTATION_BASE)},
        dtype=shapes.dtype_on(device),
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=config.dtype)
    return model.eval().requires_grad_(False)


def random_plan(model: PreTrainedModel, tokens: int) -> CompressionPlan:
    """Return a random plan of a random model, 8 times smaller after some tokens."""
    plan = shapes.layer_plan(*shapes.PLANS[PLAN], tokens)
    return replace(
        plan,
        layers=tuple(deepcopy(plan.layers[0]) for _ in range(model.config.num_hidden_layers)),
        config_hash=config_hash(model.config),
        fingerprint=fingerprint(model),
    )
