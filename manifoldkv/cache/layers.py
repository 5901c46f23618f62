"""The latents of a layer, and the cache of all layers."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from manifoldkv.cache.sinks import Sinks
from manifoldkv.cache.storage import GrowingTensor, Store
from manifoldkv.cache.stores import store_for
from manifoldkv.errors import CacheError
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.site import SitePlan


class CompressedLayer(CacheLayerMixin):
    """Latents of the keys and values of one layer, and its uncompressed sink tokens.

    Parameters
    ----------
    plan : LayerPlan
        Bases, quantizers and window of the layer.
    dtype : torch.dtype
        Dtype of the model.
    device : torch.device
        Device of the layer.
    sinks : int
        Number of sink tokens of every sequence, ignored in a layer with a sliding window.
    """

    is_compileable = False
    supports_early_init = False

    def __init__(
        self,
        plan: LayerPlan,
        dtype: torch.dtype,
        device: torch.device,
        sinks: int,
    ) -> None:
        super().__init__()
        self.window = plan.window
        self.is_sliding = plan.window is not None
        # Tokens that were rounded in a run have lost their exact values.
        self.is_croppable = all(site.quantizer.run is None for _, site in plan.sites)
        self.sinks = Sinks(plan.sink_tokens(sinks))

        def store(site: SitePlan) -> Store:
            features = site.basis.down.shape[2]
            return store_for(site.quantizer, features, dtype, device, unseen=self.sinks.size)

        self.key_store = store(plan.key)
        self.value_store = store(plan.value)
        self.tokens_seen = 0
        self.record_past = False

    def advance(self, tokens: int) -> None:
        """Count new tokens, before their latents are stored."""
        self.tokens_seen += tokens
        self.is_initialized = True

    def forget_old(self) -> None:
        """Drop tokens behind the window, unless they are recorded for a later crop."""
        if not self.record_past:
            self._forget_windowed()

    @property
    def rows(self) -> int | None:
        """Return the number of rows, B; None before the first tokens."""
        return self.key_store.rows

    @property
    def tokens_held(self) -> int:
        """Return the number of stored tokens."""
        return len(self.key_store)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> NoReturn:
        """Refuse keys and values from outside a compressed block."""
        raise CacheError(
            "this cache stores latents; use it inside `with manifoldkv.compressed(model, plan)`"
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: stores take their shape from the first tokens."""

    def get_seq_length(self) -> int:
        """Return the number of tokens seen, stored or not."""
        return self.tokens_seen

    def get_max_length(self) -> int:
        """Return the window in tokens, -1 for none."""
        return -1 if self.window is None else self.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of tokens visible to the next queries, and the slot of the first."""
        past = self.tokens_seen if self.window is None else min(self.tokens_seen, self.window - 1)
        return past + query_length, self.tokens_seen - past

    def activate_past_recording(self) -> None:
        """Keep the tokens that a later crop may need.

        Raises
        ------
        CacheError
            If the layout does not support crops.
        """
        if not self.is_croppable:
            raise CacheError(
                "KIVI's layout cannot take tokens back: no assisted decoding and no prompt lookup "
                "with it; use the static or the token layout"
            )
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, whose number is given as a negative one.

        Raises
        ------
        CacheError
            If the crop is not possible (`check_crop`).
        """
        self.check_crop(tokens_to_remove)
        count = min(-tokens_to_remove, self.tokens_seen)
        self.tokens_seen -= count
        for store in (self.key_store, self.value_store):
            store.drop_last(count)
        self.sinks.keep_first(self.tokens_seen)
        self._forget_windowed()

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuse an impossible crop.

        Raises
        ------
        CacheError
            If the number is positive, or the window has dropped tokens that would be visible.
        """
        if tokens_to_remove > 0:
            raise CacheError(f"crop takes a negative number of tokens, not {tokens_to_remove}")
        count = min(-tokens_to_remove, self.tokens_seen)
        left = self.tokens_seen - count
        needed = left if self.window is None else min(left, self.window - 1)
        if self.tokens_held - count < needed:
            raise CacheError(
                f"cannot crop {count} tokens: a window of {self.window} has dropped what would be "
                "seen again; call activate_past_recording() before"
            )
        if not self.key_store.can_drop_last(count):
            raise CacheError(
                f"cannot crop {count} tokens: some of them are rounded already, which KIVI's "
                "layout cannot undo; use the static or the token layout"
            )

    def reset(self) -> None:
        """Drop all tokens."""
        for store in (self.key_store, self.value_store):
            store.clear()
        self.sinks.clear()
        self.tokens_seen = 0
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows by index or mask, with repetitions."""
        if self.rows is None:
            return
        indices = _chosen(self.rows, indices)
        for store in (self.key_store, self.value_store):
            store.select(indices)
        self.sinks.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        if self.rows is not None:
            self.batch_select_indices(torch.arange(self.rows).repeat_interleave(repeats))

    def offload(self) -> NoReturn:
        """Refuse to move the cache off the device of the model."""
        raise CacheError("a compressed cache stays on the device of its model")

    def prefetch(self) -> NoReturn:
        """Refuse to move the cache off the device of the model."""
        self.offload()

    @property
    def stores(self) -> tuple[Store, ...]:
        """Return all stores of tokens."""
        return self.key_store, self.value_store, *self.sinks.stores

    def _forget_windowed(self) -> None:
        """Drop the tokens behind the window of all later queries."""
        old = 0 if self.window is None else self.tokens_held - (self.window - 1)
        if old > 0:
            self.key_store.drop_first(old)
            self.value_store.drop_first(old)


