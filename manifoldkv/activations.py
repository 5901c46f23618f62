"""Activations of a model, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manifoldkv.attention import Attend, AttentionSettings, attend, intercepted
from manifoldkv.errors import UnsupportedModelError
from manifoldkv.models import attention_of, check_supported, decoder_layers, modeling_module
from manifoldkv.offloading import resident
from manifoldkv.placement import Placement

Rotary = Literal["pre", "post"]
Site = Literal["key", "value"]

SEQUENCES_PER_FORWARD = 8
CHECKED_ROWS = 64
"""Last rows of a replayed layer's output that are compared with the model's own."""
OUTPUT_TOLERANCE = 0.02
"""Relative error of a replayed layer that rounding can explain, bfloat16 included."""


@dataclass(frozen=True)
class Batch:
    """Part of the calibration set: some sequences and, in each of them, some query rows.

    Parameters
    ----------
    sequences : Tensor
        Indices, (b,), int64, on the CPU.
    rows : Tensor or None
        Positions whose outputs are looked at, likewise (m,); None for all of them. Keys and values
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
    folder : Path or None
        Where tensors go that do not fit into memory, as in `capture`.

    Tensors of numbers are float32, or float64 for a float64 model. `cos`, `sin` and `mask` are on
    the device where the layer runs; the large ones too if they fit there, else in memory, else in
    files mapped into it. What the methods return is on the device.
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
    folder: Path | None = None

    @property
    def device(self) -> torch.device:
        """Where the layer runs."""
        return self.cos.device

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
        keys = self._selected(self.keys, sequences)
        return keys if rotary == "pre" else self.rotate(keys)

    def values_of(self, sequences: Tensor | None = None) -> Tensor:
        """Values of some sequences or all: (s, H_kv, n, d)."""
        return self._selected(self.values, sequences)

    def queries_in(self, rotary: Rotary, sequences: Tensor | None = None) -> Tensor:
        """Queries before or after rotation, of some sequences or all: (s, H_q, n, d)."""
        queries = self._selected(self.queries, sequences)
        return queries if rotary == "pre" else self.rotate(queries)

    def _selected(self, x: Tensor, sequences: Tensor | None) -> Tensor:
        return (x if sequences is None else x[sequences]).to(self.device)

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
    folder: Path | None = None,
) -> Iterator[LayerActivations]:
    """Yield the activations of one layer after the other; only one is held at a time.

    Let go of a layer (``del``) before the next is asked for if memory is short.

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
    folder : Path, optional
        Where activations go that do not fit into memory; the system's temporary folder if omitted.

    Raises
    ------
    UnsupportedModelError
        Before any forward pass, if the model's attention cannot be handled.
    ValueError
        If a layer index is out of range.
    OutputError
        If the activations of a layer fit nowhere.
    """
    check_supported(model)
    modules = decoder_layers(model)
    wanted = list(range(len(modules))) if layers is None else layers
    outside = [i for i in wanted if not 0 <= i < len(modules)]
    if outside:
        raise ValueError(f"layer {outside[0]} is not between 0 and {len(modules) - 1}")
    return _capture(model, tokens.to(model.device), modules, wanted, propagate, folder)


@torch.no_grad()
def _capture(
    model: PreTrainedModel,
    tokens: Tensor,
    modules: nn.ModuleList,
    wanted: list[int],
    propagate: Callable[[LayerActivations], Tensor] | None,
    folder: Path | None,
) -> Iterator[LayerActivations]:
    calls, stock_outputs = _record_calls(model, tokens[:1], modules)
    placement = _placement(model, tokens, folder)
    inputs = _embeddings(model, tokens, modules[0], placement)
    for index, module in enumerate(modules[: max(wanted) + 1]):
        with resident(module):
            activations = _run_layer(index, module, inputs, calls[index], placement)
            if propagate is None or index == 0:  # later inputs are not the model's own
                _check_output(activations, stock_outputs[index])
            if index in wanted:
                yield activations
            inputs = activations.outputs if propagate is None else propagate(activations)
        del activations


