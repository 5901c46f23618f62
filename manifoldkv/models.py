"""Telling which models can be handled, and finding their layers."""

from __future__ import annotations

import sys
from inspect import signature
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from manifoldkv.errors import UnsupportedModelError


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a causal language model, in order."""
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        obstacle = (
            "it is an encoder, not a causal decoder"
            if _looks_ahead(model)
            else "it has no list of decoder layers"
        )
        raise UnsupportedModelError(f"{_family(model)} is not supported: {obstacle}")
    return layers


def attention_of(layer: nn.Module) -> Any:
    """The attention module of a decoder layer."""
    return layer.self_attn


def modeling_module(layer: nn.Module) -> Any:
    """The transformers module that defines a layer's attention, and how it rotates."""
    return sys.modules[type(attention_of(layer)).__module__]


def check_supported(model: PreTrainedModel) -> None:
    """Refuse, by name, models whose cache is not one key and one value per KV head and token.

    Raises
    ------
    UnsupportedModelError
        Naming the family and the feature in the way: latent attention (MLA), linear or recurrent
        layers, chunked attention, layers that share their cache, rotations that depend on length,
        or attention that does not go through transformers' attention interface.
    """
    config = model.config.get_text_config()
    obstacle = _obstacle(config)
    if obstacle is None:
        for layer in decoder_layers(model):
            obstacle = obstacle or _layer_obstacle(layer)
    if obstacle is not None:
        raise UnsupportedModelError(f"{_family(model)} is not supported: {obstacle}")


def _obstacle(config: PretrainedConfig) -> str | None:
    if getattr(config, "kv_lora_rank", None):
        return "its multi-head latent attention (MLA) already caches a latent"
    if getattr(config, "num_kv_shared_layers", 0):
        return "some of its layers share the keys and values of others"
    kinds = set(getattr(config, "layer_types", None) or [])
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        return f"it has layers of type {', '.join(sorted(unknown))}"
    parameters = getattr(config, "rope_parameters", None) or {}
    per_kind = parameters.values() if "rope_type" not in parameters else [parameters]
    for rope in per_kind:
        if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
            return f"its {rope['rope_type']} rotary embedding changes with the length of the text"
    return None


def _layer_obstacle(layer: nn.Module) -> str | None:
    if not hasattr(layer, "self_attn"):
        return f"{type(layer).__name__} has no self_attn"
    attention = attention_of(layer)
    if not isinstance(getattr(attention, "head_dim", None), int):
        return f"{type(attention).__name__} has no head_dim"
    module = modeling_module(layer)
    if not hasattr(module, "apply_rotary_pos_emb"):
        return f"{type(attention).__name__} does not rotate its keys"
    if tuple(signature(module.apply_rotary_pos_emb).parameters)[:2] != ("q", "k"):
        return f"{type(attention).__name__} does not rotate queries and keys together"
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return f"{type(attention).__name__} does not go through the attention interface"
    if not isinstance(getattr(attention, "o_proj", None), nn.Linear):
        return f"{type(attention).__name__} has no linear o_proj"
    return None


def _looks_ahead(model: PreTrainedModel) -> bool:
    """Whether every attention of a model says that tokens see later ones, as those of BERT do."""
    causal = [m.is_causal for m in model.modules() if hasattr(m, "is_causal")]
    return bool(causal) and not any(causal)


def _family(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} (model_type {model.config.model_type!r})"
