"""Attention of many texts over packed latents in pages, engine by engine the same.

New tokens are encoded into pages. A single new token of a text attends by the compiled kernel to
the pages where they lie; several attend to the text's latents, gathered as in a compressed cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from manifoldkv.core.basis import SITES
from manifoldkv.core.errors import PlanError
from manifoldkv.core.modes import in_own_modes
from manifoldkv.models.interface import AttentionSettings
from manifoldkv.models.rotary import Angles
from manifoldkv.plan.composition import Composer
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.predictor import Input, PredictorContext
from manifoldkv.serve.cache.attention import CachedAttention
from manifoldkv.serve.cache.layers import CompressedCache, CompressedLayer
from manifoldkv.serve.cache.mixed import WidthStore
from manifoldkv.serve.cache.numba_backend import NumbaBackend
from manifoldkv.serve.engines.pages import LayerPages, PageLayout, Places, SinkPages
from manifoldkv.serve.kernels.views import Array, Packed

CPU = torch.device("cpu")
LARGEST_PAGE = 512
"""Most tokens of a page: those of a tile of the kernels."""


@dataclass(frozen=True)
class Batch:
    """Texts of one forward pass.

    Parameters
    ----------
    starts : list of int
        First row of every text among the new tokens of all, and their number at last.
    lengths : list of int
        Tokens of every text, new ones included.
    tables : ndarray
        Pages of every text, (texts, most pages of a text), int32.
    """

    starts: list[int]
    lengths: list[int]
    tables: Array


@dataclass
class _Text:
    """Several new tokens of a text, or its first ones."""

    rows: slice
    past: int
    length: int
    pages: Tensor
    places: Places
    sinks: int
    inverse: Angles
    cache: CompressedCache
    context: PredictorContext


@dataclass
class _Tokens:
    """A new token of each of some texts, which attends by the kernel."""

    rows: Tensor
    places: Places
    sinks: Tensor  # their keys and values in all layers, (L, 2, B, H_kv, s, d), float32
    inverse: Angles
    tiles: Array
    context: PredictorContext


@dataclass
class _Pass:
    """State of a forward pass."""

    texts: list[_Text] = field(default_factory=list)
    tokens: _Tokens | None = None


class PagedCache:
    """Packed latents of many texts in pages.

    Parameters
    ----------
    plan : CompressionPlan
        Of the model.
    dtype : torch.dtype
        Of the model.
    angles : Angles
        Of all positions, (1, positions, rotary dimension).
    scaling : float
        Factor of scores.

    Raises
    ------
    PlanError
        If the kernel takes no such plan.
    """

    @in_own_modes
    def __init__(
        self, plan: CompressionPlan, dtype: torch.dtype, angles: Angles, scaling: float
    ) -> None:
        check_plan(plan)
        self._plan, self._dtype = plan, dtype
        self._settings = AttentionSettings(scaling)
        # Tokens last in memory, as kernels take them.
        cos, sin = (x.float().mT.contiguous().mT for x in (angles.cos, angles.sin))
        self._angles = Angles(cos, sin, angles.rotate)
        self._inverse = self._angles.inverse()
        count, composer = len(plan.layers), Composer(plan.layers)
        self._backends = [NumbaBackend.of(composer, i, dtype, CPU) for i in range(count)]
        if not all(backend.attends(self._angles) for backend in self._backends):
            raise PlanError(
                "a layer of the plan depends on the latents of too many layers, or its rotation is "
                "not in pairs of features: make a plan with recipe bits"
            )
        self._heads = plan.layers[0].key.grouping.heads
        self._attentions = [CachedAttention(x, exact_prefill=False) for x in self._backends]
        head_dim = plan.layers[0].key.features // self._heads
        self.sinks = SinkPages(count, (self._heads, plan.sinks, head_dim), dtype)
        self._pages: dict[int, LayerPages] = {}
        self._page_tokens = 0
        self._new = self._new_cache()  # tokens of `_Tokens`, for a moment
        self._caches: list[CompressedCache] = []
        self._pass = _Pass()

    def bind(self, index: int, layout: PageLayout, memory: Tensor) -> None:
        """Let a layer use pages in an engine's memory, (pages, bytes of a page), uint8.

        Pages have more tokens than the plan has sink tokens, and at most `LARGEST_PAGE`.
        """
        self._pages[index] = LayerPages(layout, memory)
        self._page_tokens = layout.tokens

    @in_own_modes
    def begin(self, batch: Batch) -> None:
        """Begin a forward pass, before the first layer."""
        self._pass, single = _Pass(), []
        size, sinks = self._page_tokens, self.sinks.size
        for index, length in enumerate(batch.lengths):
            start, stop = batch.starts[index : index + 2]
            past = length - (stop - start)
            table = batch.tables[index, : -(-length // size)]
            self.sinks.drop(table[max(1, past // size) :].tolist())
            if stop - start == 1 and past >= sinks:
                single.append((index, start, past))
            elif stop > start:
                self._pass.texts.append(self._text(slice(start, stop), past, table))
        if single:
            self._pass.tokens = self._tokens(single, batch)

    @in_own_modes
    def attend(self, index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Store the new tokens of a layer and return the attention output, (tokens, H_q, d).

        Parameters
        ----------
        index : int
            Of the layer.
        queries : Tensor
            Rotated queries of the new tokens of all texts, (tokens, H_q, d).
        keys, values : Tensor
            Rotated keys, and values, (tokens, H_kv, d).
        """
        output = torch.empty_like(queries)
        new = self._pass.tokens
        if new is not None:
            rows = new.rows
            if len(rows) == len(queries):
                return self._decode(index, new, queries, keys, values)
            output[rows] = self._decode(index, new, queries[rows], keys[rows], values[rows])
        for text in self._pass.texts:
            rows_of_text = text.rows
            output[rows_of_text] = self._read(
                index, text, queries[rows_of_text], keys[rows_of_text], values[rows_of_text]
            )
        return output

    def _text(self, rows: slice, past: int, table: Array) -> _Text:
        number = len(self._pass.texts)
        if number == len(self._caches):
            self._caches.append(self._new_cache())
        cache = self._caches[number]
        cache.reset()
        length = past + rows.stop - rows.start
        pages, positions = table.astype(np.int64), np.arange(past, length)
        places = Places(pages[positions // self._page_tokens], positions % self._page_tokens)
        sinks = 0
        if self.sinks.size:
            find = self.sinks.slot_of if past else self.sinks.begin_text
            sinks = find(int(table[0]))
        inverse = self._inverse.of_tokens(past, length)
        context = self._plan.predictor_context()
        held = torch.from_numpy(pages)
        return _Text(rows, past, length, held, places, sinks, inverse, cache, context)

    def _tokens(self, single: list[tuple[int, int, int]], batch: Batch) -> _Tokens:
        size = self._page_tokens
        texts, rows, past = (torch.tensor(x) for x in zip(*single, strict=True))
        tables = batch.tables[texts.numpy()]
        positions = past.numpy()
        pages = tables[np.arange(len(tables)), positions // size].astype(np.int64)
        sinks = self.sinks.of_texts(tables[:, 0].tolist())
        tiles = page_tiles(tables, (past + 1).tolist(), size, self.sinks.size)
        cos, sin = self._inverse.cos[:, past], self._inverse.sin[:, past]
        inverse = Angles(cos, sin, self._inverse.rotate)
        context = self._plan.predictor_context()
        return _Tokens(rows, Places(pages, positions % size), sinks, inverse, tiles, context)

    def _decode(
        self, index: int, new: _Tokens, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Return the attention output of one new token of every text, (texts, H_q, d)."""
        new.context.begin(index)
        layer, backend = self._new.layers[index], self._backends[index]
        before, values = _unrotated(keys, new.inverse), values.transpose(0, 1).unsqueeze(0)
        backend.store(layer, before, values, new.context)
        self._write(index, layer, new.places)
        for store in (layer.key_store, layer.value_store):
            store.drop_last(len(new.rows))
        by_head = queries.unflatten(1, (self._heads, -1)).float() * self._settings.scaling
        sinks = new.sinks[index, 0], new.sinks[index, 1]

        def packed(one: Input) -> Packed:
            return self._pages[index - one[0]].packed(one[1])

        attended = backend.attend_packed(
            by_head.contiguous(), packed, self._angles, sinks, new.tiles
        )
        return attended.flatten(1, 2).to(queries.dtype)

    def _read(
        self, index: int, text: _Text, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Return the attention output of several new tokens of a text, (tokens, H_q, d)."""
        reach = self._plan.reach
        layers = text.cache.layers[max(0, index - reach) : index + 1][::-1]
        self._load(index, text)
        text.context.begin(index)
        output = self._attentions[index].attend(
            layers,
            queries.transpose(0, 1).unsqueeze(0),
            _unrotated(keys, text.inverse),
            values.transpose(0, 1).unsqueeze(0),
            None,
            self._settings,
            self._angles.of_tokens(0, text.length),
            text.context,
        )
        self._write(index, layers[0], text.places)
        first = self.sinks.size - text.past
        if first > 0:
            held = self.sinks.memory[index, :, text.sinks, :, text.past :]  # (2, H_kv, t, d)
            for part, x in zip(held, (keys, values), strict=True):
                new = x[:first].transpose(0, 1)
                part[:, : new.shape[1]] = new
        return output[0].transpose(0, 1)

    def _load(self, index: int, text: _Text) -> None:
        """Fill a layer of a text's cache with its tokens in pages."""
        if not text.past:
            return
        layer = text.cache.layers[index]
        layer.advance(text.past)
        for site, store in zip(SITES, (layer.key_store, layer.value_store), strict=True):
            store.append_packed(self._pages[index].read(site, text.pages, text.past))
        if self.sinks.size:
            of_keys, of_values = self.sinks.memory[index, :, text.sinks, None, :, : text.past]
            layer.sinks.take(of_keys, of_values, 0, None, None)

    def _write(self, index: int, layer: CompressedLayer, places: Places) -> None:
        """Copy the newest tokens of a layer to their pages."""
        for site, store in zip(SITES, (layer.key_store, layer.value_store), strict=True):
            assert isinstance(store, WidthStore)
            self._pages[index].write(site, places, store.newest_packed(len(places.pages)))

    def _new_cache(self) -> CompressedCache:
        return CompressedCache(self._plan, self._dtype, [CPU] * len(self._plan.layers))


def check_plan(plan: CompressionPlan) -> None:
    """Raise `PlanError` unless pages can hold the latents of a plan."""
    plan.check_attended()
    for layer in plan.layers:
        PageLayout.of(layer, 2)
        if layer.window is not None:
            raise PlanError(
                f"the plan has a layer with a sliding window of {layer.window} tokens, and pages "
                "hold all tokens of a text: serve a model without windows"
            )
    if plan.rotary != "pre":
        raise PlanError("pages hold keys before rotation: make a plan with rotary=pre")


def page_tiles(tables: Array, lengths: list[int], size: int, skipped: int) -> Array:
    """Return the tokens of texts in their pages, as `serve.kernels.step.attend` takes them.

    Parameters
    ----------
    tables : ndarray
        Pages of every text, (texts, pages).
    lengths : list of int
        Tokens of every text.
    size : int
        Tokens of a page.
    skipped : int
        First tokens of every text that are left out, fewer than a page has.
    """
    tiles = []
    for text, length in enumerate(lengths):
        count = -(-length // size)
        starts = np.arange(count) * size
        of_text = np.empty((count, 5), np.int64)
        of_text[:, 0] = text
        of_text[:, 1] = tables[text, :count]
        of_text[:, 2] = 0
        of_text[:, 3] = np.minimum(size, length - starts)
        of_text[:, 4] = starts
        of_text[0, 2:] += (skipped, -skipped, skipped)
        tiles.append(of_text)
    return np.concatenate(tiles)


def _unrotated(keys: Tensor, inverse: Angles) -> Tensor:
    """Return keys (tokens, H_kv, d) as they were before rotation, (1, H_kv, tokens, d)."""
    by_head = keys.transpose(0, 1).unsqueeze(0)
    return inverse.tile(by_head.to(inverse.cos.dtype), 0, len(keys))