def _placement(model: PreTrainedModel, tokens: Tensor, folder: Path | None) -> Placement:
    config = model.config.get_text_config()
    attention = attention_of(decoder_layers(model)[0])
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    numbers = 2 * config.hidden_size + heads * int(attention.head_dim)
    dtype = _wide(model.dtype)
    return Placement(tokens.numel() * numbers * dtype.itemsize, model.device, folder)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Of activations, for a model in `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def _record_calls(
    model: PreTrainedModel, tokens: Tensor, modules: nn.ModuleList
) -> tuple[list[dict[str, Any]], list[Tensor | None]]:
    """The keywords with which the model calls each layer, and the end of each layer's output.

    Keywords are equal for all unpadded sequences of a length.
    """
    calls: list[dict[str, Any]] = []
    outputs: list[Tensor | None] = []

    def record(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        calls.append({k: v for k, v in kwargs.items() if k != "hidden_states"})
        # A copy: a view would keep the whole output of every layer.
        outputs.append(output[:, -CHECKED_ROWS:].clone() if isinstance(output, Tensor) else None)

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


def _check_output(activations: LayerActivations, stock: Tensor | None) -> None:
    """Compare with the layer as the model calls it.

    A family that does something between rotation and attention (HunYuan's norms, say) would
    otherwise be captured wrongly without a word.
    """
    found = activations.outputs[:1, -CHECKED_ROWS:]
    if stock is not None:
        lost = found - stock.to(found)
        difference = torch.linalg.vector_norm(lost) / torch.linalg.vector_norm(found)
        if difference < OUTPUT_TOLERANCE:
            return
    raise UnsupportedModelError(
        f"{type(activations.module).__name__} is not supported: layer {activations.layer} computes "
        "something else when its keys and queries are rotated outside of it"
    )


class _Embedded(Exception):  # noqa: N818 (not an error)
    """Ends a forward pass once the input of the first layer is known."""


def _embeddings(
    model: PreTrainedModel, tokens: Tensor, first: nn.Module, placement: Placement
) -> Tensor:
    """Inputs of the first layer, (S, n, hidden), in the dtype of activations."""
    shape = (*tokens.shape, model.config.get_text_config().hidden_size)
    inputs = placement.empty(shape, _wide(model.dtype))
    done = 0

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal done
        chunk = args[0] if args else kwargs["hidden_states"]
        inputs[done : done + len(chunk)] = chunk
        done += len(chunk)
        raise _Embedded

    hook = first.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        for chunk in tokens.split(SEQUENCES_PER_FORWARD):
            try:
                model(input_ids=chunk, use_cache=False)
            except _Embedded:
                continue
    finally:
        hook.remove()
    return inputs


def _run_layer(
    index: int, module: nn.Module, inputs: Tensor, call: dict[str, Any], placement: Placement
) -> LayerActivations:
    cos, sin = call["position_embeddings"]
    mask = call["attention_mask"]
    rotate = modeling_module(module).apply_rotary_pos_emb
    weight = attention_of(module).o_proj.weight
    settings: list[AttentionSettings] = []
    kept: list[Tensor] = []  # queries, keys and values, made when their shapes are known
    outputs = placement.empty(inputs.shape, inputs.dtype)
    chunks = torch.arange(len(inputs)).split(SEQUENCES_PER_FORWARD)

    def record(
        attention: nn.Module,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attention_mask: Tensor,
        arguments: dict[str, Any],
    ) -> Tensor:
        found = (queries, keys, values)
        if not kept:
            kept.extend(placement.empty((len(inputs), *x.shape[1:]), inputs.dtype) for x in found)
        for whole, part in zip(kept, found, strict=True):
            whole[chunk] = part.to(whole)
        settings.append(AttentionSettings.from_arguments(attention, arguments))
        queries, keys = rotate(queries, keys, cos, sin)
        return attend(queries, keys, values, mask, settings[-1]).transpose(1, 2)

    keywords = {
        k: v
        for k, v in call.items()
        if k not in ("position_embeddings", "attention_mask", "position_ids")
    }
    for chunk in chunks:
        x = inputs[chunk].to(weight)
        outputs[chunk] = call_layer(module, x, record, cos.shape[-1], keywords).to(outputs)
    queries, keys, values = kept
    return LayerActivations(
        layer=index,
        inputs=inputs,
        queries=queries,
        keys=keys,
        values=values,
        cos=cos.to(inputs.dtype),
        sin=sin.to(inputs.dtype),
        mask=mask,
        outputs=outputs,
        settings=settings[0],
        module=module,
        keywords=keywords,
        folder=placement.folder,
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
