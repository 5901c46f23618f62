"""Capture of the activations of a model, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manifoldkv.activations.call import LayerCall, StopForward
from manifoldkv.activations.layer import SEQUENCES_PER_FORWARD, LayerActivations
from manifoldkv.activations.placement import Placement
from manifoldkv.errors import ModelError
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.interface import AttentionSettings, attend, intercepted
from manifoldkv.models.offloading import resident
from manifoldkv.models.support import check_without_dropout, uncompiled
from manifoldkv.text.tokens import checked_tokens

REPLACED = ("hidden_states", "position_embeddings", "attention_mask", "position_ids")
"""Arguments of a decoder layer that a replay replaces."""
CHECKED_ROWS = 64
"""Number of last rows of a replayed layer that are compared with the model's."""
OUTPUT_TOLERANCE = 0.02
"""Largest relative error of a replayed layer, which bfloat16 does not exceed."""
DRIFT_FACTOR = 2
"""Largest growth of an input error in a layer. In bfloat16 it grows by about 0.1 % per layer, since
the replay batches sequences that the model ran one by one."""


def capture(
    model: PreTrainedModel,
    tokens: Tensor,
    layers: list[int] | None = None,
    *,
    propagate: Callable[[LayerActivations], Tensor] | None = None,
    folder: Path | None = None,
) -> Iterator[LayerActivations]:
    """Yield the activations of layers in order, holding one layer at a time.

    To save memory, delete the activations of a layer before the next iteration.

    Parameters
    ----------
    model : PreTrainedModel
        Causal language model with rotary embeddings, left unchanged.
    tokens : Tensor
        Token ids, (S, n), int64, no padding.
    layers : list of int, optional
        Layers to yield, ascending; all if omitted. Layers below the last one run in any case.
    propagate : callable, optional
        Function of a layer's activations that returns the inputs of the next layer, (S, n, hidden),
        called after the layer was yielded; its uncompressed outputs if omitted.
    folder : Path, optional
        Folder of activations that do not fit into memory; the system's temporary one if omitted.

    Raises
    ------
    ModelError
        If the model is not supported or has dropout on, before any forward pass; or if the output
        of a layer is not finite.
    ArgumentError
        If the token ids or the length exceed those of the model.
    ValueError
        If a layer index is out of range.
    RunError
        If the activations of a layer fit neither into memory nor into the folder.
    """
    decoder = Decoder.of(model)
    check_without_dropout(decoder.model)
    count = len(decoder.layers)
    wanted = list(range(count)) if layers is None else layers
    outside = [i for i in wanted if not 0 <= i < count]
    if outside:
        raise ValueError(f"layer {outside[0]} is not between 0 and {count - 1}")
    tokens = checked_tokens(decoder.model, tokens).to(decoder.device)
    return _capture(decoder, tokens, wanted, propagate, folder)


@torch.no_grad()
def _capture(
    decoder: Decoder,
    tokens: Tensor,
    wanted: list[int],
    propagate: Callable[[LayerActivations], Tensor] | None,
    folder: Path | None,
) -> Iterator[LayerActivations]:
    recorded = _record_calls(decoder, tokens[:1])
    shape = torch.Size((*tokens.shape, decoder.config.hidden_size))
    placement = Placement(2 * shape.numel() * decoder.dtype.itemsize, decoder.device, folder)
    inputs = _embeddings(decoder, tokens, placement.empty(shape, decoder.dtype))
    for index in range(max(wanted) + 1):
        with resident(decoder.layers[index]):
            activations = _run_layer(index, recorded[index], inputs, placement)
            if propagate is None or index == 0:  # later inputs differ from the model's
                _check_output(activations, recorded[index])
            if index in wanted:
                yield activations
            inputs = activations.outputs if propagate is None else propagate(activations)
            inputs = inputs.to(decoder.dtype)
        del activations


@dataclass(frozen=True, eq=False)
class _Recorded:
    """Call of a decoder layer by the model.

    Parameters
    ----------
    call : LayerCall
        Layer and its arguments.
    cos, sin, mask : Tensor
        Angles and mask as in `LayerActivations`, in the dtype of the model.
    inputs, outputs : Tensor
        Last rows of its hidden states, (1, rows, hidden).
    """

    call: LayerCall
    cos: Tensor
    sin: Tensor
    mask: Tensor
    inputs: Tensor
    outputs: Tensor


