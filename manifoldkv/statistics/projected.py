"""A model with reconstructed keys and values: without a cache, and differentiable.

Logits equal those of a compressed cache, in one pass over whole sequences. They are used to fit
bases and ranks; reported losses are measured on the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manifoldkv.core.basis import Basis, Rotary
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.interface import (
    AttentionSettings,
    attend,
    identity_rotation,
    intercepted,
    rotation_of,
)
from manifoldkv.models.support import check_without_dropout, uncompiled

Bases = Mapping[int, tuple[Basis | None, Basis | None]]
"""Key basis and value basis by layer; missing or None for uncompressed."""
Reconstruct = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Reconstruction of the keys and values (B, H_kv, n, d) of a layer, by its index."""


def projected(
    model: PreTrainedModel,
    bases: Bases,
    *,
    rotary: Rotary = "pre",
    sinks: int = 0,
) -> AbstractContextManager[None]:
    """Project the keys and values of a model inside the block. Other parameters: `reconstructed`.

    Parameters
    ----------
    bases : mapping
        Bases of the compressed layers, read at each call, so that they may be trained.
    """

    def project(index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        key_basis, value_basis = bases[index]
        return _project(keys, key_basis), _project(values, value_basis)

    return reconstructed(model, project, layers=bases, rotary=rotary, sinks=sinks)


@contextmanager
def reconstructed(
    model: PreTrainedModel,
    reconstruct: Reconstruct,
    *,
    layers: Container[int],
    rotary: Rotary = "pre",
    sinks: int = 0,
) -> Iterator[None]:
    """Replace the keys and values of a model by their reconstructions inside the block.

    Call the model with ``use_cache=False``.

    Parameters
    ----------
    model : PreTrainedModel
        Causal language model with rotary embeddings, restored after the block.
    reconstruct : callable
        `Reconstruct`, called layer by layer.
    layers : container of int
        Indices of the layers concerned.
    rotary : {"pre", "post"}
        Whether keys are reconstructed before or after rotation.
    sinks : int
        Number of first tokens that queries see uncompressed in layers without a sliding window.

    Raises
    ------
    ModelError
        If the model is not supported, or has dropout on.
    """
    decoder = Decoder.of(model)
    check_without_dropout(decoder.model)
    with ExitStack() as stack:
        stack.enter_context(intercepted(decoder.config))
        stack.enter_context(uncompiled(decoder.model))
        for index, attention in enumerate(decoder.attentions):
            if index in layers:
                of_layer = sinks if decoder.windows[index] is None else 0
                hook = _before_attention(
                    decoder.layers[index], reconstruct, index, rotary, of_layer
                )
                handle = attention.register_forward_pre_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
        yield


def _before_attention(
    layer: nn.Module, reconstruct: Reconstruct, index: int, rotary: Rotary, sinks: int
) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    rotate = rotation_of(layer)

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cos, sin = kwargs["position_embeddings"]

        def attend_projected(
            module: nn.Module,
            queries: Tensor,
            keys: Tensor,
            values: Tensor,
            mask: Tensor,
            arguments: dict[str, Any],
        ) -> Tensor:
            settings = AttentionSettings.from_arguments(module, arguments)
            queries, rotated = rotate(queries, cos, sin), rotate(keys, cos, sin)
            exact = rotated if rotary == "post" else keys
            old_keys, old_values = reconstruct(index, exact, values)
            if rotary == "pre":
                old_keys = rotate(old_keys, cos, sin)
            if sinks:
                # Every token twice, projected and not; the mask shows a query one of the two.
                first = torch.arange(mask.shape[-1], device=mask.device) < sinks
                mask = torch.cat([mask & ~first, mask & first], dim=-1)
                old_keys = torch.cat([old_keys, rotated], dim=2)
                old_values = torch.cat([old_values, values], dim=2)
            return attend(queries, old_keys, old_values, mask, settings).transpose(1, 2)

        kwargs["position_embeddings"] = identity_rotation(cos, *cos.shape[-2:])
        kwargs["manifoldkv_attend"] = attend_projected
        return args, kwargs

    return hook


def _project(x: Tensor, basis: Basis | None) -> Tensor:
    """Return the reconstruction of `x` in its dtype, computed in the wider of the two dtypes."""
    if basis is None:
        return x
    return basis.project(x.to(torch.promote_types(x.dtype, basis.dtype))).to(x.dtype)


def log_probabilities(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return log-probabilities of the next tokens, (B, n, vocabulary), in float32 or wider."""
    logits = model(input_ids=tokens, use_cache=False).logits
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)


def divergence(exact: Tensor, compressed: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of next-token distributions, nats per token.

    Parameters
    ----------
    exact, compressed : Tensor
        Log-probabilities (…, vocabulary) of the uncompressed and of the compressed model.
    """
    terms = exact.exp() * (exact - compressed)
    return terms.sum(dim=-1).mean()
