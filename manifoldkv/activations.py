"""Activations of a model, one layer at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manifoldkv.attention import Attend, AttentionSettings, attend, intercepted
from manifoldkv.calibration import checked_tokens
from manifoldkv.errors import UnsupportedModelError
from manifoldkv.models import (
    attention_of,
    check_supported,
    check_without_dropout,
    decoder_layers,
    linear_weight,
    modeling_module,
    uncompiled,
    unwrapped,
)
from manifoldkv.offloading import resident
from manifoldkv.placement import Placement

Rotary = Literal["pre", "post"]
Site = Literal["key", "value"]

SEQUENCES_PER_FORWARD = 8
CHECKED_ROWS = 64
"""Last rows of a replayed layer's output that are compared with the model's own."""
OUTPUT_TOLERANCE = 0.02
"""Relative error of a replayed layer that rounding can explain, bfloat16 included."""


@dataclass(frozen=True, eq=False)
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


class Projections(NamedTuple):
    """What a layer makes of its inputs for attention.

    Parameters
    ----------
    queries : Tensor
        (b, H_q, m, d), after query norms.
    keys : Tensor
        (b, H_kv, m, d), after key norms.
    values : Tensor
        (b, H_kv, m, d)
    """

    queries: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class LayerActivations:
    """What passes through one decoder layer for S sequences of n tokens.

    Parameters
    ----------
    layer : int
        Index of the layer.
    inputs : Tensor
        Layer inputs, (S, n, hidden).
    query_heads, kv_heads : int
        H_q and H_kv.
    head_dim : int
        d, of every head.
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

    Inputs and outputs are all that is stored: the layer makes queries, keys and values of its
    inputs whenever `projections` asks. Only what wants them again and again has `keys` and
    `values` kept.

    `inputs` and `outputs` are in the dtype of the model, which holds them without a loss; all else
    is float32, or float64 for a float64 model. `cos`, `sin` and `mask` are on the device where the
    layer runs; the large ones too if they fit there, else in memory, else in files mapped into it.
    What the methods return is on the device.
    """

    layer: int
    inputs: Tensor
    query_heads: int
    kv_heads: int
    head_dim: int
    cos: Tensor
    sin: Tensor
    mask: Tensor
    outputs: Tensor
    settings: AttentionSettings
    module: nn.Module
    keywords: dict[str, Any]
    folder: Path | None = None

    def __repr__(self) -> str:
        return (
            f"LayerActivations(layer {self.layer}, {self.sequences} sequences of {self.length} "
            f"tokens, {self.query_heads} query heads and {self.kv_heads} KV heads of "
            f"{self.head_dim})"
        )

    @property
    def device(self) -> torch.device:
        """Where the layer runs."""
        return self.cos.device

    @property
    def sequences(self) -> int:
        return self.inputs.shape[0]

    @property
    def length(self) -> int:
        return self.inputs.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of all numbers but inputs and outputs."""
        return self.cos.dtype

    @property
    def keys(self) -> Tensor:
        """Before rotation, (S, H_kv, n, d), kept from now on."""
        return self._kept[0]

    @property
    def values(self) -> Tensor:
        """(S, H_kv, n, d), kept from now on."""
        return self._kept[1]

    @cached_property
    def _kept(self) -> tuple[Tensor, Tensor]:
        shape = (self.sequences, self.kv_heads, self.length, self.head_dim)
        nbytes = 2 * math.prod(shape) * self.dtype.itemsize
        placement = Placement(nbytes, self.device, self.folder)
        keys, values = (placement.empty(shape, self.dtype) for _ in range(2))
        for chunk in torch.arange(self.sequences).split(SEQUENCES_PER_FORWARD):
            made = self.projections("pre", Batch(chunk))
            keys[chunk] = made.keys.to(keys.device)
            values[chunk] = made.values.to(values.device)
        return keys, values

    @torch.no_grad()
    def projections(self, rotary: Rotary, batch: Batch | None = None) -> Projections:
        """Queries, keys and values of some sequences and rows or all, made of the layer's inputs.

        Parameters
        ----------
        rotary : {"pre", "post"}
            Before or after the rotation of queries and keys.
        batch : Batch, optional
            Sequences and rows, here of keys and values too; all if omitted.
        """
        batch = batch or Batch(torch.arange(self.sequences))
        inputs = select_rows(self.inputs, batch).to(self.device)
        made = project(self.module, inputs, self.cos.shape[-1], self.keywords)
        queries, keys, values = (x.to(self.dtype) for x in made)
        if rotary == "pre":
            return Projections(queries, keys, values)
        return Projections(self.rotate(queries, batch.rows), self.rotate(keys, batch.rows), values)

    def rotate(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Rotate (B, H, tokens, d) as the model does; `rows` are positions, None for all n."""
        cos, sin = (self.cos, self.sin) if rows is None else (self.cos[:, rows], self.sin[:, rows])
        rotated, _ = modeling_module(self.module).apply_rotary_pos_emb(x, x[:, :0], cos, sin)
        return rotated

    def keys_in(self, rotary: Rotary, sequences: Tensor | None = None) -> Tensor:
        """Kept keys before or after rotation, of some sequences or all: (s, H_kv, n, d)."""
        keys = self._selected(self.keys, sequences)
        return keys if rotary == "pre" else self.rotate(keys)

    def values_of(self, sequences: Tensor | None = None) -> Tensor:
        """Kept values of some sequences or all: (s, H_kv, n, d)."""
        return self._selected(self.values, sequences)

    def _selected(self, x: Tensor, sequences: Tensor | None) -> Tensor:
        return (x if sequences is None else x[sequences]).to(self.device)

    def outputs_of(self, batch: Batch) -> Tensor:
        """Outputs of some sequences and rows, (b, m, hidden)."""
        return select_rows(self.outputs, batch).to(self.device, self.dtype)

    def output_weight(self) -> Tensor:
        """Output projection W_O by query head, (H_q, d, hidden)."""
        weight = linear_weight(attention_of(self.module).o_proj).to(self.dtype)  # (hidden, H_q·d)
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
        Before any forward pass, if the model's attention cannot be handled, or dropout is on.
    TextError
        If the tokens are not ids and lengths that the model takes.
    ValueError
        If a layer index is out of range.
    OutputError
        If the activations of a layer fit nowhere.
    """
    model = unwrapped(model)
    check_supported(model)
    check_without_dropout(model)
    modules = decoder_layers(model)
    wanted = list(range(len(modules))) if layers is None else layers
    outside = [i for i in wanted if not 0 <= i < len(modules)]
    if outside:
        raise ValueError(f"layer {outside[0]} is not between 0 and {len(modules) - 1}")
    tokens = checked_tokens(model, tokens).to(model.device)
    return _capture(model, tokens, modules, wanted, propagate, folder)


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
            inputs = inputs.to(model.dtype)
        del activations


def _placement(model: PreTrainedModel, tokens: Tensor, folder: Path | None) -> Placement:
    """For the inputs and outputs of a layer."""
    numbers = 2 * tokens.numel() * model.config.get_text_config().hidden_size
    return Placement(numbers * model.dtype.itemsize, model.device, folder)


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
        with intercepted(model.config.get_text_config()), uncompiled(model):
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
    found = activations.outputs[:1, -CHECKED_ROWS:].to(activations.dtype)
    if stock is not None:
        lost = found - stock.to(found)
        difference = torch.linalg.vector_norm(lost) / torch.linalg.vector_norm(found)
        if difference < OUTPUT_TOLERANCE:
            return
    raise UnsupportedModelError(
        f"{type(activations.module).__name__} is not supported: layer {activations.layer} computes "
        "something else when its keys and queries are rotated outside of it"
    )


class _Enough(Exception):  # noqa: N818 (not an error)
    """Ends a forward pass once what it is made for is known."""


def _embeddings(
    model: PreTrainedModel, tokens: Tensor, first: nn.Module, placement: Placement
) -> Tensor:
    """Inputs of the first layer, (S, n, hidden)."""
    shape = (*tokens.shape, model.config.get_text_config().hidden_size)
    inputs = placement.empty(shape, model.dtype)
    done = 0

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal done
        chunk = args[0] if args else kwargs["hidden_states"]
        inputs[done : done + len(chunk)] = chunk
        done += len(chunk)
        raise _Enough

    hook = first.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        for chunk in tokens.split(SEQUENCES_PER_FORWARD):
            with suppress(_Enough), uncompiled(model):
                model(input_ids=chunk, use_cache=False)
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
    shapes: list[tuple[int, int, int]] = []
    outputs = placement.empty(inputs.shape, inputs.dtype)

    def record(
        attention: nn.Module,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attention_mask: Tensor,
        arguments: dict[str, Any],
    ) -> Tensor:
        if values.shape != keys.shape:
            raise UnsupportedModelError(
                f"{type(attention).__name__} is not supported: its keys have {keys.shape[3]} "
                f"features in {keys.shape[1]} heads, its values {values.shape[3]} in "
                f"{values.shape[1]}"
            )
        shapes.append((queries.shape[1], keys.shape[1], keys.shape[3]))
        settings.append(AttentionSettings.from_arguments(attention, arguments))
        queries, keys = rotate(queries, keys, cos, sin)
        return attend(queries, keys, values, mask, settings[-1]).transpose(1, 2)

    keywords = {
        k: v
        for k, v in call.items()
        if k not in ("position_embeddings", "attention_mask", "position_ids")
    }
    for calls, chunk in enumerate(torch.arange(len(inputs)).split(SEQUENCES_PER_FORWARD), 1):
        x = inputs[chunk].to(weight)
        outputs[chunk] = call_layer(module, x, record, cos.shape[-1], keywords).to(outputs)
        if len(shapes) != calls:
            raise UnsupportedModelError(
                f"{type(attention_of(module)).__name__} is not supported: it calls its attention "
                f"function {len(shapes)} times at once"
            )
    query_heads, kv_heads, head_dim = shapes[0]
    wide = torch.promote_types(inputs.dtype, torch.float32)
    return LayerActivations(
        layer=index,
        inputs=inputs,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        cos=cos.to(wide),
        sin=sin.to(wide),
        mask=mask,
        outputs=outputs,
        settings=settings[0],
        module=module,
        keywords=keywords,
        folder=placement.folder,
    )


def select_rows(x: Tensor, batch: Batch) -> Tensor:
    """Sequences and rows of (S, n, features): (b, m, features)."""
    if batch.rows is None:
        return x[batch.sequences]
    return x[batch.sequences.unsqueeze(1), batch.rows]


def project(
    module: nn.Module, inputs: Tensor, rotary_dim: int, keywords: dict[str, Any]
) -> list[Tensor]:
    """Queries, keys and values that a decoder layer makes of inputs (B, m, hidden).

    They are those before rotation, in the dtype of the layer, whose call ends with them.
    """
    found: list[Tensor] = []

    def stop(attention: nn.Module, *projections: Any) -> Tensor:
        found.extend(projections[:3])
        raise _Enough

    weight = attention_of(module).o_proj.weight
    with suppress(_Enough):
        call_layer(module, inputs.to(weight.dtype), stop, rotary_dim, keywords)
    return found


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
    with intercepted(attention_of(module).config), uncompiled(module):
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
