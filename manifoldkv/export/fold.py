"""A plan multiplied into the weights of its model: the same architecture with a smaller cache.

Latents of keys that commute with their rotation are a KV head: ``W_K' = Bᴴ W_K`` writes it,
``W_Q' = Aᴴ W_Q`` reads it for every query head, and its frequencies are those of the latents.
``W_V' = downᵀ W_V`` and ``W_O' = W_O up`` do the same for values. A group of heads becomes one KV
head as wide as its latents.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from manifoldkv.basis import Basis
from manifoldkv.errors import ModelError, PlanError
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.offloading import is_offloaded
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan

FAMILIES = ("llama", "mistral", "qwen2")
"""Model types whose attention is linear between its projections and its scores."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def check_foldable(model: PreTrainedModel, plan: CompressionPlan) -> Decoder:
    """Return the view of a model that a plan can be multiplied into.

    Raises
    ------
    ModelError
        If something between the weights and the scores of a model is not linear, or cannot be
        expressed by one list of frequencies and one window.
    PlanError
        If the plan is for other weights, its keys do not commute with their rotation, its layers
        have different frequencies, or it stores more than latents in the dtype of the model.
    """
    decoder = Decoder.of(model)
    obstacle = _obstacle_of_model(decoder)
    if obstacle is not None:
        raise ModelError(
            f"{type(decoder.model).__name__} (model_type {decoder.model.config.model_type!r}) "
            f"cannot be exported: {obstacle}"
        )
    plan.check_model(decoder)
    obstacle = _obstacle_of_plan(plan)
    if obstacle is not None:
        raise PlanError(f"the plan cannot be exported: {obstacle}")
    return decoder


def _obstacle_of_model(decoder: Decoder) -> str | None:
    if decoder.model.config.model_type not in FAMILIES:
        return f"only models of type {', '.join(FAMILIES)} are"
    if len(set(decoder.windows)) > 1:
        return "its layers have different sliding windows"
    if is_offloaded(decoder.model):
        return "its weights are read as it runs; load it whole"
    for attention in decoder.attentions:
        for name in PROJECTIONS:
            linear = getattr(attention, name)
            if type(linear) is not nn.Linear or not linear.weight.is_floating_point():
                return f"its {name} is no plain matrix (merge an adapter with merge_and_unload())"
    return None


def _obstacle_of_plan(plan: CompressionPlan) -> str | None:
    if not plan.rank_only:
        return "its latents are quantised, which weights cannot express"
    if plan.sinks:
        return (
            f"it keeps the first {plan.sinks} tokens uncompressed, and a plain cache holds one "
            "kind of token"
        )
    for index, layer in enumerate(plan.layers):
        if not layer.key.basis.commuting:
            return (
                f"the keys of layer {index} do not commute with their rotation (recipe commuting "
                "makes a plan whose keys do)"
            )
        if layer.key.basis.frequencies != plan.layers[0].key.basis.frequencies:
            return f"layer {index} has other frequencies than layer 0, and a model has one list"
        if layer.key.grouping.width != plan.layers[0].key.grouping.width:
            return f"layer {index} has other groups of heads than layer 0"
        if layer.value.grouping != layer.key.grouping or layer.value.rank != layer.key.rank:
            return f"keys and values of layer {index} differ in width, or in groups of heads"
    return None


@torch.no_grad()
def folded(model: PreTrainedModel, plan: CompressionPlan) -> PreTrainedModel:
    """Return a model of the same class that computes what the model does on its compressed cache.

    Parameters
    ----------
    model : PreTrainedModel
        Of a family out of `FAMILIES`; it is left unchanged.
    plan : CompressionPlan
        Of commuting bases. Products are taken in float64 and rounded to the dtype of the model.

    Raises
    ------
    ModelError, PlanError
        As `check_foldable`.
    """
    decoder = check_foldable(model, plan)
    model = decoder.model
    weights = dict(model.state_dict())
    names = {module: name for name, module in model.named_modules()}
    for attention, planned in zip(decoder.attentions, plan.layers, strict=True):
        for part, tensor in _folded_attention(attention, planned).items():
            weights[f"{names[attention]}.{part}"] = tensor.to(model.dtype)
    config = _folded_config(decoder, plan.layers[0].key.basis)
    with torch.random.fork_rng(devices=[]):  # initial weights, overwritten below
        result = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    result.load_state_dict(weights)
    result.generation_config = copy.deepcopy(model.generation_config)
    return result.to(model.device).eval().requires_grad_(False)


