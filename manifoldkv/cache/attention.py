"""Attention over a compressed cache, without full keys or values of all tokens.

Keys stored after rotation: queries are projected and scored against latents. Keys stored before
rotation: latents are up-projected and rotated one tile of tokens at a time. Values: attention
weights mix latents, and the mixtures are up-projected, once per query.

With many queries, those of a prompt, that would repeat the same products: keys and values of the
layer are reconstructed while its attention lasts, for torch's kernel. So are latents of a linear
predictor's residuals, for any number of queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from manifoldkv.basis import HeadGrouping
from manifoldkv.cache.latents import RunningBasis, product, scores_of
from manifoldkv.cache.layers import CompressedLayer
from manifoldkv.cache.prediction import PredictedSites, Reconstruction
from manifoldkv.cache.storage import ExactStore, Store, split_tiles
from manifoldkv.coding.predictor import PredictorContext
from manifoldkv.models.interface import AttentionSettings, weights_from_scores
from manifoldkv.models.rotary import Angles

ELEMENTS_AT_A_TIME = 1 << 19
"""Elements of up-projected keys or dequantized latents held at a time, for a processor's cache."""
SCORES_AT_A_TIME = 1 << 24
"""Scores held at a time; longer prompts are attended to in blocks of queries."""
MANY_QUERIES = 32
"""Smallest number of queries of a call for which keys and values are reconstructed."""
MASKED_AT_A_TIME = 1 << 26
"""Elements of the mask that is built at a time for such queries."""


@dataclass(frozen=True)
class _Seen:
    """Tokens that some queries attend to: latents, then uncompressed tokens, then sink tokens.

    Tokens are counted from the first visible one. Sink tokens have latents too: the mask shows each
    of them to a query once.

    Parameters
    ----------
    offset : int
        Index of the first visible token in the stores of latents.
    latents : int
        Number of first tokens that are visible as latents.
    exact : list of tuple of Tensor
        Keys and values of uncompressed tokens, (B, H_kv, t, d) each; keys are rotated.
    mask : Tensor or None
        Visibility of tokens, (B or 1, 1, m, `latents` and all t), bool.
    rebuilt : tuple of Tensor or None
        Reconstructed keys before rotation and values of the latents, (B, H_kv, `latents`, d) each,
        with a linear predictor.
    """

    offset: int
    latents: int
    exact: list[tuple[Tensor, Tensor]]
    mask: Tensor | None
    rebuilt: tuple[Tensor, Tensor] | None = None

    def with_rebuilt(self, found: Reconstruction, grouping: HeadGrouping) -> _Seen:
        """Return a copy with the reconstructed keys and values of the latents."""
        if not self.latents:
            return self
        seen = slice(self.offset, self.offset + self.latents)
        keys, values = found
        return replace(
            self,
            rebuilt=(
                grouping.merge(keys[..., seen].mT.unsqueeze(1)),
                grouping.merge(values[..., seen].mT.unsqueeze(1)),
            ),
        )


