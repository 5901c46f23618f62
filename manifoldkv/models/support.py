"""Supported models: wrappers, layers and windows, and reasons of refusals."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.nn.modules.dropout import _DropoutNd
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from manifoldkv.errors import ModelError

_SEVERAL_POSITIONS = "its rotary embedding (M-RoPE) takes several positions of a token"
_UNQUANTIZED = "as in a quantized model: load the model without quantization"


def unwrapped(model: Any) -> PreTrainedModel:
    """Return a model without wrappers of `torch.compile` and PEFT, with its active adapters.

    Raises
    ------
    ModelError
        If it is not a transformers model, or has prefix tuning, which fills the cache.
    """
    if isinstance(model, OptimizedModule):
        model = model._orig_mod
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        adapter = getattr(model, "active_peft_config", None)
        if getattr(adapter, "peft_type", None) == "PREFIX_TUNING":
            raise ModelError(
                "prefix tuning fills the cache with keys and values that no layer computed, which "
                "is not supported: take another kind of adapter"
            )
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"{type(model).__name__} is not a transformers model: pass the model inside it"
        )
    return model


@contextmanager
def uncompiled(module: nn.Module) -> Iterator[None]:
    """Run a model or a part of it without compilation inside the block.

    Compiled code ignores hooks registered later.

    Raises
    ------
    ModelError
        If a part of it has a wrapper of `torch.compile`.
    """
    for name, part in module.named_modules():
        if isinstance(part, OptimizedModule):
            raise ModelError(
                f"{name or 'the layer'} is compiled by itself: compile the whole model, or call "
                "the compile() methods of its parts"
            )
    compiled = {part: part._compiled_call_impl for part in module.modules()}
    compiled = {part: call for part, call in compiled.items() if call is not None}
    for part in compiled:
        part._compiled_call_impl = None
    try:
        yield
    finally:
        for part, call in compiled.items():
            part._compiled_call_impl = call


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers of a causal language model, in order."""
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        obstacle = (
            "it is an encoder, not a causal decoder"
            if _looks_ahead(model)
            else "it has no list of decoder layers"
        )
        raise ModelError(f"{_family(model)} is not supported: {obstacle}")
    return layers


def attention_of(layer: nn.Module) -> Any:
    """Return the attention module of a decoder layer."""
    return layer.self_attn


def linear_weight(linear: nn.Module, columns: Tensor | None = None) -> Tensor:
    """Return W of a linear layer ``x ↦ x Wᵀ + b`` with its active adapters, (out, in).

    Parameters
    ----------
    linear : nn.Module
        ``nn.Linear``, or an adapter of PEFT around one.
    columns : Tensor, optional
        Indices of the returned columns, (c,), int64; all if omitted.
    """
    weight: Any = linear.weight
    if isinstance(linear, nn.Linear):
        return weight if columns is None else weight[:, columns.to(weight.device)]
    if columns is None:
        columns = torch.arange(weight.shape[1])
    # Outputs for unit vectors are the columns, for any kind of adapter.
    units = nn.functional.one_hot(columns, weight.shape[1]).to(weight)
    with torch.no_grad(), evaluating(linear):
        return (linear(units) - linear(torch.zeros_like(units))).mT


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set a module to evaluation mode inside the block."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def modeling_module(layer: nn.Module) -> Any:
    """Return the transformers module that defines a layer's attention and rotation."""
    return sys.modules[type(attention_of(layer)).__module__]


def sliding_windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    """Return the sliding window of every layer in tokens, None for full attention."""
    _, keywords = get_layer_types_and_kwargs(config.get_text_config())
    return tuple(layer.get("sliding_window") for layer in keywords)