class CompressedCache(Cache):
    """A key-value cache of latents.

    Created by the function that `compressed` returns and usable inside its block only. Between
    calls it can be kept, continued, cropped and reordered like other caches of transformers. A call
    has as many rows as the cache; `batch_repeat_interleave` and `batch_select_indices` change it.

    Parameters
    ----------
    plan : CompressionPlan
        Plan of the latents.
    dtype : torch.dtype
        Dtype of the model.
    devices : list of torch.device
        Device of every layer.
    """

    def __init__(
        self, plan: CompressionPlan, dtype: torch.dtype, devices: list[torch.device]
    ) -> None:
        layers = [
            CompressedLayer(layer, dtype, device, plan.sinks)
            for layer, device in zip(plan.layers, devices, strict=True)
        ]
        super().__init__(layers=layers)
        self.plan_digest = plan.digest()
        self.dtype = dtype
        # Shared by all layers: a layer that holds n tokens holds the newest n of these.
        self._positions = GrowingTensor()  # (B or 1, 1, n, 1), int32
        self._placed = 0
        """Number of tokens that have a position."""

    @property
    def rows(self) -> int | None:
        """Return the number of rows, B; None before the first tokens."""
        return self.layers[0].rows

    def nbytes(self) -> int:
        """Return the size of latents, scales, offsets and sink tokens in bytes."""
        return sum(store.nbytes for layer in self.layers for store in layer.stores)

    def storage_nbytes(self) -> int:
        """Return the allocated bytes: `nbytes`, positions and slack."""
        tokens = sum(store.storage_nbytes for layer in self.layers for store in layer.stores)
        begins = sum(layer.sinks.begins.nbytes for layer in self.layers)
        return tokens + begins + self._positions.storage_nbytes

    def compact(self) -> None:
        """Free the slack, which the next token allocates again."""
        for part in self._growing():
            part.compact()

    def append_positions(self, positions: Tensor) -> None:
        """Store the positions (B or 1, m) of new tokens, before any layer appends them."""
        self._forget_unused_positions()
        self._placed += positions.shape[1]
        new = positions.to(torch.int32)[:, None, :, None]
        if not len(self._positions):
            self._positions.clear()  # those of another number of rows may have been dropped
        else:
            held = self._positions.view
            if held.shape[0] == 1 < new.shape[0]:
                self._positions.select(held.new_zeros(new.shape[0], dtype=torch.int64))
            new = new.expand(self._positions.view.shape[0], -1, -1, -1)
        self._positions.drop_first(
            len(self._positions) - max(layer.tokens_held for layer in self.layers)
        )
        self._positions.append(new)

    def positions(self) -> Tensor:
        """Return the positions of all tokens that a layer holds, (B or 1, n), int64."""
        return self._positions.view[:, 0, :, 0].long()

    def _forget_unused_positions(self) -> None:
        """Drop positions of tokens that were cropped, or not stored because their call failed."""
        if self._placed > self.get_seq_length():
            self._positions.drop_last(self._placed - self.get_seq_length())
            self._placed = self.get_seq_length()

    @property
    def is_whole(self) -> bool:
        """Return whether all layers have seen the same tokens; False after a failed call."""
        return len({layer.tokens_seen for layer in self.layers}) == 1

    def crop(self, tokens_to_remove: int) -> None:
        for layer in self.layers:  # before any layer is changed
            layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)
        self._forget_unused_positions()

    def reset(self) -> None:
        super().reset()
        self._positions.clear()
        self._placed = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows by index or mask, with repetitions."""
        if self.rows is None:
            return
        indices = _chosen(self.rows, indices)
        super().batch_select_indices(indices)
        if len(self._positions) and self._positions.view.shape[0] > 1:
            self._positions.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        if self.rows is not None:
            self.batch_select_indices(torch.arange(self.rows).repeat_interleave(repeats))

    def _growing(self) -> list[GrowingTensor]:
        parts = [p for layer in self.layers for store in layer.stores for p in store.parts]
        return [*parts, self._positions]


def _chosen(rows: int, indices: Tensor) -> Tensor:
    """Return the indices, from 0 on, of rows that a mask or indices select as they do in torch."""
    return torch.arange(rows, device=indices.device)[indices]
