"""Packed latents in the pages of a serving engine: layout, reads and writes.

A page holds some tokens of one layer. Its bytes are rows over these tokens: the rows of the keys'
latents and scales, and those of the values. A token's bytes depend on itself and on the tokens
before it alone, so that texts with the same beginning share pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from manifoldkv.core.basis import SITES, Site
from manifoldkv.core.errors import CacheError, PlanError
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.serve.kernels.views import Array, Packed


@dataclass(frozen=True)
class PageLayout:
    """Layout of a page of one layer.

    Parameters
    ----------
    tokens : int
        Tokens of a page, even.
    rows : tuple of int
        Bytes of a token's key and value.
    """

    tokens: int
    rows: tuple[int, int]

    @classmethod
    def of(cls, layer: LayerPlan, tokens: int) -> PageLayout:
        """Return the layout of pages of some tokens.

        Raises
        ------
        PlanError
            If latents are stored in another format than mixed widths.
        """
        rows = []
        for _, planned in layer.sites:
            if planned.packed is None:
                raise PlanError(
                    f"pages hold latents in mixed widths, and the plan has {planned.quantizer.name}"
                    ": make a plan with recipe bits"
                )
            rows.append(planned.packed.nbytes(1, planned.latents, 1))
        return cls(tokens, (rows[0], rows[1]))

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of a token."""
        return sum(self.rows)

    @property
    def nbytes(self) -> int:
        """Return the bytes of a page."""
        return self.tokens * self.bytes_per_token


class Places(NamedTuple):
    """Where some tokens are stored.

    Parameters
    ----------
    pages, rows : ndarray
        Page of every token and its row in the page, (m,), int64.
    """

    pages: Array
    rows: Array


class LayerPages:
    """The pages of one layer, in memory of an engine.

    Parameters
    ----------
    layout : PageLayout
        Of the layer.
    memory : Tensor
        (pages, bytes of a page), uint8, contiguous; shared, not copied.
    """

    def __init__(self, layout: PageLayout, memory: Tensor) -> None:
        rows = memory.unflatten(1, (-1, layout.tokens)).split(layout.rows, dim=1)
        self._sites = dict(zip(SITES, rows, strict=True))  # (pages, rows, tokens)
        self._packed = {site: Packed.of(codes) for site, codes in self._sites.items()}
        # NumPy assigns a token in a third of torch's time.
        self._arrays = {site: codes.numpy() for site, codes in self._sites.items()}

    def packed(self, site: Site) -> Packed:
        """Return the latents of a site as kernels take them, pages being a batch."""
        return self._packed[site]

    def read(self, site: Site, pages: Tensor, tokens: int) -> Tensor:
        """Return the first tokens of a text, (1, 1, bytes, n).

        Parameters
        ----------
        site : {"key", "value"}
            Site of the latents.
        pages : Tensor
            Pages of the text, int64.
        tokens : int
            Number of tokens, n.
        """
        rows = self._sites[site][pages].transpose(0, 1).flatten(1)[:, :tokens]
        return rows[None, None]

    def write(self, site: Site, places: Places, codes: Tensor) -> None:
        """Write tokens, (1, 1, bytes, m).

        Parameters
        ----------
        site : {"key", "value"}
            Site of the latents.
        places : Places
            Of the tokens.
        codes : Tensor
            Packed latents.
        """
        self._arrays[site][places.pages, :, places.rows] = codes.numpy()[0, 0].T


class SinkPages:
    """Uncompressed sink tokens of texts, by the first page of the text.

    They are held beside the pages: the rotated keys and the values of as many first tokens, for
    every first page that the engine holds. A page that becomes another one loses them.

    Parameters
    ----------
    layers : int
        Layers of the model.
    shape : tuple of int
        KV heads, sink tokens and features of a head.
    dtype : torch.dtype
        Of keys and values.
    """

    def __init__(self, layers: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        self.size = shape[1]
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._shape = shape
        self.memory = torch.empty(layers, 2, 0, *shape, dtype=dtype)  # (L, 2, slots, H_kv, s, d)

    @property
    def nbytes(self) -> int:
        """Return the allocated bytes."""
        return self.memory.nbytes

    def of_texts(self, pages: Sequence[int]) -> Tensor:
        """Return the sink tokens of texts by first page, (L, 2, B, H_kv, s, d), float32."""
        if not self.size:
            return torch.empty(*self.memory.shape[:2], len(pages), *self._shape)
        slots = torch.tensor([self.slot_of(page) for page in pages])
        return self.memory.index_select(2, slots).float()

    def begin_text(self, page: int) -> int:
        """Return the slot of a first page, or a new one."""
        if page not in self._slots:
            if not self._free:
                self._grow()
            self._slots[page] = self._free.pop()
        return self._slots[page]

    def slot_of(self, page: int) -> int:
        """Return the slot of a first page that holds sink tokens."""
        if page not in self._slots:
            raise CacheError(f"page {page} begins a text whose first tokens are not held")
        return self._slots[page]

    def drop(self, pages: Iterable[int]) -> None:
        """Release the slots of pages that hold other tokens from now on."""
        for page in pages:
            slot = self._slots.pop(page, None)
            if slot is not None:
                self._free.append(slot)

    def _grow(self) -> None:
        layers, _, held = self.memory.shape[:3]
        more = max(16, held // 4)
        new = self.memory.new_zeros(layers, 2, held + more, *self._shape)
        new[:, :, :held] = self.memory
        self.memory = new
        self._free += range(held, held + more)
