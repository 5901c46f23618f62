"""From a model and tokens to the activations of one layer after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manifoldkv.activations.call import StopForward, call_layer
from manifoldkv.activations.layer import SEQUENCES_PER_FORWARD, LayerActivations
from manifoldkv.activations.placement import Placement
from manifoldkv.errors import ModelError
from manifoldkv.models.interface import AttentionSettings, attend, intercepted
from manifoldkv.models.offloading import resident
from manifoldkv.models.support import (
    attention_of,
    check_supported,
    check_without_dropout,
    decoder_layers,
    modeling_module,
    uncompiled,
    unwrapped,
)
from manifoldkv.text.tokens import checked_tokens

CHECKED_ROWS = 64
"""Last rows of a replayed layer's input and output that are compared with the model's own."""


OUTPUT_TOLERANCE = 0.02
"""Relative error of a replayed layer that rounding can explain, bfloat16 included."""
DRIFT_FACTOR = 2
"""How many times as large a layer may make an error that its inputs bring along: in bfloat16 some
tenth of a percent more with every layer, as sequences run together that the model ran one by one.
"""


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
    ModelError
        Before any forward pass, if the model's attention cannot be handled, or dropout is on.
        If the output of a layer is not finite.
    ArgumentError
        If the tokens are not ids and lengths that the model takes.
    ValueError
        If a layer index is out of range.
    RunError
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
    calls, stock_ends = _record_calls(model, tokens[:1], modules)
    placement = _placement(model, tokens, folder)
    inputs = _embeddings(model, tokens, modules[0], placement)
    for index, module in enumerate(modules[: max(wanted) + 1]):
        with resident(module):
            activations = _run_layer(index, module, inputs, calls[index], placement)
            if propagate is None or index == 0:  # later inputs are not the model's own
                _check_output(activations, stock_ends[index])
            if index in wanted:
                yield activations
            inputs = activations.outputs if propagate is None else propagate(activations)
            inputs = inputs.to(model.dtype)
        del activations


def _placement(model: PreTrainedModel, tokens: Tensor, folder: Path | None) -> Placement:
    """Return the placement for the inputs and outputs of a layer."""
    elements = 2 * tokens.numel() * model.config.get_text_config().hidden_size
    return Placement(elements * model.dtype.itemsize, model.device, folder)


def _record_calls(
    model: PreTrainedModel, tokens: Tensor, modules: nn.ModuleList
) -> tuple[list[dict[str, Any]], list[tuple[Tensor, Tensor] | None]]:
    """Return the keywords with which the model calls each layer, and the ends of input and output.

    Keywords are equal for all unpadded sequences of a length.
    """
    calls: list[dict[str, Any]] = []
    ends: list[tuple[Tensor, Tensor] | None] = []

    def record(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        calls.append({k: v for k, v in kwargs.items() if k != "hidden_states"})
        given = args[0] if args else kwargs["hidden_states"]
        # Copies: views would keep the whole inputs and outputs of every layer.
        ends.append(
            (given[:, -CHECKED_ROWS:].clone(), output[:, -CHECKED_ROWS:].clone())
            if isinstance(output, Tensor)
            else None
        )

    hooks = [m.register_forward_hook(record, with_kwargs=True) for m in modules]
    try:
        with intercepted(model.config.get_text_config()), uncompiled(model):
            model(input_ids=tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for module, call in zip(modules, calls, strict=True):
        if "position_embeddings" not in call or call.get("attention_mask") is None:
            raise ModelError(
                f"{type(module).__name__} is not supported: it is called without rotary angles "
                "or without an attention mask"
            )
    return calls, ends


def _check_output(activations: LayerActivations, stock: tuple[Tensor, Tensor] | None) -> None:
    """Refuse a layer whose output is not that of the layer as the model calls it.

    A family that does something between rotation and attention (HunYuan's norms, say) would
    otherwise be captured wrongly without an error.
    """
    if not activations.outputs[:1, -CHECKED_ROWS:].isfinite().all():
        raise ModelError(
            f"the output of layer {activations.layer} is not finite in {activations.outputs.dtype}"
            ": load weights that are finite, in bfloat16 or float32"
        )
    if stock is not None:
        drift, difference = (
            _difference(x[:1, -CHECKED_ROWS:].to(activations.dtype), own)
            for x, own in zip((activations.inputs, activations.outputs), stock, strict=True)
        )
        if difference < OUTPUT_TOLERANCE + DRIFT_FACTOR * drift:
            return
    raise ModelError(
        f"{type(activations.module).__name__} is not supported: layer {activations.layer} computes "
        "something else when its keys and queries are rotated outside of it"
    )


def _difference(found: Tensor, stock: Tensor) -> float:
    residual = found - stock.to(found)
    size = torch.linalg.vector_norm(found).clamp(min=torch.finfo(found.dtype).tiny)
    return float(torch.linalg.vector_norm(residual) / size)


def _embeddings(
    model: PreTrainedModel, tokens: Tensor, first: nn.Module, placement: Placement
) -> Tensor:
    """Return the inputs of the first layer, (S, n, hidden)."""
    shape = (*tokens.shape, model.config.get_text_config().hidden_size)
    inputs = placement.empty(shape, model.dtype)
    done = 0

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal done
        chunk = args[0] if args else kwargs["hidden_states"]
        inputs[done : done + len(chunk)] = chunk
        done += len(chunk)
        raise StopForward

    hook = first.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        for chunk in tokens.split(SEQUENCES_PER_FORWARD):
            with suppress(StopForward), uncompiled(model):
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
            raise ModelError(
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
            raise ModelError(
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
