"""A model with the shapes of an 8B model and random weights, and a random plan for it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from manifoldkv import CompressionPlan
from manifoldkv.coding.candidates import blocks_of
from manifoldkv.core.basis import Basis, HeadGrouping
from manifoldkv.models.fingerprint import config_hash, fingerprint
from manifoldkv.plan.compute import AttentionShape
from manifoldkv.plan.formats.mixed import MixedWidths
from manifoldkv.plan.formats.trellis import TrellisCoded
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.predictor import LinearPredictor
from manifoldkv.plan.provenance import Provenance
from manifoldkv.plan.site import SitePlan
from manifoldkv.runs.source import versions

QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
FEATURES = KV_HEADS * HEAD_DIM
ROTATION_BASE = 500_000
PLANS = {
    "bands of 1, values alone": (1, False, False),
    "bands of 1": (1, True, False),
    "bands of 4": (4, True, False),
    "bands of 8": (8, True, False),
    "bands of 1, trellis": (1, True, True),
}
"""Frequencies of a band of keys, whether values are predicted from the keys of the layer, and
whether latents are trellis-coded."""
PACKS, WIDEST, NARROWEST = 75, 6.15, 0.55
"""Packs of 8 latents that are stored of a site, and the bits of the first and the last."""
SINKS = 4
INTERMEDIATE, VOCABULARY, POSITIONS = 14336, 128256, 131072
PLAN = "bands of 1, trellis"
"""Of `PLANS`, in every layer."""


def dtype_on(device: torch.device) -> torch.dtype:
    """Return the dtype of models on a device, float32 on a CPU."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def random_model(layers: int, device: torch.device) -> PreTrainedModel:
    """Return a model with random weights, on a device, in float32 on a CPU, else in bfloat16."""
    config = LlamaConfig(
        hidden_size=QUERY_HEADS * HEAD_DIM,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": float(ROTATION_BASE)},
        dtype=dtype_on(device),
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=config.dtype)
    return model.eval().requires_grad_(False)


def site_bits() -> Tensor:
    """Return the bits of all latents of a site, (features,), which are an eighth of 16 each."""
    packs = torch.linspace(WIDEST, NARROWEST, PACKS).round().clamp(min=1)
    bits = torch.zeros(FEATURES)
    bits[: 8 * PACKS] = packs.repeat_interleave(8)
    return bits.to(torch.uint8)


def site_plan(
    blocks: tuple[Tensor, ...], predictor: LinearPredictor | None = None, *, trellis: bool = False
) -> SitePlan:
    """Return a random plan of a site whose basis has blocks of features."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.zeros(FEATURES, FEATURES)
    for index, block in enumerate(blocks):
        size = len(block), len(block)
        random = torch.randn(size, generator=generator, dtype=torch.float64)
        latents = torch.arange(index, FEATURES, len(blocks))  # the widest of every block first
        columns[block.unsqueeze(1), latents] = torch.linalg.qr(random).Q.float()
    ones, bits = [torch.ones(FEATURES) for _ in range(3)], site_bits()
    if trellis:
        quantizer: MixedWidths = TrellisCoded(bits.float(), *ones)
    else:
        quantizer = MixedWidths(bits, 6 / 2.0 ** bits.float(), *ones[1:])
    basis = Basis(columns[None], columns[None].clone(), HeadGrouping("all", KV_HEADS))
    return SitePlan(basis, quantizer, torch.zeros(FEATURES), predictor)


def layer_plan(band: int, predicts: bool, trellis: bool, tokens: int) -> CompressionPlan:
    """Return a random plan of one layer, 8 times smaller.

    Parameters
    ----------
    band : int
        Frequencies of a band of keys.
    predicts : bool
        Whether values are predicted from the keys of the layer.
    trellis : bool
        Whether latents are trellis-coded.
    tokens : int
        Cached tokens.
    """
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(FEATURES, FEATURES, generator=generator) / FEATURES**0.5
    predictor = LinearPredictor(((0, "key"),), weights) if predicts else None
    frequencies = [feature % (HEAD_DIM // 2) for feature in range(HEAD_DIM)]
    key = site_plan(blocks_of(frequencies, KV_HEADS, band), trellis=trellis)
    whole = (torch.arange(FEATURES),)
    value = site_plan(whole, predictor, trellis=trellis)
    recipe = {part: {"name": "random"} for part in ("objective", "solver", "ranks")}
    return CompressionPlan(
        (LayerPlan(key, value),),
        "pre",
        "",
        torch.zeros(1, 1),
        AttentionShape(QUERY_HEADS, HEAD_DIM),
        Provenance("one layer", "none", 0, 0, tokens, recipe, 0, 1 / 8, versions(), 1),
        SINKS,
    )


def random_plan(model: PreTrainedModel, tokens: int) -> CompressionPlan:
    """Return a random plan of a random model, 8 times smaller after some tokens."""
    plan = layer_plan(*PLANS[PLAN], tokens)
    return replace(
        plan,
        layers=tuple(deepcopy(plan.layers[0]) for _ in range(model.config.num_hidden_layers)),
        config_hash=config_hash(model.config),
        fingerprint=fingerprint(model),
    )
