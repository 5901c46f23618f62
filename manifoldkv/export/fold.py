"""A plan multiplied into the weights of its model: the same architecture with a smaller cache.

Keys that commute with their rotation are a head of their own: ``W_K' = Bᴴ W_K`` makes it,
``W_Q' = Aᴴ W_Q`` reads it for every query head, and it turns with the frequencies of its latents.
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
from manifoldkv.models.offloading import is_offloaded
from manifoldkv.models.rotary import rotary_embedding_of
from manifoldkv.models.support import (
    attention_of,
    check_supported,
    decoder_layers,
    sliding_windows,
)
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan

FAMILIES = ("llama", "mistral", "qwen2")
"""Model types whose attention is linear between its projections and its scores."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("k_norm", "q_norm")


def check_foldable(model: PreTrainedModel, plan: CompressionPlan) -> None:
    """Refuse, by name, a model or a plan that cannot be multiplied together.

    Raises
    ------
    ModelError
        If something between the weights and the scores of a model is not linear, or other than
        what one list of frequencies and one window can say.
    PlanError
        If the plan is of other weights, its keys do not commute with their rotation, it has other
        frequencies in another layer, or it stores more than latents in the dtype of the model.
    """
    check_foldable_model(model)
    plan.check_model(model)
    obstacle = _obstacle_of_plan(plan)
    if obstacle is not None:
        raise PlanError(f"the plan cannot be exported: {obstacle}")


def check_foldable_model(model: PreTrainedModel) -> None:
    """Refuse a model that no plan can be multiplied into.

    Raises
    ------
    ModelError
        As `check_foldable`.
    """
    check_supported(model)
    obstacle = _obstacle(model)
    if obstacle is not None:
        raise ModelError(
            f"{type(model).__name__} (model_type {model.config.model_type!r}) cannot be exported: "
            f"{obstacle}"
        )


def _obstacle(model: PreTrainedModel) -> str | None:
    config = model.config
    for layer in decoder_layers(model):
        attention = attention_of(layer)
        for name in NORMS:
            if getattr(attention, name, None) is not None:
                return f"its keys and queries pass through norms ({name}), which are not linear"
        if getattr(attention, "sinks", None) is not None:
            return "its attention has sinks of its own"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "its scores pass through a soft cap, which is not linear"
    if len(set(sliding_windows(config))) > 1:
        return "its layers have different sliding windows"
    if config.model_type not in FAMILIES:
        return f"only models of type {', '.join(FAMILIES)} are"
    if is_offloaded(model):
        return "its weights are read as it runs; load it whole"
    for layer in decoder_layers(model):
        for name in PROJECTIONS:
            linear = getattr(attention_of(layer), name)
            if type(linear) is not nn.Linear or not linear.weight.is_floating_point():
                return f"its {name} is no plain matrix (merge an adapter with merge_and_unload())"
    return None


