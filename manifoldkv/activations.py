"""Activations of a model, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manifoldkv.attention import Attend, AttentionSettings, attend, intercepted
from manifoldkv.errors import UnsupportedModelError
from manifoldkv.models import attention_of, check_supported, decoder_layers, modeling_module

Rotary = Literal["pre", "post"]
Site = Literal["key", "value"]

SEQUENCES_PER_FORWARD = 8
OUTPUT_TOLERANCE = 0.02
"""Relative error of a replayed layer that rounding can explain, bfloat16 included."""


@dataclass(frozen=True)
class Batch:
    """Part of the calibration set: some sequences and, in each of them, some query rows.

    Parameters
    ----------
    sequences : Tensor
        Indices, (b,), int64.
    rows : Tensor or None
        Positions whose outputs are looked at, (m,), int64; None for all of them. Keys and values
        of every position take part regardless.
    """

    sequences: Tensor
    rows: Tensor | None = None


@dataclass(frozen=True)
class LayerActivations:
    """What passes through one decoder layer for S sequences of n tokens.

    Parameters
    ----------
    layer : int
        Index of the layer.
    inputs : Tensor
        Layer inputs, (S, n, hidden).
    queries : Tensor
        (S, H_q, n, d), before rotation and after query norms.
    keys : Tensor
        (S, H_kv, n, d), before rotation and after key norms.
    values : Tensor
        (S, H_kv, n, d)
    cos, sin : Tensor
        Angles of the rotary embedding, (1, n, rotary dimension).
    mask : Tensor
        Boolean, True where a query (row) sees a key (column), (1, 1, n, n); causal, with the
        layer's sliding window if it has one.
    outputs : Tensor
        Layer outputs of the uncompressed layer, (S, n, hidden).
    settings : AttentionSettings
        Scaling, soft cap and sinks of the layer's attention.
    module : nn.Module
        The decoder layer itself.
    keywords : dict
        What else the model passes to the layer.

    Tensors of numbers are float32, or float64 for a float64 model, on the model's device.
    """

    layer: int
    inputs: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor
    mask: Tensor
    outputs: Tensor
    settings: AttentionSettings
    module: nn.Module
    keywords: dict[str, Any]

    @property
    def sequences(self) -> int:
        return self.keys.shape[0]

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def query_heads(self) -> int:
        return self.queries.shape[1]

    def rotate(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Rotate (B, H, tokens, d) as the model does; `rows` are positions, None for all n."""
        cos, sin = (self.cos, self.sin) if rows is None else (self.cos[:, rows], self.sin[:, rows])
        rotated, _ = modeling_module(self.module).apply_rotary_pos_emb(x, x[:, :0], cos, sin)
        return rotated

    def keys_in(self, rotary: Rotary, sequences: Tensor | None = None) -> Tensor:
        """Keys before or after rotation, of some sequences or all: (s, H_kv, n, d)."""
        keys = self.keys if sequences is None else self.keys[sequences]
        return keys if rotary == "pre" else self.rotate(keys)

    def queries_in(self, rotary: Rotary, sequences: Tensor | None = None) -> Tensor:
        """Queries before or after rotation, of some sequences or all: (s, H_q, n, d)."""
        queries = self.queries if sequences is None else self.queries[sequences]
        return queries if rotary == "pre" else self.rotate(queries)

    def output_weight(self) -> Tensor:
        """Output projection W_O by query head, (H_q, d, hidden)."""
        weight = attention_of(self.module).o_proj.weight.to(self.keys.dtype)  # (hidden, H_q·d)
        return weight.mT.reshape(self.query_heads, self.head_dim, -1)


def capture(
    model: PreTrainedModel,
    tokens: Tensor,
    layers: list[int] | None = None,
    *,
    propagate: Callable[[LayerActivations], Tensor] | None = None,
) -> Iterator[LayerActivations]:
    """Yield the activations of one layer after the other; only one is held at a time.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model with rotary embeddings. It is left as it was.
    tokens : Tensor
        Token ids, (S, n), int64, no padding.
    layers : list of int, optional
        Layers to yield, ascending; all if omitted. The layers below the last of them still run.
    propagate : callable, optional
        What the next layer receives, (S, n, hidden), asked for after a layer was yielded: the
        output of a compressed layer, say. The layer's own output if omitted.

    Raises
    ------
    UnsupportedModelError
        Before any forward pass, if the model's attention cannot be handled.
    ValueError
        If a layer index is out of range.
    """
    check_supported(model)
    modules = decoder_layers(model)
    wanted = list(range(len(modules))) if layers is None else layers
    outside = [i for i in wanted if not 0 <= i < len(modules)]
    if outside:
        raise ValueError(f"layer {outside[0]} is not between 0 and {len(modules) - 1}")
    return _capture(model, tokens.to(model.device), modules, wanted, propagate)


