"""Random plans, and the same compression done without a cache and without our code."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from manifoldkv import BitRecipe, CompressionPlan, Quantization, compress
from manifoldkv.coding.candidates import blocks_of
from manifoldkv.coding.fitting import Selected
from manifoldkv.coding.transform import TransformConfig
from manifoldkv.core.basis import Basis, HeadGrouping
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.fingerprint import config_hash, fingerprint
from manifoldkv.models.support import attention_of, decoder_layers, modeling_module, sliding_windows
from manifoldkv.plan.compute import AttentionShape
from manifoldkv.plan.formats.quantizer import Quantizer
from manifoldkv.plan.formats.quantizers import Unquantized
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.predictor import Input, all_inputs, layers_below
from manifoldkv.plan.provenance import Provenance
from manifoldkv.plan.site import SitePlan
from manifoldkv.recipes.coded import coded_plan
from manifoldkv.recipes.config import CompressionConfig
from manifoldkv.statistics.statistics import Statistics
from tests.families import tiny_tokens

RECIPE = {part: {"name": "random"} for part in ("objective", "solver", "ranks")}
PROVENANCE = Provenance("tiny", "tokens", 4, 12, 12, RECIPE, 0, 1.0, {"manifoldkv": "0"}, 1)


def any_basis(
    head_dim: int, rank: int, grouping: HeadGrouping, *, oblique: bool, seed: int
) -> Basis:
    """A random basis; an oblique one is far from orthonormal."""
    generator = torch.Generator().manual_seed(seed)
    shape = (grouping.groups, head_dim * grouping.width, rank * grouping.width)
    columns = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64)).Q
    if not oblique:
        return Basis(columns, columns, grouping)
    skewed = columns + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return Basis(skewed, columns @ torch.linalg.inv(skewed.mT @ columns), grouping)


def random_plan(
    model: PreTrainedModel,
    *,
    key_rank: int = 5,
    value_rank: int = 4,
    key_grouping: str | int = "shared",
    value_grouping: str | int = 1,
    rotary: str = "pre",
    oblique: bool = False,
    quantization: Quantization | None = None,
    sinks: int = 0,
) -> CompressionPlan:
    config = model.config.get_text_config()
    heads, head_dim = config.num_key_value_heads, attention_of(decoder_layers(model)[0]).head_dim
    key, value = HeadGrouping(key_grouping, heads), HeadGrouping(value_grouping, heads)
    layers = []
    for index, window in enumerate(sliding_windows(config)):
        keys = any_basis(head_dim, key_rank, key, oblique=oblique, seed=2 * index)
        values = any_basis(head_dim, value_rank, value, oblique=oblique, seed=2 * index + 1)
        layers.append(
            LayerPlan(
                SitePlan(keys, keys_in(quantization, keys)),
                SitePlan(values, quantization.values() if quantization else Unquantized()),
                window,
            )
        )
    return CompressionPlan(
        tuple(layers),
        rotary,
        config_hash(model.config),
        fingerprint(model),
        shape_of(model),
        PROVENANCE,
        sinks,
    )


def shape_of(model: PreTrainedModel) -> AttentionShape:
    decoder = Decoder.of(model)
    return AttentionShape(decoder.query_heads, decoder.rotary_dim)


def keys_in(quantization: Quantization | None, basis: Basis) -> Quantizer:
    """The quantizer of keys, static ranges from -8 to 8."""
    if quantization is None:
        return Unquantized()
    groups = -(-basis.down.shape[2] // quantization.group_size)
    ends = torch.tensor([-8.0, 8.0], dtype=torch.float64)
    ranges = ends.expand(basis.grouping.heads // basis.grouping.width, groups, 2)
    return quantization.keys(ranges if quantization.layout == "static" else None)


def bits_plan(
    model: PreTrainedModel,
    tokens: Tensor,
    *,
    sinks: int = 4,
    **settings: Any,
) -> CompressionPlan:
    """Rank and bits from one budget, nothing predicted and keys in one block."""
    recipe = BitRecipe(sinks, inf, bands=(None,), depth=None)
    return compress(model, tokens, recipe=recipe, **settings)


INPUTS_BELOW = 2
"""Largest number of layers below that the predictors of `DESIGNS` have as inputs; 1 in a relay
chain, whose reconstructions depend on the layers below that one too."""
DESIGNS: dict[str, int | None] = {
    "dense": None,
    "own keys": 1,
    "keys below": 2,
    "chain": None,
    "low-rank chain": 1,
    "trellis chain": 2,
    "relay chain": None,
}
"""Frequencies per block of keys, by kind of design: of values predicted from the keys of their
layer; from those of the layers below too; of keys and values predicted from all sites below; the
same in a trellis code; the same from the layer below alone."""


def designs_of(kind: str, below: int) -> tuple[TransformConfig, TransformConfig]:
    """Inputs and ranks of keys and values with `below` layers below."""
    if "chain" in kind:
        rank = 4 if kind == "low-rank chain" else None
        keys, values = all_inputs("key", below), all_inputs("value", below)
        return TransformConfig(keys, rank=rank if keys else None), TransformConfig(
            values, rank=rank
        )
    layers = {"dense": 0, "own keys": 1, "keys below": below + 1}[kind]
    inputs: tuple[Input, ...] = tuple((one, "key") for one in range(layers))
    return TransformConfig(), TransformConfig(inputs)


@dataclass(frozen=True)
class DesignedRecipe(BitRecipe):
    """Bits of transforms of one of the `DESIGNS`, whatever another one would save."""

    kind: str = "dense"

    def fit(self, statistics: Statistics, config: CompressionConfig) -> CompressionPlan:
        """Fit predictors to samples, then to reconstructions of the bits that follow."""
        model, task = statistics.model, self._fit(statistics, config)
        blocks = blocks_of(model.frequencies, model.kv_heads, DESIGNS[self.kind])
        configs: list[TransformConfig] = []
        most = 1 if self.kind == "relay chain" else INPUTS_BELOW
        for index in range(model.layers):
            keys, values = designs_of(self.kind, min(most, layers_below(model.windows, index)))
            configs += [replace(keys, blocks=blocks), values]
        selected = Selected(configs, [], None)
        bits = task.allocated(task.transforms(selected, None), None)
        planned = [
            task.planned(tensor, transform, bits, configs[tensor])
            for tensor, transform in enumerate(task.transforms(selected, bits))
        ]
        return coded_plan(self, statistics, config, planned)


def designed_plan(
    model: PreTrainedModel,
    kind: str,
    tokens: Tensor | None = None,
    *,
    sinks: int = 4,
    ratio: float = 0.4,
    context: int = 256,
) -> CompressionPlan:
    """The plan of one of the `DESIGNS`, made on a few hundred random tokens if none are given."""
    tokens = tiny_tokens(12, 32) if tokens is None else tokens
    recipe = DesignedRecipe(sinks, inf, kind=kind, trellis="trellis" in kind)
    return compress(model, tokens, recipe=recipe, ratio=ratio, context=context)


def projected_by_loops(x: Tensor, basis: Basis) -> Tensor:
    """(B, H, n, d) down and up again, a head or group of heads after the other."""
    width = basis.grouping.width
    out = torch.empty_like(x)
    for run in range(x.shape[1] // width):
        matrix = min(run, basis.down.shape[0] - 1)
        heads = range(run * width, (run + 1) * width)
        wide = torch.cat([x[:, head] for head in heads], dim=-1)
        wide = wide @ basis.down[matrix] @ basis.up[matrix].T
        for place, head in enumerate(heads):
            out[:, head] = wide[..., place * x.shape[-1] : (place + 1) * x.shape[-1]]
    return out


@contextmanager
def projected_by_hooks(model: PreTrainedModel, plan: CompressionPlan) -> Iterator[None]:
    """The model with projected keys and values, its stock eager attention, and no cache.

    Keys before rotation and values are projected where their linear layer (or norm) puts them out,
    keys after rotation in an attention function that calls the stock one. The first tokens of a
    plan with sinks are never projected in layers without a window.
    """
    hooks = []
    for layer, planned in zip(decoder_layers(model), plan.layers, strict=True):
        hooks += _hooks(attention_of(layer), planned, plan)

    def projecting(
        module: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, **more: Any
    ) -> Any:
        eager = modeling_module(decoder_layers(model)[0]).eager_attention_forward
        if plan.rotary == "post":
            planned = plan.layers[module.layer_idx]
            keys = _behind_sinks(keys, planned.key.basis, planned, plan)
        return eager(module, queries, keys, values, mask, **more)

    AttentionInterface.register("projecting-reference", projecting)
    AttentionMaskInterface.register("projecting-reference", eager_mask)
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = "projecting-reference"
    try:
        yield
    finally:
        config._attn_implementation = before
        for hook in hooks:
            hook.remove()


def _behind_sinks(x: Tensor, basis: Basis, layer: LayerPlan, plan: CompressionPlan) -> Tensor:
    """(B, H, n, d) projected, but for the first tokens of a layer without a window."""
    sinks = 0 if layer.window is not None else plan.sinks
    return torch.cat([x[:, :, :sinks], projected_by_loops(x[:, :, sinks:], basis)], dim=2)


def _hooks(attention: nn.Module, layer: LayerPlan, plan: CompressionPlan) -> list[Any]:
    heads, head_dim, rotary = layer.key.grouping.heads, layer.key.head_dim, plan.rotary

    def project(x: Tensor, basis: Basis) -> Tensor:
        return _behind_sinks(x, basis, layer, plan)

    def by_head(x: Tensor, basis: Basis) -> Tensor:
        split = x.reshape(*x.shape[:2], heads, head_dim).transpose(1, 2)
        return project(split, basis).transpose(1, 2).reshape(x.shape)

    def on_keys(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return by_head(output, layer.key.basis)

    def on_values(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return by_head(output, layer.value.basis)

    def on_fused(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        size = heads * head_dim
        queries, keys, values = output.split([output.shape[-1] - 2 * size, size, size], dim=-1)
        keys = by_head(keys, layer.key.basis) if rotary == "pre" else keys
        return torch.cat([queries, keys, by_head(values, layer.value.basis)], dim=-1)

    if hasattr(attention, "qkv_proj"):
        return [attention.qkv_proj.register_forward_hook(on_fused)]
    hooks = [attention.v_proj.register_forward_hook(on_values)]
    if rotary == "pre":
        keys = getattr(attention, "k_norm", attention.k_proj)
        if _heads_first(attention):
            # Gemma 3 norms keys that already lie as (B, H, n, d).
            hooks.append(
                keys.register_forward_hook(lambda m, a, out: project(out, layer.key.basis))
            )
        else:
            hooks.append(keys.register_forward_hook(on_keys))
    return hooks


def _heads_first(attention: nn.Module) -> bool:
    return type(attention).__name__ == "Gemma3Attention"