def _folded_attention(attention: Any, planned: LayerPlan) -> dict[str, Tensor]:
    """Return weights and biases of the projections by name, float64."""
    key, value = planned.key.basis, planned.value.basis
    groups, width = len(key.down), key.down.shape[-1]
    query_heads = attention.q_proj.weight.shape[0] // key.head_dim
    share = query_heads // key.grouping.heads
    key_up, value_up = _up_by_query_head(key, share), _up_by_query_head(value, share)
    scale = attention.scaling * math.sqrt(width)
    parts: dict[str, Tensor] = {}  # (G, heads, w, hidden, or 1 of a bias)
    for name, basis in (("k_proj", key), ("v_proj", value)):
        by_group = basis.down.double().mT  # (G, w, p)
        for part, tensor in _parts(getattr(attention, name)):
            grouped = tensor.to(by_group).unflatten(0, (groups, -1))  # (G, p, hidden or 1)
            parts[f"{name}.{part}"] = (by_group @ grouped).unsqueeze(1)
    for part, tensor in _parts(attention.q_proj):
        by_head = tensor.to(key_up).unflatten(0, (query_heads, -1))
        parts[f"q_proj.{part}"] = scale * (key_up.mT @ by_head).unflatten(0, (groups, -1))
    output = attention.o_proj.weight.to(value_up).unflatten(1, (query_heads, -1))
    transposed = torch.einsum("ohd,hdw->hwo", output, value_up)
    parts["o_proj.weight"] = transposed.unflatten(0, (groups, -1))
    _balance(parts, "k_proj", "q_proj", pairs=True)
    _balance(parts, "v_proj", "o_proj")
    parts = {name: x.flatten(0, 2) for name, x in parts.items()}
    parts["o_proj.weight"] = parts["o_proj.weight"].mT
    return {
        name: x.squeeze(-1) if name.endswith("bias") else x.contiguous()
        for name, x in parts.items()
    }


def _balance(parts: dict[str, Tensor], writer: str, reader: str, *, pairs: bool = False) -> None:
    """Stretch latents, in place, so that the matrices that write and read them are equally large.

    Scaling rows of one and shrinking those of the other changes no product. Straight from a plan
    the two may differ by orders of magnitude, where neither integers nor steps of an optimiser suit
    both.

    Parameters
    ----------
    parts : dict
        Matrices and biases by name, (G, heads, w, hidden or 1), rows of latents.
    writer, reader : str
        Names of the two projections.
    pairs : bool
        Whether latents i and w/2 + i are stretched alike, because rotation mixes them.
    """
    sizes = []
    for name in (writer, reader):
        rows = parts[f"{name}.weight"].square().sum(dim=(1, 3))  # (G, w)
        if pairs:
            rows = rows.unflatten(1, (2, -1)).sum(dim=1).repeat(1, 2)
        sizes.append(rows.clamp(min=torch.finfo(rows.dtype).tiny))
    by = (sizes[1] / sizes[0]).pow(0.25)[:, None, :, None]
    for name, matrix in parts.items():
        if name.startswith((writer, reader)):
            matrix *= by if name.startswith(writer) else 1 / by


def _parts(linear: nn.Linear) -> list[tuple[str, Tensor]]:
    """Return weight and bias of a projection, both as matrices."""
    weight = [("weight", linear.weight)]
    return weight if linear.bias is None else [*weight, ("bias", linear.bias.unsqueeze(-1))]


def _up_by_query_head(basis: Basis, share: int) -> Tensor:
    """Return up by query head, `share` of which read one KV head, (H_q, d, w), float64."""
    by_head = basis.up.double().unflatten(1, (basis.grouping.width, -1)).flatten(0, 1)
    return by_head.repeat_interleave(share, dim=0)


def _folded_config(decoder: Decoder, key: Basis) -> PretrainedConfig:
    """Return the configuration of the folded model: fewer KV heads, another head_dim.

    Frequencies other than the default ones of a head are written as the factors of a `longrope`,
    equal for short texts and for long ones.
    """
    config = decoder.model.config
    settings = config.to_dict() | {
        "head_dim": key.down.shape[-1],
        "num_key_value_heads": key.grouping.heads // key.grouping.width,
    }
    if key.frequencies != tuple(range(key.head_dim // 2)):
        settings["rope_parameters"] = _rope_parameters(decoder, key)
    return type(config).from_dict(settings)


def _rope_parameters(decoder: Decoder, key: Basis) -> dict[str, object]:
    embedding: Any = decoder.rotary_embedding
    config, width = decoder.model.config, key.down.shape[-1]
    theta = float(config.rope_parameters["rope_theta"])
    frequencies = embedding.inv_freq.double().tolist()
    default = [theta ** (-2 * i / width) for i in range(width // 2)]
    factors = [x / frequencies[j] for x, j in zip(default, key.frequencies or (), strict=True)]
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "factor": 1.0,
        "attention_factor": float(embedding.attention_scaling),
        "original_max_position_embeddings": config.max_position_embeddings,
        "short_factor": factors,
        "long_factor": factors,
    }