@torch.no_grad()
def _capture(
    model: PreTrainedModel,
    tokens: Tensor,
    modules: nn.ModuleList,
    wanted: list[int],
    propagate: Callable[[LayerActivations], Tensor] | None,
) -> Iterator[LayerActivations]:
    calls, stock_outputs = _record_calls(model, tokens[:1], modules)
    inputs = _embeddings(model, tokens, modules[0])
    for index, module in enumerate(modules[: max(wanted) + 1]):
        activations = _run_layer(index, module, inputs, calls[index])
        if propagate is None or index == 0:  # later inputs are not the model's own
            _check_output(activations, stock_outputs[index])
        if index in wanted:
            yield activations
        outputs = activations.outputs if propagate is None else propagate(activations)
        inputs = outputs.to(inputs.dtype)


def _record_calls(
    model: PreTrainedModel, tokens: Tensor, modules: nn.ModuleList
) -> tuple[list[dict[str, Any]], list[Any]]:
    """The keywords with which the model calls each layer, and each layer's output.

    Keywords are equal for all unpadded sequences of a length.
    """
    calls: list[dict[str, Any]] = []
    outputs: list[Any] = []

    def record(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        calls.append(dict(kwargs))
        outputs.append(output)

    hooks = [m.register_forward_hook(record, with_kwargs=True) for m in modules]
    try:
        with intercepted(model.config.get_text_config()):
            model(input_ids=tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for module, call in zip(modules, calls, strict=True):
        if "position_embeddings" not in call or call.get("attention_mask") is None:
            raise UnsupportedModelError(
                f"{type(module).__name__} is not supported: it is called without rotary angles "
                "or without an attention mask"
            )
    return calls, outputs


def _check_output(activations: LayerActivations, stock: Any) -> None:
    """Compare with the layer as the model calls it.

    A family that does something between rotation and attention (HunYuan's norms, say) would
    otherwise be captured wrongly without a word.
    """
    found = activations.outputs[:1]
    if isinstance(stock, Tensor):
        difference = torch.linalg.vector_norm(found - stock) / torch.linalg.vector_norm(found)
        if difference < OUTPUT_TOLERANCE:
            return
    raise UnsupportedModelError(
        f"{type(activations.module).__name__} is not supported: layer {activations.layer} computes "
        "something else when its keys and queries are rotated outside of it"
    )


class _Embedded(Exception):  # noqa: N818 (not an error)
    """Ends a forward pass once the input of the first layer is known."""


def _embeddings(model: PreTrainedModel, tokens: Tensor, first: nn.Module) -> Tensor:
    inputs: list[Tensor] = []

    def stop(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])
        raise _Embedded

    hook = first.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        for chunk in tokens.split(SEQUENCES_PER_FORWARD):
            try:
                model(input_ids=chunk, use_cache=False)
            except _Embedded:
                continue
    finally:
        hook.remove()
    return torch.cat(inputs)


def _run_layer(
    index: int, module: nn.Module, inputs: Tensor, call: dict[str, Any]
) -> LayerActivations:
    cos, sin = call["position_embeddings"]
    mask = call["attention_mask"]
    rotate = modeling_module(module).apply_rotary_pos_emb
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    settings: list[AttentionSettings] = []

    def record(
        attention: nn.Module,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attention_mask: Tensor,
        arguments: dict[str, Any],
    ) -> Tensor:
        seen.append((queries, keys, values))
        settings.append(AttentionSettings.from_arguments(attention, arguments))
        queries, keys = rotate(queries, keys, cos, sin)
        return attend(queries, keys, values, mask, settings[-1]).transpose(1, 2)

    keywords = {
        k: v
        for k, v in call.items()
        if k not in ("hidden_states", "position_embeddings", "attention_mask", "position_ids")
    }
    outputs = [
        call_layer(module, chunk, record, cos.shape[-1], keywords)
        for chunk in inputs.split(SEQUENCES_PER_FORWARD)
    ]
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    queries, keys, values = (torch.cat(x).to(dtype) for x in zip(*seen, strict=True))
    return LayerActivations(
        layer=index,
        inputs=inputs.to(dtype),
        queries=queries,
        keys=keys,
        values=values,
        cos=cos.to(dtype),
        sin=sin.to(dtype),
        mask=mask,
        outputs=torch.cat(outputs).to(dtype),
        settings=settings[0],
        module=module,
        keywords=keywords,
    )


def call_layer(
    module: nn.Module,
    inputs: Tensor,
    attend_instead: Attend,
    rotary_dim: int,
    keywords: dict[str, Any],
) -> Tensor:
    """Run a decoder layer on inputs (B, m, hidden) with its attention replaced.

    The layer's own rotation is made the identity, so that `attend_instead` receives queries and
    keys as they leave their projections and norms, whatever the family.
    """
    ones = inputs.new_ones(1, inputs.shape[1], rotary_dim)
    with intercepted(attention_of(module).config):
        output = module(
            inputs,
            attention_mask=None,
            position_ids=torch.arange(inputs.shape[1], device=inputs.device).unsqueeze(0),
            position_embeddings=(ones, torch.zeros_like(ones)),
            manifoldkv_attend=attend_instead,
            **keywords,
        )
    if not isinstance(output, Tensor):
        raise UnsupportedModelError(
            f"{type(module).__name__} is not supported: it returns {type(output).__name__}"
        )
    return output