def _record_calls(decoder: Decoder, tokens: Tensor) -> list[_Recorded]:
    """Return the calls of all layers in a forward pass of the model, tokens (1, n)."""
    recorded: list[_Recorded] = []
    angles: list[Tensor] = []
    embedding = getattr(decoder.model.get_decoder(), "rotary_emb", None)

    def keep(module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        angles.append(output[0])

    def record(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        inputs = args[0] if args else kwargs["hidden_states"]
        given = kwargs.get("position_embeddings")
        if given is None or kwargs.get("attention_mask") is None:
            raise ModelError(
                f"{type(module).__name__} is not supported: it is called without rotary angles "
                "or without an attention mask"
            )
        if not isinstance(output, Tensor):
            raise ModelError(
                f"{type(module).__name__} is not supported: it returns {type(output).__name__}"
            )
        cos, sin = given
        if embedding is not None and not any(cos is x for x in angles):
            raise ModelError(
                f"{type(module).__name__} is not supported: it does not receive the angles that "
                "the model's rotary_emb made"
            )
        keywords = {name: x for name, x in kwargs.items() if name not in REPLACED}
        # Copies: views would keep the whole inputs and outputs of every layer.
        rows = [x[:, -CHECKED_ROWS:].clone() for x in (inputs, output)]
        call = LayerCall(module, cos.shape[-1], keywords)
        recorded.append(_Recorded(call, cos, sin, kwargs["attention_mask"], *rows))

    hooks = [layer.register_forward_hook(record, with_kwargs=True) for layer in decoder.layers]
    if embedding is not None:
        hooks.append(embedding.register_forward_hook(keep))
    try:
        with intercepted(decoder.config), uncompiled(decoder.model):
            decoder.model(input_ids=tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return recorded


def _check_output(activations: LayerActivations, recorded: _Recorded) -> None:
    """Refuse a layer whose replayed output differs from the model's.

    A family with an operation between rotation and attention (HunYuan's norms, say) would otherwise
    be captured wrongly without an error.
    """
    inputs = activations.inputs[:1, -CHECKED_ROWS:]
    outputs = activations.outputs[:1, -CHECKED_ROWS:]
    if not outputs.isfinite().all():
        raise ModelError(
            f"the output of layer {activations.layer} is not finite in {outputs.dtype}: load "
            "weights that are finite, in bfloat16 or float32"
        )
    drift = _difference(inputs.to(activations.dtype), recorded.inputs)
    difference = _difference(outputs.to(activations.dtype), recorded.outputs)
    if not difference < OUTPUT_TOLERANCE + DRIFT_FACTOR * drift:
        raise ModelError(
            f"{type(activations.module).__name__} is not supported: layer {activations.layer} "
            "computes something else when its keys and queries are rotated outside of it"
        )


def _difference(outputs: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to that of `outputs`."""
    residual = outputs - expected.to(outputs)
    size = torch.linalg.vector_norm(outputs).clamp(min=torch.finfo(outputs.dtype).tiny)
    return float(torch.linalg.vector_norm(residual) / size)


def _embeddings(decoder: Decoder, tokens: Tensor, inputs: Tensor) -> Tensor:
    """Write the inputs of the first layer into `inputs`, (S, n, hidden), and return it."""
    rows = iter(inputs.split(SEQUENCES_PER_FORWARD))

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        next(rows).copy_(args[0] if args else kwargs["hidden_states"])
        raise StopForward

    hook = decoder.layers[0].register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        for chunk in tokens.split(SEQUENCES_PER_FORWARD):
            with suppress(StopForward), uncompiled(decoder.model):
                decoder.model(input_ids=chunk, use_cache=False)
    finally:
        hook.remove()
    return inputs


def _run_layer(
    index: int, recorded: _Recorded, inputs: Tensor, placement: Placement
) -> LayerActivations:
    call, cos, sin = recorded.call, recorded.cos, recorded.sin
    outputs = placement.empty(inputs.shape, inputs.dtype)
    settings: list[AttentionSettings] = []
    shapes: list[tuple[int, int, int]] = []

    def record(
        attention: nn.Module,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        arguments: dict[str, Any],
    ) -> Tensor:
        if values.shape != keys.shape:
            raise ModelError(
                f"{type(attention).__name__} is not supported: its keys have {keys.shape[3]} "
                f"features in {keys.shape[1]} heads, its values {values.shape[3]} in "
                f"{values.shape[1]}"
            )
        shapes.append((queries.shape[1], keys.shape[1], keys.shape[3]))
        settings.append(AttentionSettings.from_arguments(attention, arguments))
        queries, keys = call.rotate(queries, cos, sin), call.rotate(keys, cos, sin)
        return attend(queries, keys, values, recorded.mask, settings[-1]).transpose(1, 2)

    for calls, chunk in enumerate(torch.arange(len(inputs)).split(SEQUENCES_PER_FORWARD), 1):
        outputs[chunk] = call.output(inputs[chunk].to(cos.device), record).to(outputs)
        if len(shapes) != calls:
            raise ModelError(
                f"{type(call.attention).__name__} is not supported: it calls its attention "
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
        mask=recorded.mask,
        outputs=outputs,
        settings=settings[0],
        call=call,
        folder=placement.folder,
    )