def check_supported(model: PreTrainedModel) -> None:
    """Refuse a model whose cache is not one key and one value per KV head and token.

    Raises
    ------
    ModelError
        If the cache is another: latent attention (MLA), linear or recurrent layers, chunked
        attention, layers that share their cache, keys of several sizes, rotations that depend on
        length or on several positions of a token (M-RoPE), or attention that does not call
        transformers' attention interface.
        If weights of an attention are quantized. The message names family and obstacle.
    """
    obstacle = "it has an encoder" if model.config.is_encoder_decoder else None
    config = model.config.get_text_config()
    # A field that differs between layers can be read from the layers' own configurations only.
    for each in config.per_layer_config if config.is_heterogeneous else [config]:
        obstacle = obstacle or _obstacle(each)
    if obstacle is None:
        layers = decoder_layers(model)
        obstacles = (_layer_obstacle(layer) for layer in layers)
        obstacle = next((x for x in obstacles if x), None) or _obstacle_of_all(model, layers)
    if obstacle is not None:
        raise ModelError(f"{_family(model)} is not supported: {obstacle}")


def check_without_dropout(model: PreTrainedModel) -> None:
    """Raise `ModelError` if a dropout layer is in training mode."""
    for name, part in model.named_modules():
        if isinstance(part, _DropoutNd) and part.training and part.p > 0:
            raise ModelError(f"{name} drops elements at random: call model.eval() first")


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
    unrotated = any(kind in parameters and parameters[kind] is None for kind in kinds)
    if unrotated or not all(getattr(config, "layer_rope_theta", None) or [True]):
        return "some of its layers do not rotate their keys"
    per_kind = parameters.values() if "rope_type" not in parameters else [parameters]
    for rope in per_kind:
        if isinstance(rope, dict) and _depends_on_length(rope):
            return f"its {rope['rope_type']} rotary embedding changes with the length of the text"
        if isinstance(rope, dict) and rope.get("mrope_section"):
            return _SEVERAL_POSITIONS
    return None


def _obstacle_of_all(model: PreTrainedModel, layers: nn.ModuleList) -> str | None:
    """Return an obstacle that no layer shows by itself."""
    embedding = getattr(model.get_decoder(), "rotary_emb", None)
    if getattr(embedding, "mrope_section", None):  # by default, where the configuration has none
        return _SEVERAL_POSITIONS
    projections = (getattr(attention_of(layer), "k_proj", None) for layer in layers)
    plain = (getattr(projection, "base_layer", projection) for projection in projections)
    sizes = {getattr(linear, "out_features", None) for linear in plain}
    if len(sizes) > 1:
        return "keys of its layers differ in the number of features"
    if model.config.get_text_config().is_heterogeneous:
        return "its layers have configurations of their own"
    return None


def _depends_on_length(rope: dict[str, Any]) -> bool:
    if (
        rope.get("rope_type") == "longrope"
    ):  # equal factors, as in exported checkpoints, are constant
        return rope.get("short_factor") is None or rope["short_factor"] != rope.get("long_factor")
    return rope.get("rope_type") == "dynamic"


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
    for name, part in attention.named_children():
        stored = _quantized(getattr(part, "base_layer", part))
        if stored is not None:
            return f"the {name} of {type(attention).__name__} has {stored}, {_UNQUANTIZED}"
    output = getattr(attention, "o_proj", None)
    if output is None:
        return f"{type(attention).__name__} has no linear o_proj"
    if not is_linear(output):
        return (
            f"the o_proj of {type(attention).__name__} is {type(output).__name__} in place of "
            f"nn.Linear, {_UNQUANTIZED}"
        )
    return None


def _quantized(projection: nn.Module) -> str | None:
    """Return the type or dtype of weights that are not plain floating-point numbers."""
    for parameter in projection.parameters(recurse=False):
        if type(parameter) is not nn.Parameter:
            return f"weights of type {type(parameter).__name__}"
    for stored in (*projection.parameters(recurse=False), *projection.buffers(recurse=False)):
        if not stored.is_floating_point() or stored.itemsize == 1:  # packed, or float8
            return f"weights in {stored.dtype}"
    return None


def is_linear(module: nn.Module | None) -> bool:
    """Return whether a module is a linear layer, with or without adapters of PEFT."""
    return isinstance(getattr(module, "base_layer", module), nn.Linear)


def _looks_ahead(model: PreTrainedModel) -> bool:
    """Return whether every attention of a model is bidirectional, as in BERT."""
    causal = [m.is_causal for m in model.modules() if hasattr(m, "is_causal")]
    return bool(causal) and not any(causal)


def _family(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} (model_type {model.config.model_type!r})"
