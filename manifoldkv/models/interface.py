"""Attention of manifoldkv, registered as an attention function of transformers.

Every supported decoder rotates queries and keys and then calls the attention function that its
configuration names, here `NAME`. Inside `intercepted`, the keyword `manifoldkv_attend` of a layer
replaces its attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.masking_utils import sdpa_mask

from manifoldkv.core.errors import ModelError
from manifoldkv.models.support import LOOKS_AHEAD, modeling_module

NAME = "manifoldkv"

_WITHOUT_EFFECT = frozenset(
    # Masks include windows and causality; the rest is for other back ends.
    {"dropout", "sliding_window", "is_causal", "position_ids", "cache_position", "use_cache"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep"}
)


@dataclass(frozen=True)
class AttentionSettings:
    """Parameters of the scores of an attention module.

    Parameters
    ----------
    scaling : float
        Factor of the scores.
    softcap : float or None
        Bound c of scores, ``c * tanh(scores / c)`` (Gemma 2).
    sinks : Tensor or None
        Sink logits, one per query head, which take part in the softmax only, (H_q,) (gpt-oss).
    """

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether weights are a softmax of scaled scores alone."""
        return self.softcap is None and self.sinks is None

    @classmethod
    def from_arguments(cls, module: nn.Module, arguments: dict[str, Any]) -> AttentionSettings:
        """Return the settings in the keywords that a module passes to its attention function.

        Raises
        ------
        ModelError
            If attention is bidirectional, or another keyword is set, which would change the result.
        """
        if arguments.get("dropout"):
            raise ModelError(
                f"{type(module).__name__} drops attention weights at random while it is trained, "
                "which manifoldkv does not implement: call model.eval() first"
            )
        if not getattr(module, "is_causal", True) or arguments.get("is_causal") is False:
            raise ModelError(f"{type(module).__name__} is not supported: {LOOKS_AHEAD}")
        known = {"scaling", "softcap", "s_aux"} | _WITHOUT_EFFECT
        unknown = [k for k, v in arguments.items() if k not in known and v is not None]
        if unknown:
            raise ModelError(
                f"{type(module).__name__} calls attention with {', '.join(sorted(unknown))}, "
                "which manifoldkv does not implement"
            )
        return cls(arguments["scaling"], arguments.get("softcap"), arguments.get("s_aux"))


Attend = Callable[..., Tensor]
"""Replacement of attention in a call of a layer.

A function of the attention module, queries, keys, values (B, H, tokens, d), the mask and further
keywords of the module, which returns the attention output, (B, m, H_q, d).
"""


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, settings: AttentionSettings
) -> Tensor:
    """Return grouped-query attention over rotated queries and keys, (B, H_q, m, e).

    Parameters
    ----------
    queries : Tensor
        Rotated queries, (B, H_q, m, d).
    keys : Tensor
        Rotated keys, (B, H_kv, n, d).
    values : Tensor
        Values, (B, H_kv, n, e); e may differ from d.
    mask : Tensor
        Boolean, True where a query sees a key, (B or 1, 1, m, n).
    settings : AttentionSettings
        Scaling, soft cap and sink logits.
    """
    batch, heads, rows, _ = queries.shape
    kv_heads = keys.shape[1]
    share = heads // kv_heads
    if settings.softcap is not None or settings.sinks is not None:
        mixed = attention_weights(queries, keys, mask, settings) @ values.unsqueeze(2)
        return mixed.reshape(batch, heads, rows, -1)
    # Query heads of a group are rows of its KV head: keys and values are not repeated.
    grouped = queries.reshape(batch, kv_heads, share * rows, -1)
    mixed = nn.functional.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask.repeat(1, 1, share, 1), scale=settings.scaling
    )
    return mixed.reshape(batch, heads, rows, -1)


def attention_weights(
    queries: Tensor, keys: Tensor, mask: Tensor, settings: AttentionSettings
) -> Tensor:
    """Return the softmax of masked scores, (B, H_kv, H_q/H_kv, m, n); parameters as in `attend`."""
    batch, heads, rows, _ = queries.shape
    kv_heads = keys.shape[1]
    share = heads // kv_heads
    grouped = queries.reshape(batch, kv_heads, share * rows, -1)
    scores = (grouped @ keys.mT * settings.scaling).view(batch, kv_heads, share, rows, -1)
    return weights_from_scores(scores, mask, settings)


def weights_from_scores(scores: Tensor, mask: Tensor | None, settings: AttentionSettings) -> Tensor:
    """Return the softmax of scores after soft cap, mask and sink logits, in their dtype.

    Parameters
    ----------
    scores : Tensor
        Scaled scores, (B, H_kv, H_q/H_kv, m, n).
    mask : Tensor or None
        As in `attend`; None if every query sees every key.
    settings : AttentionSettings
        Soft cap and sink logits.
    """
    if settings.softcap is not None:
        scores = settings.softcap * torch.tanh(scores / settings.softcap)
    if mask is not None:
        # Not -inf: the output of a fully masked query must be finite.
        scores = scores.masked_fill(~mask.unsqueeze(2), torch.finfo(scores.dtype).min)
    if settings.sinks is None:
        return scores.softmax(dim=-1)
    sinks = settings.sinks.to(scores.dtype).view(1, scores.shape[1], -1, 1, 1)
    scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    return scores.softmax(dim=-1)[..., :-1]


Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rotation of x (B, H, t, d) by cos and sin (B or 1, t, rotary dimension)."""


def rotation_of(layer: nn.Module) -> Rotate:
    """Return the rotation of queries or keys in a decoder layer."""
    return _rotation_by(modeling_module(layer).apply_rotary_pos_emb)


@cache
def _rotation_by(apply: Callable[..., tuple[Tensor, Tensor]]) -> Rotate:
    """Return the same rotation for the same function of queries and keys."""
    return lambda x, cos, sin: apply(x, x[:, :0], cos, sin)[0]


def identity_rotation(like: Tensor, tokens: int, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin of angle 0, (1, tokens, rotary_dim)."""
    cos = like.new_ones(1, tokens, rotary_dim)
    return cos, torch.zeros_like(cos)


@contextmanager
def intercepted(config: PretrainedConfig, name: str = NAME) -> Iterator[None]:
    """Use manifoldkv's attention in layers of this configuration inside the block."""
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def _attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    manifoldkv_attend: Attend | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    if manifoldkv_attend is not None:
        output = manifoldkv_attend(module, query, key, value, attention_mask, arguments)
        return output.contiguous(), None
    if attention_mask is None:
        raise ModelError(
            f"{type(module).__name__} is not supported: its layer does not hand keywords on to it"
        )
    check_mask(module, attention_mask)
    settings = AttentionSettings.from_arguments(module, arguments)
    output = attend(query, key, value, attention_mask, settings).transpose(1, 2)
    return output.contiguous(), None  # some modules take a view of it


def check_mask(module: nn.Module, mask: Tensor | None) -> None:
    """Raise `ModelError` if an attention module adds numbers to its scores by its mask."""
    if mask is not None and (mask.dtype != torch.bool or mask.shape[1] != 1):
        raise ModelError(
            f"{type(module).__name__} is not supported: it replaces the attention mask by one in "
            f"{mask.dtype} of {mask.shape[1]} heads"
        )


def _explicit_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return a boolean mask, never None, of which any query rows can be selected."""
    return sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})


AttentionInterface.register(NAME, _attention_function)
AttentionMaskInterface.register(NAME, _explicit_mask)