def _obstacle_of_plan(plan: CompressionPlan) -> str | None:
    if not plan.rank_only:
        return "its latents are rounded, and weights keep nothing of that"
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
        Of a family out of `FAMILIES`; it is left as it was.
    plan : CompressionPlan
        Of commuting bases. Products are taken in float64 and rounded to the dtype of the model.

    Raises
    ------
    ModelError, PlanError
        As `check_foldable`.
    """
    check_foldable(model, plan)
    weights = dict(model.state_dict())
    names = {module: name for name, module in model.named_modules()}
    for layer, planned in zip(decoder_layers(model), plan.layers, strict=True):
        attention = attention_of(layer)
        for part, tensor in _folded_attention(attention, planned).items():
            weights[f"{names[attention]}.{part}"] = tensor.to(model.dtype)
    config = folded_config(model, plan)
    with torch.random.fork_rng(devices=[]):  # what is drawn here is overwritten
        made = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    made.load_state_dict(weights)
    made.generation_config = copy.deepcopy(model.generation_config)
    return made.to(model.device).eval().requires_grad_(False)


def _folded_attention(attention: Any, planned: LayerPlan) -> dict[str, Tensor]:
    """Return weights and biases of the projections by name, float64."""
    width = planned.key.basis.down.shape[-1]
    heads, head_dim = planned.key.grouping.heads, planned.key.head_dim
    query_heads = attention.q_proj.weight.shape[0] // head_dim
    key, value = planned.key.basis, planned.value.basis
    into_keys, into_values = key.down.double().mT, value.down.double().mT  # (G, w, p)
    of_keys = _by_query_head(key, query_heads // heads)
    of_values = _by_query_head(value, query_heads // heads)
    scale = attention.scaling * math.sqrt(width)
    found: dict[str, Tensor] = {}
    for name, by_group in (("k_proj", into_keys), ("v_proj", into_values)):
        for part, tensor in _parts(getattr(attention, name)):
            grouped = tensor.to(by_group).unflatten(0, (len(by_group), -1))  # (G, p, hidden or 1)
            found[f"{name}.{part}"] = (by_group @ grouped).flatten(0, 1)
    for part, tensor in _parts(attention.q_proj):
        by_head = tensor.to(of_keys).unflatten(0, (query_heads, head_dim))
        found[f"q_proj.{part}"] = scale * (of_keys.mT @ by_head).flatten(0, 1)
    output = attention.o_proj.weight.to(of_values).unflatten(1, (query_heads, head_dim))
    found["o_proj.weight"] = torch.einsum("ohd,hdw->ohw", output, of_values).flatten(1)
    groups = len(into_keys)
    stretch = _stretch(found["k_proj.weight"], found["q_proj.weight"], groups, width, pairs=True)
    for name, by in (("k_proj", stretch), ("q_proj", 1 / stretch)):
        for part, _ in _parts(getattr(attention, name)):
            _stretch_rows(found[f"{name}.{part}"], by)
    stretch = _stretch(found["v_proj.weight"], found["o_proj.weight"].mT, groups, width)
    for part, _ in _parts(attention.v_proj):
        _stretch_rows(found[f"v_proj.{part}"], stretch)
    _stretch_rows(found["o_proj.weight"].mT, 1 / stretch)
    return {
        name: x.squeeze(-1) if name.endswith("bias") else x.contiguous()
        for name, x in found.items()
    }


def _stretch(
    makes: Tensor, reads: Tensor, groups: int, width: int, *, pairs: bool = False
) -> Tensor:
    """Return by what latents are stretched, (G, w), so that two matrices are as large as another.

    What makes a latent is stretched by it and what reads it is shrunk, which changes no product. As
    they come from a plan the two may differ by orders of magnitude, where neither integers nor
    steps of an optimiser suit both.

    Parameters
    ----------
    makes, reads : Tensor
        Rows for latents, (G·w, hidden) and (H_q·w, hidden), heads of a group side by side.
    groups, width : int
        G and w.
    pairs : bool
        Whether latents i and w/2 + i, which rotation mixes, are stretched alike.
    """
    sizes = []
    for matrix in (makes, reads):
        rows = matrix.square().sum(dim=1).view(groups, -1, width).sum(dim=1)  # (G, w)
        if pairs:
            rows = rows.unflatten(1, (2, -1)).sum(dim=1).repeat(1, 2)
        sizes.append(rows.clamp(min=torch.finfo(rows.dtype).tiny))
    return (sizes[1] / sizes[0]).pow(0.25)


def _stretch_rows(matrix: Tensor, by: Tensor) -> None:
    """Stretch the rows of a matrix, (heads·w, …), in place; heads of a group are side by side."""
    matrix.view(len(by), -1, by.shape[1], matrix.shape[-1]).mul_(by.unsqueeze(1).unsqueeze(-1))


def _parts(linear: nn.Linear) -> list[tuple[str, Tensor]]:
    """Return weight and bias of a projection, both as matrices."""
    weight = [("weight", linear.weight)]
    return weight if linear.bias is None else [*weight, ("bias", linear.bias.unsqueeze(-1))]


def _by_query_head(basis: Basis, share: int) -> Tensor:
    """Return what reads a basis for every query head, (H_q, d, w), float64."""
    by_head = basis.up.double().unflatten(1, (basis.grouping.width, -1)).flatten(0, 1)
    return by_head.repeat_interleave(share, dim=0)


def folded_config(model: PreTrainedModel, plan: CompressionPlan) -> PretrainedConfig:
    """Return the configuration of the folded model: fewer KV heads, another head_dim.

    Where the frequencies are not the stock list of a head, they are written as the factors of a
    `longrope` that has the same ones for short texts and for long ones.
    """
    key, config = plan.layers[0].key.basis, model.config
    changes = {
        "head_dim": key.down.shape[-1],
        "num_key_value_heads": key.grouping.heads // key.grouping.width,
    }
    settings = config.to_dict() | changes
    if key.frequencies != tuple(range(key.head_dim // 2)):
        settings["rope_parameters"] = _rope_parameters(model, key)
    return type(config).from_dict(settings)


def _rope_parameters(model: PreTrainedModel, key: Basis) -> dict[str, object]:
    embedding: Any = rotary_embedding_of(model.get_decoder())
    factors = frequency_factors(model, key)
    theta = float(model.config.rope_parameters["rope_theta"])
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "factor": 1.0,
        "attention_factor": float(embedding.attention_scaling),
        "original_max_position_embeddings": model.config.max_position_embeddings,
        "short_factor": factors,
        "long_factor": factors,
    }


def frequency_factors(model: PreTrainedModel, key: Basis) -> list[float]:
    """Return by what the stock frequencies of a head of the new width are divided, (w/2,)."""
    theta, width = float(model.config.rope_parameters["rope_theta"]), key.down.shape[-1]
    embedding: Any = rotary_embedding_of(model.get_decoder())
    own = embedding.inv_freq.double().tolist()
    stock = [theta ** (-2 * i / width) for i in range(width // 2)]
    return [divided / own[j] for divided, j in zip(stock, key.frequencies or (), strict=True)]
