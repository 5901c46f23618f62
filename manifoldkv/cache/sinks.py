"""Sink tokens: the first of every sequence, held uncompressed beside their latents."""

from __future__ import annotations

import torch
from torch import Tensor

from manifoldkv.cache.storage import ExactStore, working_dtype
from manifoldkv.models.rotary import Angles


class Sinks:
    """Keys and values of the first tokens of every sequence of one layer.

    A sequence of a left-padded batch begins at its first token that the mask shows, so that the
    slots of these tokens differ from row to row. Entry i of a row belongs to slot ``begin + i``; it
    means nothing as long as that slot is not filled.

    Parameters
    ----------
    size : int
        Tokens of a sequence; 0 if the layer keeps none.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # Rotated keys and values, (B, H_kv, min(n, size), d), of n tokens seen.
        self.keys = ExactStore(smallest_growth=0)
        self.values = ExactStore(smallest_growth=0)
        self.begins = torch.zeros(0, dtype=torch.int64)
        """Slot of the first token of every row, (B,); that of the next token if none has come."""
        self._complete = False

    @property
    def stores(self) -> tuple[ExactStore, ...]:
        """Return what holds tokens: nothing if none are kept."""
        return (self.keys, self.values) if self.size else ()

    def take(
        self, keys: Tensor, values: Tensor, past: int, visible: Tensor | None, angles: Angles | None
    ) -> None:
        """Keep those of some new tokens that are among the first of their sequences.

        Parameters
        ----------
        keys, values : Tensor
            (B, H_kv, m, d); keys are rotated if and only if `angles` is None.
        past : int
            Tokens that came before.
        visible : Tensor or None
            (B or 1, m), False for padding; None if there is none.
        angles : Angles or None
            Of all tokens up to these.
        """
        if self._complete or not self.size:
            return
        batch, heads, count, head_dim = keys.shape
        tokens, device = past + count, keys.device
        # What is made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            begins = self.begins if len(self.begins) else self.begins.new_zeros(batch)
            begins = begins.to(device)
            if visible is not None:
                hidden = (~visible).long().cumprod(dim=1).sum(dim=1)  # leading ones
                hidden = hidden.to(device)
                begins = torch.where(begins == past, past + hidden, begins)
            self.begins = begins
        slots = self._slots(min(tokens, self.size))  # (B, s)
        places = slots - past
        new = (places >= 0)[:, None, :, None]
        places = places.clamp(0, count - 1)[:, None, :, None]
        keys, values = (x.take_along_dim(places, dim=2) for x in (keys, values))
        if angles is not None:
            keys = angles.of_slots(keys, slots.clamp(max=tokens - 1))
        for store, x in ((self.keys, keys), (self.values, values)):
            store.append(x.new_zeros(batch, heads, slots.shape[1] - len(store), head_dim))
            held = store.newest(slots.shape[1])
            held.copy_(torch.where(new, x, held))
        self._complete = bool((self.begins + self.size <= tokens).all())

    def seen(self) -> tuple[Tensor, Tensor]:
        """Return keys, in the dtype that scores are computed in, and values, (B, H_kv, s, d)."""
        keys, values = (store.newest(len(store)) for store in (self.keys, self.values))
        return keys.to(working_dtype(keys.dtype, keys.device)), values

    def split(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Tell in a mask these tokens from all others.

        Parameters
        ----------
        mask : Tensor
            (B or 1, 1, m, n), True where a query sees one of the first n slots.

        Returns
        -------
        others : Tensor
            (B, 1, m, n), True where a query sees a token that is none of these.
        sinks : Tensor
            (B, 1, m, s), True where a query sees one that is.
        """
        tokens = mask.shape[-1]
        slots = self._slots(len(self.keys))[:, None, None]  # (B, 1, 1, s)
        sinks = mask.take_along_dim(slots.clamp(max=tokens - 1), dim=-1) & (slots < tokens)
        begins = self.begins.view(-1, 1, 1, 1)
        places = torch.arange(tokens, device=mask.device) - begins
        return mask & ((places < 0) | (places >= self.size)), sinks

    def keep_first(self, tokens: int) -> None:
        """Forget all that came after the first `tokens` slots."""
        for store in self.stores:
            store.drop_last(len(store) - min(tokens, self.size))
        with torch.inference_mode(False):
            self.begins = self.begins.clamp(max=tokens)
        self._complete = False

    def clear(self) -> None:
        """Forget all tokens."""
        for store in self.stores:
            store.clear()
        self.begins = self.begins.new_zeros(0)
        self._complete = False

    def select(self, sequences: Tensor) -> None:
        """Keep some sequences, in this order; one may come several times."""
        for store in self.stores:
            store.select(sequences)
        if len(self.begins):
            with torch.inference_mode(False):
                self.begins = self.begins.index_select(0, sequences.to(self.begins.device))

    def _slots(self, count: int) -> Tensor:
        """Return the slots of the first `count` tokens of every row, (B, count)."""
        return self.begins.unsqueeze(1) + torch.arange(count, device=self.begins.device)
