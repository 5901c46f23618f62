"""Interface of attention backends, and attention of one layer over its compressed cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manifoldkv.models.interface import AttentionSettings, weights_from_scores
from manifoldkv.models.rotary import Angles
from manifoldkv.plan.composition import Composer
from manifoldkv.plan.predictor import Input, PredictorContext
from manifoldkv.serve.cache.latents import product, scores_of
from manifoldkv.serve.cache.layers import CompressedLayer
from manifoldkv.serve.cache.mixed import WidthStore
from manifoldkv.serve.cache.storage import Store

ELEMENTS_AT_A_TIME = 1 << 19
"""Elements of up-projected keys or dequantized latents held at a time, for a processor's cache."""
ELEMENTS_ON_GPU = 1 << 26
"""The same on a GPU, where every tile costs the start of its kernels."""


@dataclass(frozen=True)
class Seen:
    """Tokens that some queries attend to: latents, then uncompressed tokens, then sink tokens.

    Tokens are counted from the first visible one. Sink tokens have latents too: the mask shows each
    of them to a query once.

    Parameters
    ----------
    layers : sequence of CompressedLayer
        The layer of the cache and those below that predictors depend on, downwards.
    angles : Angles or None
        Of the visible latents, for keys stored before rotation.
    newest : int
        Number of stored tokens from the first visible one on, the same in all layers.
    latents : int
        Number of first tokens that are visible as latents.
    exact : list of tuple of Tensor
        Keys and values of uncompressed tokens, (B, H_kv, t, d) each; keys are rotated.
    mask : Tensor or None
        Visibility of tokens, (B or 1, 1, m, `latents` and all t), bool; None if every query sees
        all of them.
    """

    layers: Sequence[CompressedLayer]
    angles: Angles | None
    newest: int
    latents: int
    exact: list[tuple[Tensor, Tensor]]
    mask: Tensor | None

    def store(self, one: Input) -> tuple[Store, int]:
        """Return the store of keys or values of a layer, and its first visible token."""
        below, site = one
        layer = self.layers[below]
        store = layer.key_store if site == "key" else layer.value_store
        return store, len(store) - self.newest

    def packed(self, one: Input) -> tuple[WidthStore, int, int]:
        """Return a packed store, and the first and the last (exclusive) of its visible tokens."""
        store, first = self.store(one)
        assert isinstance(store, WidthStore)
        return store, first, first + self.latents

    def rotated(self, keys: Tensor, start: int, stop: int) -> Tensor:
        """Return keys (B, H_kv, stop - start, d) of consecutive tokens, rotated."""
        return keys if self.angles is None else self.angles.tile(keys, start, stop)


class AttentionBackend(ABC):
    """Attention of one layer over the latents of its keys and values."""

    @classmethod
    @abstractmethod
    def of(
        cls, composer: Composer, index: int, dtype: torch.dtype, device: torch.device
    ) -> AttentionBackend:
        """Return the backend of a layer.

        Parameters
        ----------
        composer : Composer
            Of all layers of the plan.
        index : int
            Of the layer.
        dtype : torch.dtype
            Of the model.
        device : torch.device
            Of the layer.
        """

    @abstractmethod
    def store(
        self, layer: CompressedLayer, keys: Tensor, values: Tensor, context: PredictorContext
    ) -> None:
        """Store new tokens.

        Parameters
        ----------
        layer : CompressedLayer
            Of the cache.
        keys, values : Tensor
            New ones, (B, H_kv, m, d).
        context : PredictorContext
            Reconstructions of the new tokens in the layers below, (B, m, D) each. Those of this
            layer are added.
        """

    @abstractmethod
    def attend(self, queries: Tensor, seen: Seen, settings: AttentionSettings) -> Tensor:
        """Return the attention output of a few queries, (B, H_q, m, d).

        Parameters
        ----------
        queries : Tensor
            Rotated queries, (B, H_q, m, d).
        seen : Seen
            Tokens that they attend to, the new ones included.
        settings : AttentionSettings
            Scaling, soft cap and sink logits.
        """

    def attends_to_latents(self, seen: Seen, settings: AttentionSettings) -> bool:
        """Return whether `attend` runs torch's attention kernel on latents, for any queries."""
        return False

    @abstractmethod
    def reconstruct(self, seen: Seen, size: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return rotated keys and values of the visible latents, (B, H_kv, t, d) by tile.

        Tiles have at most `size` tokens where they are computed.
        """


def attend_by_scores(
    queries: Tensor,
    heads: int,
    seen: Seen,
    settings: AttentionSettings,
    scores: Callable[[Tensor], Iterable[Tensor]],
    mix: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the attention output of queries by the scores of all visible tokens.

    Parameters
    ----------
    queries, seen, settings
        As in `AttentionBackend.attend`.
    heads : int
        Number of KV heads.
    scores : callable
        Returns the scores (B, H_kv, R, t) of the visible latents by tile, of scaled queries
        (B, H_kv, R, d).
    mix : callable
        Returns the values of the visible latents mixed by the first of some weights
        (B, H_kv, R, n), (B, H_kv, R, d).
    """
    batch, _, rows, _ = queries.shape
    by_head = split_queries(queries, heads) * settings.scaling
    tiles = [*scores(by_head), *(scores_of(by_head, keys) for keys, _ in seen.exact)]
    by_row = joined(tiles).unflatten(2, (-1, rows))  # (B, H_kv, H_q / H_kv, m, n)
    by_row = by_row.to(torch.promote_types(by_row.dtype, torch.float32))
    weights = weights_from_scores(by_row, seen.mask, settings).flatten(2, 3)  # (B, H_kv, R, n)
    output, start = mix(weights), seen.latents
    for _, values in seen.exact:
        stop = start + values.shape[2]
        output = output + product(weights[..., start:stop].to(values.dtype), values)
        start = stop
    # Reconstructed values are in float32 on a CPU, and so is a sum with them.
    return output.to(queries.dtype).reshape(batch, -1, rows, output.shape[3])


def split_queries(queries: Tensor, heads: int) -> Tensor:
    """Return queries (B, H_q, m, d) by KV head, (B, H_kv, R, d)."""
    return queries.reshape(len(queries), heads, -1, queries.shape[3])


def joined(tiles: list[Tensor], dim: int = -1) -> Tensor:
    """Concatenate tiles, without a copy of a single one."""
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=dim)


def tile_tokens(x: Tensor) -> int:
    """Return the number of tokens of a tile with the batch, heads and features of x."""
    elements = ELEMENTS_AT_A_TIME if x.device.type == "cpu" else ELEMENTS_ON_GPU
    return max(1, elements // (x.shape[0] * x.shape[1] * x.shape[3]))
