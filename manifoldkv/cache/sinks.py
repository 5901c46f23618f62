"""Sink tokens: the first tokens of every sequence, stored uncompressed beside their latents."""

from __future__ import annotations

import torch
from torch import Tensor

from manifoldkv.cache.storage import ExactStore, check_rows, working_dtype
from manifoldkv.models.rotary import Angles


class Sinks:
    """Keys and values of the sink tokens of one layer.

    A sequence of a left-padded batch begins at its first unmasked token, so that rows differ in the
    slots of their sink tokens. Entry i of a row is that of slot ``begin + i``, and undefined until
    the slot is filled.

    Parameters
    ----------
    size : int
        Number of sink tokens of a sequence, 0 for none.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # Rotated keys and values, (B, H_kv, min(n, size), d), of n tokens seen.
        self.keys = ExactStore(smallest_growth=0)
        self.values = ExactStore(smallest_growth=0)
        self.begins = torch.zeros(0, dtype=torch.int64)
        """Slot of the first token of every row, (B,), or of the next token before the first."""
        self._complete = False
        self._unpadded = False

    @property
    def stores(self) -> tuple[ExactStore, ...]:
        """Return the stores of keys and values, empty without sink tokens."""
        return (self.keys, self.values) if self.size else ()

    def take(
        self, keys: Tensor, values: Tensor, past: int, visible: Tensor | None, angles: Angles | None
    ) -> None:
        """Store the sink tokens among new tokens.

        Parameters
        ----------
        keys, values : Tensor
            New keys and values, (B, H_kv, m, d); keys are rotated if and only if `angles` is None.
        past : int
            Number of tokens before these.
        visible : Tensor or None
            Mask of the new tokens, (B or 1, m), False for padding; None without padding.
        angles : Angles or None
            Angles of all tokens up to these.
        """
        if self._complete or not self.size:
            return
        batch, heads, count, head_dim = keys.shape
        tokens, device = past + count, keys.device
        check_rows(len(self.begins) or batch, batch)
        # A tensor made in inference mode could not be written to outside of it.
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
        keys = keys.take_along_dim(places, dim=2)
        values = values.take_along_dim(places, dim=2)
        if angles is not None:
            keys = angles.of_slots(keys, slots.clamp(max=tokens - 1))
        for store, x in ((self.keys, keys), (self.values, values)):
            store.append(x.new_zeros(batch, heads, slots.shape[1] - len(store), head_dim))
            held = store.newest(slots.shape[1])
            held.copy_(torch.where(new, x, held))
        self._complete = bool((self.begins + self.size <= tokens).all())
        self._unpadded = not bool(self.begins.any())

    @property
    def are_first(self) -> bool:
        """Return whether every row begins with all its sink tokens, without padding."""
        return self._complete and self._unpadded

    def seen(self) -> tuple[Tensor, Tensor]:
        """Return keys, in the dtype of scores, and values, (B, H_kv, s, d) each."""
        keys, values = self.keys.newest(len(self.keys)), self.values.newest(len(self.values))
        return keys.to(working_dtype(keys.dtype, keys.device)), values

    def split(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Split a mask (B or 1, 1, m, n) of the first n slots into sink tokens and all others.

        Returns
        -------
        others : Tensor
            Mask of the other tokens, (B, 1, m, n).
        sinks : Tensor
            Mask of the sink tokens, (B, 1, m, s).
        """
        tokens = mask.shape[-1]
        slots = self._slots(len(self.keys))[:, None, None]  # (B, 1, 1, s)
        sinks = mask.take_along_dim(slots.clamp(max=tokens - 1), dim=-1) & (slots < tokens)
        begins = self.begins.view(-1, 1, 1, 1)
        places = torch.arange(tokens, device=mask.device) - begins
        return mask & ((places < 0) | (places >= self.size)), sinks

    def keep_first(self, tokens: int) -> None:
        """Drop all tokens after the first `tokens` slots."""
        if self.are_first and tokens >= self.size:
            return
        for store in self.stores:
            store.drop_last(len(store) - min(tokens, self.size))
        with torch.inference_mode(False):
            self.begins = self.begins.clamp(max=tokens)
        self._complete = False

    def clear(self) -> None:
        """Drop all tokens."""
        for store in self.stores:
            store.clear()
        self.begins = self.begins.new_zeros(0)
        self._complete = False

    def select(self, sequences: Tensor) -> None:
        """Select sequences by index, with repetitions."""
        for store in self.stores:
            store.select(sequences)
        if len(self.begins):
            with torch.inference_mode(False):
                self.begins = self.begins.index_select(0, sequences.to(self.begins.device))

    def _slots(self, count: int) -> Tensor:
        """Return the slots of the first `count` tokens of every row, (B, count)."""
        return self.begins.unsqueeze(1) + torch.arange(count, device=self.begins.device)