class CachedAttention:
    """Attention of one layer over its compressed cache.

    Parameters
    ----------
    key, value : RunningBasis
        Bases of the layer's keys and values.
    exact_prefill : bool
        Whether tokens of the same call attend to each other's uncompressed keys and values.
    predicted : PredictedSites or None
        Storage of tokens with a linear predictor, keys before rotation.
    """

    def __init__(
        self,
        key: RunningBasis,
        value: RunningBasis,
        exact_prefill: bool,
        predicted: PredictedSites | None = None,
    ) -> None:
        self._key = key
        self._value = value
        self._exact_prefill = exact_prefill
        self._predicted = predicted

    def store(
        self, layer: CompressedLayer, keys: Tensor, values: Tensor, context: PredictorContext
    ) -> Reconstruction | None:
        """Store new keys and values (B, H_kv, m, d) in a layer of the cache.

        With predictors, the reconstruction of the layer is appended to the context and returned.
        """
        if self._predicted is not None:
            return self._predicted.store(layer, keys, values, context)
        layer.advance(keys.shape[2])
        layer.append(self._key.latents(keys), self._value.latents(values))
        return None

    def attend(
        self,
        layer: CompressedLayer,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        settings: AttentionSettings,
        angles: Angles | None,
        context: PredictorContext,
    ) -> Tensor:
        """Store new tokens and return the attention output, (B, H_q, m, d).

        Parameters
        ----------
        layer : CompressedLayer
            Layer of the cache.
        queries : Tensor
            Rotated queries, (B, H_q, m, d).
        keys, values : Tensor
            New keys and values, (B, H_kv, m, d); keys are rotated if and only if `angles` is None.
        mask : Tensor or None
            Visibility of tokens, (B or 1, 1, m, n), bool; None for a causal mask.
        settings : AttentionSettings
            Scaling, soft cap and sink logits.
        angles : Angles or None
            Angles of all n tokens, for keys stored before rotation.
        context : PredictorContext
            Reconstructions of lower layers, to which predictors append this layer's.
        """
        count = queries.shape[2]
        visible, _ = layer.get_mask_sizes(count)
        past = visible - count
        outputs, done = [], 0
        for piece in layer.key_store.pieces(count):
            new = slice(done, done + piece)
            done += piece
            rebuilt = self.store(layer, keys[:, :, new], values[:, :, new], context)
            # The last query sees all tokens but padding.
            shown = None if mask is None else mask[:, 0, -1, past:][:, new]
            layer.sinks.take(keys[:, :, new], values[:, :, new], past + new.start, shown, angles)
            if self._reconstructs(piece, settings):
                blocks = _blocks(new, past + done, MASKED_AT_A_TIME)
            else:
                scores = queries.shape[0] * queries.shape[1] * (past + done)
                blocks = _blocks(new, scores, SCORES_AT_A_TIME)
            for rows in blocks:
                seen = self._seen(layer, rows, past, past + done, mask, (keys, values), angles)
                if rebuilt is not None:
                    seen = seen.with_rebuilt(rebuilt, self._key.grouping)
                outputs.append(
                    self._attend_rows(layer, queries[:, :, rows], seen, settings, angles)
                )
        layer.forget_old()
        return _joined(outputs, dim=2)

    def _seen(
        self,
        layer: CompressedLayer,
        rows: slice,
        past: int,
        tokens: int,
        mask: Tensor | None,
        new: tuple[Tensor, Tensor],
        angles: Angles | None,
    ) -> _Seen:
        """Return the tokens that queries `rows` of a call attend to.

        Before the call, `past` tokens were visible, and `tokens` are with those of the call, whose
        keys and values are `new`.
        """
        device = new[0].device
        own = past if self._exact_prefill and new[0].shape[2] > 1 else tokens
        stop = tokens if mask is not None else past + rows.stop
        sees = _rows_of_mask(mask, rows, past, stop, device)
        offset = layer.tokens_held - tokens
        latents = min(own, stop)
        exact, of_sinks = [], None
        if layer.sinks.size:
            if sees is None:
                sees = torch.ones(1, 1, 1, stop, dtype=torch.bool, device=device)
            sees, of_sinks = layer.sinks.split(sees)
        if latents < stop:
            keys = new[0][:, :, latents - past : stop - past]
            values = new[1][:, :, latents - past : stop - past]
            if angles is not None:
                keys = angles.tile(keys.to(angles.cos.dtype), latents, stop)
            exact.append((keys, values))
        if sees is not None and of_sinks is not None:
            exact.append(layer.sinks.seen())
            sees = torch.cat([sees, of_sinks], dim=-1)
        return _Seen(offset, latents, exact, sees)

    def _attend_rows(
        self,
        layer: CompressedLayer,
        queries: Tensor,
        seen: _Seen,
        settings: AttentionSettings,
        angles: Angles | None,
    ) -> Tensor:
        """Return the attention output of some queries (B, H_q, m, d) of a call."""
        batch, heads, rows, head_dim = queries.shape
        kv_heads = self._key.grouping.heads
        queries = queries.reshape(batch, kv_heads, -1, head_dim)  # (B, H_kv, R, d)
        queries = queries * settings.scaling
        if angles is None and not seen.exact and self._kernel_fits(layer, settings):
            output = self._attend_at_once(layer, queries, seen)
            return output.reshape(batch, heads, rows, -1)
        if self._reconstructs(rows, settings):
            output = self._attend_reconstructed(layer, queries, rows, seen, angles)
            return output.reshape(batch, heads, rows, -1)
        scores = list(self._scores(layer, queries, angles, seen))
        scores += [scores_of(queries, keys) for keys, _ in seen.exact]
        by_row = _joined(scores).unflatten(2, (-1, rows))  # (B, H_kv, H_q / H_kv, m, n)
        by_row = by_row.to(torch.promote_types(by_row.dtype, torch.float32))
        weights = weights_from_scores(by_row, seen.mask, settings).flatten(2, 3)  # (B, H_kv, R, n)
        output = self._mix(layer, weights, seen)
        start = seen.latents
        for _, values in seen.exact:
            stop = start + values.shape[2]
            output = output + product(weights[..., start:stop].to(values.dtype), values)
            start = stop
        # Reconstructed values are in float32 on a CPU, and so is a sum with them.
        return output.to(queries.dtype).reshape(batch, heads, rows, -1)

    def _kernel_fits(self, layer: CompressedLayer, settings: AttentionSettings) -> bool:
        """Return whether torch's attention kernel can run on the latents of both sites."""
        return (
            all(isinstance(store, ExactStore) for store in layer.stores)
            and self._key.grouping.width == self._value.grouping.width
            and self._key.features == self._value.features
            and settings.softcap is None
            and settings.sinks is None
        )

    def _attend_at_once(self, layer: CompressedLayer, queries: Tensor, seen: _Seen) -> Tensor:
        """Run torch's kernel on latents; rows are all queries of a head group."""
        _, _, keys = next(_tiles(layer.key_store, seen, seen.latents))
        _, _, values = next(_tiles(layer.value_store, seen, seen.latents))
        by_group = self._key.queries(queries)  # (B, G, w·R, w·r)
        mask = seen.mask
        if mask is not None:
            mask = mask.repeat(1, 1, by_group.shape[2] // mask.shape[2], 1)
        mixed = scaled_dot_product_attention(by_group, keys, values, attn_mask=mask, scale=1.0)
        return self._value.finish(self._value.split_groups(mixed))

    def _reconstructs(self, rows: int, settings: AttentionSettings) -> bool:
        """Return whether queries attend to reconstructed keys and values."""
        plain = settings.softcap is None and settings.sinks is None
        return plain and rows >= MANY_QUERIES

    def _attend_reconstructed(
        self,
        layer: CompressedLayer,
        queries: Tensor,
        rows: int,
        seen: _Seen,
        angles: Angles | None,
    ) -> Tensor:
        """Run torch's kernel on reconstructed keys and values.

        Queries are scaled, (B, H_kv, R, d) with `rows` of every query head; the output is alike.
        """
        keys, values = [], []
        for start, stop, x in self._rebuilt_keys(layer, seen, _tile_tokens(queries)):
            keys.append(x if angles is None else angles.tile(x, start, stop))
        if seen.rebuilt is not None:
            values.append(seen.rebuilt[1])
        else:
            for _, _, latents in _tiles(layer.value_store, seen, _tile_tokens(queries)):
                values.append(self._value.up_project(latents))
        for exact_keys, exact_values in seen.exact:
            keys.append(exact_keys)
            values.append(exact_values)
        dtype = torch.promote_types(values[0].dtype, queries.dtype)
        mask = seen.mask
        if mask is not None:
            mask = mask | ~mask.any(dim=-1, keepdim=True)  # no empty rows for padded queries
        by_head = queries.unflatten(2, (-1, rows)).flatten(1, 2).to(dtype)  # (B, H_q, m, d)
        output = scaled_dot_product_attention(
            by_head,
            _joined(keys, dim=2).to(dtype),
            _joined(values, dim=2).to(dtype),
            attn_mask=mask,
            scale=1.0,
            enable_gqa=True,
        )
        return output.to(queries.dtype)

    def _scores(
        self, layer: CompressedLayer, queries: Tensor, angles: Angles | None, seen: _Seen
    ) -> Iterator[Tensor]:
        """Yield the scores (B, H_kv, R, t) of the latents, by tile."""
        if angles is None:
            queries = self._key.queries(queries)
            for _, _, latents in _tiles(layer.key_store, seen, _tile_tokens(queries)):
                yield self._key.scores(queries, latents)
            return
        for start, stop, keys in self._rebuilt_keys(layer, seen, _tile_tokens(queries)):
            yield scores_of(queries, angles.tile(keys.to(angles.cos.dtype), start, stop))

    def _rebuilt_keys(
        self, layer: CompressedLayer, seen: _Seen, size: int
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield reconstructed keys (B, H_kv, t, d) of the latents, by tile."""
        if seen.rebuilt is not None:
            for start, stop in split_tiles(0, seen.latents, size):
                yield start, stop, seen.rebuilt[0][:, :, start:stop]
            return
        for start, stop, latents in _tiles(layer.key_store, seen, size):
            for first, last in split_tiles(start, stop, size):
                yield first, last, self._key.up_project(latents[:, :, first - start : last - start])

    def _mix(self, layer: CompressedLayer, weights: Tensor, seen: _Seen) -> Tensor:
        """Return values mixed by weights, (B, H_kv, R, d)."""
        if seen.rebuilt is not None:
            values = seen.rebuilt[1]
            return product(weights[..., : seen.latents].to(values.dtype), values)
        mixed = weights.new_zeros(*weights.shape[:3], self._value.features)
        for start, stop, latents in _tiles(layer.value_store, seen, _tile_tokens(mixed)):
            mixed = mixed + self._value.mix(weights[..., start:stop], latents)
        return self._value.finish(mixed, weights[..., : seen.latents])


def _tile_tokens(x: Tensor) -> int:
    """Return the number of tokens of a tile with the batch, heads and features of x."""
    return max(1, ELEMENTS_AT_A_TIME // (x.shape[0] * x.shape[1] * x.shape[3]))


def _tiles(store: Store, seen: _Seen, size: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the visible latents by tile."""
    if not seen.latents:
        return
    for start, stop, latents in store.tiles(seen.offset, size):
        stop = min(stop, seen.latents)
        if start < stop:
            yield start, stop, latents[:, :, : stop - start]


def _joined(tiles: list[Tensor], dim: int = -1) -> Tensor:
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=dim)


def _blocks(rows: slice, elements_per_row: int, elements: int) -> Iterator[slice]:
    """Cut query rows into blocks of at most `elements` elements."""
    size = max(1, elements // elements_per_row)
    for start, stop in split_tiles(rows.start, rows.stop, size):
        yield slice(start, stop)


def _rows_of_mask(
    mask: Tensor | None, rows: slice, past: int, tokens: int, device: torch.device
) -> Tensor | None:
    """Return the mask of some queries of a call, (B or 1, 1, rows, tokens), causal by default.

    The call's first query has `past` tokens before it. The mask of a whole prompt is never built.
    """
    if mask is not None:
        return mask[:, :, rows, :tokens]
    if rows.stop - rows.start == 1 and tokens == past + rows.stop:
        return None
    own = torch.arange(rows.start, rows.stop, device=device) + past
    return (torch.arange(tokens, device=device) <= own.unsqueeze(1)).view(1, 1, -1, tokens)
